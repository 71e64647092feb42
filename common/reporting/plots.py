"""Records to pictures: losses and memory."""

from itertools import chain

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from common.base.specs import TASKS, Task
from common.records.store import Record
from common.reporting.rows import task_of


def plot_losses(record: Record) -> Figure:
    """Plot training and validation loss over the steps."""
    task = TASKS.get(task_of(record), Task)
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for name in ("training", "validation"):
        axes.plot(*zip(*record[f"{name}_losses"], strict=True), marker=".", label=name)
    axes.set(xlabel="optimizer step", ylabel=f"loss (nats per {task.loss_per})", title=record["run_name"])
    axes.legend()
    return figure


def plot_memory(record: Record) -> Figure:
    """Plot each device's peak in each phase, planned beside measured: what is allocated on a GPU, tensors on a CPU."""
    devices = record["memory"]
    figure, panels = plt.subplots(
        1, len(devices), sharey=True, squeeze=False, figsize=(4.5 + 2.5 * len(devices), 3.6), layout="constrained"
    )
    both = [entry[f"{kind}_gib_by_phase"] for entry in devices for kind in ("planned", "peak")]
    measured_gib = [gib for by_phase in both[1::2] for gib in by_phase.values()]
    unit, per_gib = ("GiB", 1) if max(measured_gib) >= 1 else ("MiB", 2**10)
    for axes, entry in zip(panels[0], devices, strict=True):
        kinds = {"planned": entry["planned_gib_by_phase"], "measured": entry["peak_gib_by_phase"]}
        peaks = per_gib * pd.DataFrame(kinds, dict.fromkeys(chain(*both)), dtype=float)
        peaks.plot.barh(ax=axes, width=0.8, legend=False, xlabel=f"peak of allocated tensors ({unit})")
        for bars in axes.containers:
            axes.bar_label(bars, fmt=lambda peak: f" {peak:.3g}" if peak else "", fontsize=8)
        axes.set(title=f"rank {entry['rank']}: {entry['device']}, {entry['total_gib']:.1f} GiB")
        axes.margins(x=0.15)
    panels[0, 0].invert_yaxis()
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure
