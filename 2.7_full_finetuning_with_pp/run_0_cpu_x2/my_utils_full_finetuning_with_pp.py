"""What only pipeline parallel needs: this rank's stage with what is to be trained, and a look at all stages."""

import pandas as pd
from peft import PeftModel
from transformers import PreTrainedModel

from common.runtime.recorder import RunLog
from common.training import pipeline
from common.training.placement import Placement


def trained_stage(log: RunLog, placement: Placement) -> PreTrainedModel | PeftModel:
    """This rank's layers with the trained weights switched on; with `--technique lora` adapters beside frozen ones."""
    return pipeline.trained_stage(log.run, placement.stage_map, log.rank)


def stage_table(placement: Placement) -> pd.DataFrame:
    """What each stage holds, and its peak as planned (projected)."""
    plan = placement.plan
    return pd.DataFrame({
        "stage": range(len(plan.shares)),
        "layers": [sum(share.layers) for share in plan.shares],
        "embeddings": ["yes" if share.has_embeddings else "" for share in plan.shares],
        "head": ["yes" if share.has_head else "" for share in plan.shares],
        "micro-batches in flight": [share.in_flight for share in plan.shares],
        "planned peak (GiB)": [round(memory.peak_gib, 3) for memory in plan.devices],
    })  # fmt: skip
