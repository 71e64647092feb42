"""What only pipeline parallel needs to show: a look at all stages, and what their schedules bring."""

import pandas as pd

from common.measuring.pipeline_measure import measure_pipeline
from common.models.placement import Placement
from common.training.loop import TrainingLoop
from common.training.steps import Metrics


def stage_table(placement: Placement) -> pd.DataFrame:
    """Return what each stage holds, and its peak as planned (projected)."""
    plan = placement.plan
    return pd.DataFrame({
        "stage": range(len(plan.shares)),
        "layers": [sum(share.layers) for share in plan.shares],
        "embeddings": ["yes" if share.has_embeddings else "" for share in plan.shares],
        "head": ["yes" if share.has_head else "" for share in plan.shares],
        "micro-batches in flight": [share.in_flight for share in plan.shares],
        "planned peak (GiB)": [round(memory.peak_gib, 3) for memory in plan.devices],
    })  # fmt: skip


def measure(loop: TrainingLoop) -> Metrics | None:
    """Time GPipe and 1F1B against naive model parallel; on CPU only, as a GPU may lack the memory."""
    if loop.run.device == "cuda":
        return None
    with loop.log.phase("measure the pipeline"):
        return measure_pipeline(loop)
