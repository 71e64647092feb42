"""What only pipeline parallel needs to show: a look at all stages, and what their schedules bring."""

from typing import TYPE_CHECKING

import pandas as pd

from common.measuring.pipeline_measure import measure_pipeline
from common.models.placement import Placement
from common.reporting.rows import SCHEDULES
from common.training.loop import TrainingLoop
from common.training.steps import Metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PASS_COLOURS = {"forward": "#9ecae1", "loss": "#9ecae1", "backward": "#fdae6b"}


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


def plot_timeline(passes_by_schedule: dict[str, list[list[tuple[str, int, float, float]]]]) -> "Figure":
    """Plot when each stage worked on which micro-batch in one step, one schedule below the other on the same time axis.

    What is white is idle. `passes_by_schedule` is a record's `pipeline["passes"]`: for each schedule and stage the
    passes, each with its kind, its micro-batch, and its start and end in seconds since the step began.
    """
    import matplotlib.pyplot as plt  # here: a run draws nothing

    height = 1.6 + 0.45 * sum(len(stages) for stages in passes_by_schedule.values())
    figure, panels = plt.subplots(
        len(passes_by_schedule), sharex=True, squeeze=False, figsize=(9, height), layout="constrained"
    )
    for axes, (schedule, stages) in zip(panels[:, 0], passes_by_schedule.items(), strict=True):
        for stage, passes in enumerate(stages):
            for kind, micro_batch, start_s, end_s in passes:
                bar = axes.barh(stage, (end_s - start_s) * 1e3, left=start_s * 1e3, color=PASS_COLOURS[kind],
                                edgecolor="white", linewidth=0.5)  # fmt: skip
                if kind != "loss" and len(passes) > 3:
                    axes.bar_label(bar, [str(micro_batch)], label_type="center", fontsize=7)
        axes.set(yticks=range(len(stages)), yticklabels=[f"stage {stage}" for stage in range(len(stages))])
        axes.set_title(SCHEDULES[schedule], loc="left", fontsize=9)
        axes.invert_yaxis()
    panels[-1, 0].set_xlabel("ms in the step; blue: forward, orange: backward, white: idle; numbers: micro-batch")
    return figure
