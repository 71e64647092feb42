"""Training: the loop over steps, what a rank holds with each parallelism, checkpoints, export, callbacks."""
