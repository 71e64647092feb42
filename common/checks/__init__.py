"""What is checked before a run: its inputs and disk, the planner's command, dry run and preflight."""
