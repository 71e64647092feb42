"""Records to pictures: losses, memory, passes of a pipeline, accuracy and cost."""

import math
from collections.abc import Sequence
from itertools import chain, cycle

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from common.base.inert import printable
from common.base.specs import PARALLELISMS, TASKS, Task
from common.records.store import Record
from common.reporting.rows import SCHEDULES, clock_seconds, metrics_of, task_of

PASS_COLOURS = {"forward": "#9ecae1", "loss": "#9ecae1", "backward": "#fdae6b"}
# Of lines: each colour with each style
LOOKS = [{"linestyle": style, "color": f"C{colour}"} for style in ("-", "--", ":") for colour in range(10)]


def plot_losses(record: Record) -> Figure:
    """Plot training and validation loss over the steps."""
    task = TASKS.get(task_of(record), Task)
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for name in ("training", "validation"):
        axes.plot(*zip(*record[f"{name}_losses"], strict=True), marker=".", label=name)
    axes.set(xlabel="optimizer step", ylabel=f"loss (nats per {task.loss_per})", title=record["run_name"])
    axes.legend()
    return figure


MOST_NAMED = 20  # runs that one picture of curves names; of more, those that ended best


def plot_curves(records: Sequence[Record], labels: Sequence[str]) -> Figure:
    """Plot training loss, validation loss and the metric of several runs over their steps, a line for each run.

    The metric is the validation accuracy where it was measured by step, else the task's first one, before and after.
    Of more runs than `MOST_NAMED` those with the lowest validation loss are named, and the others drawn in grey.
    """
    named = sorted(range(len(records)), key=lambda number: _lowest_loss(records[number]))[:MOST_NAMED]
    figure, panels = plt.subplots(1, 3, figsize=(15, 4.5 + 0.1 * len(named)), layout="constrained")
    looks = dict(zip(sorted(named), cycle(LOOKS)))
    others = [number for number in range(len(records)) if number not in looks]
    for number in (*others, *looks):  # those that are named lie above
        look = looks[number] | {"marker": "."} if number in looks else {"color": "0.8", "linewidth": 0.5}
        metric, direction, points = _metric_by_step(records[number])
        curves = (
            ("training loss", records[number].get("training_losses")),
            ("validation loss", records[number].get("validation_losses")),
            (f"{metric} ({direction} is better)", points),
        )
        for axes, (name, curve) in zip(panels, curves, strict=True):
            label = _plain(labels[number]) if number in looks else "_"  # what begins so, no legend names
            axes.plot(*zip(*curve or [(float("nan"),) * 2], strict=True), label=label, **look)
            axes.set(xlabel="optimizer step", ylabel=axes.get_ylabel() or (name if curve else ""))
    if others:
        figure.suptitle(f"{len(records)} runs: {len(named)} with the lowest validation loss, and the others in grey")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _plain(text: str) -> str:
    """Return a text as Matplotlib shows it, which takes what stands between dollars for a formula."""
    return printable(text).replace("$", r"\$")


def _lowest_loss(record: Record) -> float:
    losses = [loss for _, loss in record.get("validation_losses") or [] if math.isfinite(loss)]
    return min(losses, default=math.inf)


def _metric_by_step(record: Record) -> tuple[str, str, list[tuple[int, float]]]:
    if record.get("validation_accuracies"):
        return "validation accuracy", "higher", record["validation_accuracies"]
    quality = record.get("quality", {})
    for metric in metrics_of(record):
        values = [(quality.get(when) or {}).get(metric.name) for when in ("before", "after")]
        if None not in values:
            return metric.label, metric.direction, list(zip((0, record.get("steps", 1)), values, strict=True))
    return "", "", []


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


def plot_timeline(passes_by_schedule: dict[str, list[list[tuple[str, int, float, float]]]]) -> Figure:
    """Plot when each stage worked on which micro-batch in one step, one schedule below the other on the same time axis.

    What is white is idle. `passes_by_schedule` is a record's `pipeline["passes"]`: for each schedule and stage the
    passes, each with its kind, its micro-batch, and its start and end in seconds since the step began.
    """
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


def plot_placement(table: pd.DataFrame) -> Figure:
    """Plot each device's peak by device map, from `placement_table`: the fullest device decides the batch size."""
    peaks = table.set_index("Device map")["Peak per device (GiB)"].str.split(" / ", expand=True).astype(float)
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    peaks.T.plot.bar(ax=axes, rot=0, xlabel="device", ylabel="peak in training\n(GiB, projected)", legend=False)
    figure.legend(loc="outside upper center", ncols=len(peaks), title="device map")
    return figure


def plot_accuracy(records: list[Record]) -> Figure:
    """Plot validation accuracy over the epochs, a panel for each technique, a line for each parallelism."""
    techniques = list(dict.fromkeys(record["technique"] for record in records))
    figure, panels = plt.subplots(
        1, len(techniques), figsize=(2 + 4 * len(techniques), 3.5), sharey=True, squeeze=False, layout="constrained"
    )
    axes_of = dict(zip(techniques, panels[0], strict=True))
    for record in records:
        name, parts = record["parallel"], record["config"]["micro_batches"]
        if PARALLELISMS[name].pipelines:
            name += f", {parts} micro-batch{'es' * (parts > 1)}"
        steps, shares = zip(*record["validation_accuracies"], strict=True)
        epochs = [step * record["config"]["num_train_epochs"] / record["steps"] for step in steps]
        axes_of[record["technique"]].plot(epochs, shares, marker=".", label=name)
    for technique, axes in axes_of.items():
        axes.set(title=technique, xlabel="epochs", ylabel="validation accuracy")
        axes.legend()
    return figure


def plot_confusion(record: Record) -> Figure:
    """Plot how many test rows of each class the tuned model takes for which class."""
    from sklearn.metrics import ConfusionMatrixDisplay  # here: it takes a second

    after = record["quality"]["after"]
    figure, axes = plt.subplots(figsize=(6, 5), layout="constrained")
    labels = [_plain(label) for label in after["labels"]]
    confusion = ConfusionMatrixDisplay(pd.DataFrame(after["confusion"]).to_numpy(), display_labels=labels)
    confusion.plot(ax=axes, cmap="Blues", xticks_rotation=40, colorbar=False)
    axes.set(xlabel="found", ylabel="meant", title=f"{record['run_name']}: {after['rows']} test rows")
    return figure


def plot_cost(table: pd.DataFrame) -> Figure:
    """Plot time and bill of each line of the table `summarization-cost`, in colours by where the figures come from."""
    kinds = table["Figures"].str.split("[:;]").str[0]
    networks = table["Network"].where(~kinds.eq("published"), "published")
    names = table["Machines"].str.split(" (", regex=False).str[0] + ", " + networks
    values = {"hours": table["Time"].map(clock_seconds) / 3600, "bill (USD)": table["Bill (USD)"].astype(float)}
    figure, panels = plt.subplots(1, 2, sharey=True, figsize=(10, 1 + 0.32 * len(table)), layout="constrained")
    for axes, (label, numbers) in zip(panels, values.items(), strict=True):
        for kind in kinds.unique():
            bars = axes.barh(numbers.index[kinds == kind], numbers[kinds == kind], label=kind)
            axes.bar_label(bars, fmt=" %.2f", fontsize=8)
        axes.set(xlabel=label, xscale="log", xlim=(None, 2.5 * max(numbers)))
    panels[0].set(yticks=range(len(names)), yticklabels=names)
    panels[0].invert_yaxis()
    panels[1].legend()
    return figure
