"""What only sequence parallel needs: how fast ranks that share rows can be."""

from common.training.loop import TrainingLoop


def measure_ceiling(loop: TrainingLoop) -> dict[str, float] | None:
    """Measure the highest possible speed-up."""
    return None
