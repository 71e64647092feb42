"""What is learnt: a task's loss and metrics, and how its answers are evaluated."""
