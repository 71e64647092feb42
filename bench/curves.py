"""The curves of several runs in one picture: losses, and the metric of their task."""

import math
from collections.abc import Sequence
from itertools import cycle

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from common.base.inert import matplotlib_text
from common.records.store import Record
from common.reporting.rows import metrics_of

# Of lines: each colour with each style
LOOKS = [{"linestyle": style, "color": f"C{colour}"} for style in ("-", "--", ":") for colour in range(10)]
MOST_NAMED = 20  # runs that one picture of curves names; of more, those that ended best


def plot_curves(records: Sequence[Record], labels: Sequence[str]) -> Figure:
    """Plot training loss, validation loss and the metric of several runs over their steps, a line for each run.

    The metric is the validation accuracy where it was measured by step, else the task's first one, before and after.
    Of more runs than `MOST_NAMED` those with the lowest validation loss are named, and the others drawn in grey.
    """
    losses = [[loss for _, loss in each.get("validation_losses") or [] if math.isfinite(loss)] for each in records]
    named = sorted(range(len(records)), key=lambda number: min(losses[number], default=math.inf))[:MOST_NAMED]
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
            label = matplotlib_text(labels[number]) if number in looks else "_"  # what begins so, no legend names
            axes.plot(*zip(*curve or [(float("nan"),) * 2], strict=True), label=label, **look)
            axes.set(xlabel="optimizer step", ylabel=axes.get_ylabel() or (name if curve else ""))
    if others:
        figure.suptitle(f"{len(records)} runs: {len(named)} with the lowest validation loss, and the others in grey")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _metric_by_step(record: Record) -> tuple[str, str, list[tuple[int, float]]]:
    if record.get("validation_accuracies"):
        return "validation accuracy", "higher", record["validation_accuracies"]
    quality = record.get("quality", {})
    for metric in metrics_of(record):
        values = [(quality.get(when) or {}).get(metric.name) for when in ("before", "after")]
        if None not in values:
            return metric.label, metric.direction, list(zip((0, record.get("steps", 1)), values, strict=True))
    return "", "", []
