"""What is looked at before a run: inputs, disks, the planner's command, dry run, preflight, the check of GPUs."""
