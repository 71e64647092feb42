"""Records to pictures: losses, scores and memory. Imports matplotlib when something is drawn."""

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from common.run_record import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_losses(record: Record) -> "Figure":
    """Training and validation loss over the steps."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for name, label in (("training_losses", "training"), ("validation_losses", "validation")):
        axes.plot(*zip(*record[name], strict=True), marker=".", label=label)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per answer token)", title=record["run_name"])
    axes.legend()
    return figure


def plot_scores(results_folder: Path) -> "Figure":
    """Similarity score of each test question, before and after, sorted by the score before."""
    import matplotlib.pyplot as plt

    before, after = (pd.read_csv(results_folder / f"predictions_{when}.csv") for when in ("before", "after"))
    order = before["similarity_score"].argsort()
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for table, label in ((before, "before"), (after, "after")):
        axes.plot(table["similarity_score"].iloc[order].to_numpy(), ".", label=label)
    axes.set(xlabel="test question", ylabel="similarity score\n(a distance: lower is better)")
    axes.legend()
    return figure


def plot_memory(record: Record) -> "Figure":
    """Peak memory of each device beside what it has, in GiB: allocated and reserved on a GPU, resident (RSS) on CPU."""
    import matplotlib.pyplot as plt

    memory = pd.DataFrame(record["memory"])
    names = [f"rank {entry['rank']}: {entry['device']}" for entry in record["memory"]]
    figure, axes = plt.subplots(figsize=(7, 1.2 + 0.5 * len(names)), layout="constrained")
    on_gpu = record["config"]["device"] == "cuda"
    for column in ("total_gib", *(("peak_reserved_gib", "peak_allocated_gib") if on_gpu else ("peak_rss_gib",))):
        axes.barh(names, memory[column], label=column.removesuffix("_gib").replace("_", " "))
    axes.set(xlabel="GiB", title=record["run_name"], xscale="linear" if on_gpu else "log")
    axes.invert_yaxis()
    axes.legend()
    return figure
