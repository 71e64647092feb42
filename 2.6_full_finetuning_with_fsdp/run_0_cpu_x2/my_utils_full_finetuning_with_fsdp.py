"""What only sharding needs to show: what each rank holds, beside what one device would, and how fast ranks can be."""

from typing import Any

import pandas as pd

from common.training.ceiling import can_measure_ceiling, measure_machine_ceiling
from common.training.ddp import load_replica
from common.training.loop import TrainingLoop

PARTS = {"weights_bytes": "weights", "gradients_bytes": "gradients", "optimizer_bytes": "optimizer states"}


def held_table(held: dict[str, object]) -> pd.DataFrame:
    """Return what each rank held in the second step, in MiB, beside what one device would."""
    rows = {f"rank {rank}": each for rank, each in enumerate(held["per_rank"])}
    rows["one device would"] = held["whole"]
    table = pd.DataFrame.from_dict(rows, orient="index").rename(columns=PARTS) / 2**20
    return table.assign(together=table.sum(axis=1)).round(2)


def measure_ceiling(loop: TrainingLoop, held: dict[str, Any] | None) -> dict[str, float] | None:
    """Measure the highest possible speed-up; on CPU only, of a model small enough to be whole on each rank."""
    if not can_measure_ceiling(loop.run, held):
        return None
    with loop.log.phase("machine ceiling"):
        return measure_machine_ceiling(loop, load_replica(loop.run, loop.rank))
