"""What only DDP needs: the speed-up that this machine allows, to compare the measured one with."""

from common.training.ceiling import measure_machine_ceiling
from common.training.loop import TrainingLoop


def measure_ceiling(loop: TrainingLoop) -> dict[str, float] | None:
    """Measure the highest possible speed-up; on CPU only, as one GPU may not hold the global batch."""
    if loop.run.device == "cuda":
        return None
    with loop.log.phase("machine ceiling"):
        return measure_machine_ceiling(loop)
