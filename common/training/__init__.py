"""Training: the Trainer and the written-out loop, a strategy for each parallelism, checkpoints, export, callbacks."""
