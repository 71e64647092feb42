"""What only pipeline parallel needs to show: a look at all stages."""

import pandas as pd

from common.models.placement import Placement


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
