"""Training: the trainers of one device and of several, checkpoints, callbacks, and where a model's layers go."""
