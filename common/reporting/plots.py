"""Records to pictures: losses, scores and memory. Imports matplotlib when something is drawn."""

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from common.base.specs import PARALLELISMS
from common.records.store import Record
from common.reporting.rows import clock_seconds

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


PASS_COLOURS = {"forward": "#9ecae1", "loss": "#9ecae1", "backward": "#fdae6b"}
Passes = list[list[tuple[str, int, float, float]]]
"""By stage: kind of pass, micro-batch, start and end in seconds since the step began."""


def plot_timeline(passes_by_schedule: dict[str, Passes]) -> "Figure":
    """When each stage worked on which micro-batch in one step, one picture below the other on the same scale of time.

    What is white is idle. `passes_by_schedule` comes from a record's `pipeline["passes"]`.
    """
    import matplotlib.pyplot as plt

    names = {"naive": "naive model parallel", "gpipe": "GPipe", "1f1b": "1F1B"}
    height = 0.6 + 0.45 * sum(len(stages) for stages in passes_by_schedule.values())
    figure, rows = plt.subplots(
        len(passes_by_schedule), sharex=True, squeeze=False, figsize=(9, height + 1), layout="constrained"
    )
    for axes, (schedule, stages) in zip(rows[:, 0], passes_by_schedule.items(), strict=True):
        for stage, passes in enumerate(stages):
            for kind, micro_batch, start_s, end_s in passes:
                axes.barh(stage, (end_s - start_s) * 1e3, left=start_s * 1e3, color=PASS_COLOURS[kind],
                          edgecolor="white", linewidth=0.5)  # fmt: skip
                if kind != "loss" and len(passes) > 3:
                    axes.text(
                        (start_s + end_s) / 2 * 1e3, stage, str(micro_batch), ha="center", va="center", fontsize=7
                    )
        axes.set(yticks=range(len(stages)), yticklabels=[f"stage {stage}" for stage in range(len(stages))])
        axes.set_title(names.get(schedule, schedule), loc="left", fontsize=9)
        axes.invert_yaxis()
    rows[-1, 0].set_xlabel(
        "ms since the step began; blue: forward, orange: backward, white: idle; numbers: micro-batch"
    )
    return figure


def plot_placement(table: pd.DataFrame) -> "Figure":
    """Peak of each device by device map, from `placement_table`: the fullest one decides the batch."""
    import matplotlib.pyplot as plt

    peaks = {row["Device map"]: [float(gib) for gib in row["Peak per device (GiB)"].split(" / ")]
             for _, row in table.iterrows()}  # fmt: skip
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    pd.DataFrame(peaks).plot.bar(ax=axes, rot=0)
    axes.set(xlabel="device", ylabel="peak in training (GiB), projected")
    return figure


def plot_accuracy(records: list[Record]) -> "Figure":
    """Validation accuracy over the epochs, a panel for each technique, a line for each way to share the work."""
    import matplotlib.pyplot as plt

    techniques = list(dict.fromkeys(record["technique"] for record in records))
    figure, panels = plt.subplots(
        1, len(techniques), figsize=(2 + 4 * len(techniques), 3.5), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, technique in zip(panels[0], techniques, strict=True):
        for record in (record for record in records if record["technique"] == technique):
            config, parts = record["config"], record["config"]["micro_batches"]
            epochs = [
                config["num_train_epochs"] * step / record["steps"] for step, _ in record["validation_accuracies"]
            ]
            in_parts = (
                f", {parts} micro-batch{'es' * (parts > 1)}" if PARALLELISMS[config["parallel"]].pipelines else ""
            )
            name = config["parallel"] + in_parts
            axes.plot(epochs, [share for _, share in record["validation_accuracies"]], marker=".", label=name)
        axes.set(title=technique, xlabel="epochs", ylabel="validation accuracy")
        axes.legend()
    return figure


def plot_confusion(record: Record) -> "Figure":
    """Which classes the tuned model takes for which, of the test rows."""
    import matplotlib.pyplot as plt
    import numpy as np
    from sklearn.metrics import ConfusionMatrixDisplay

    after = record["quality"]["after"]
    figure, axes = plt.subplots(figsize=(6, 5), layout="constrained")
    shown = ConfusionMatrixDisplay(np.array(after["confusion"]), display_labels=after["labels"])
    shown.plot(ax=axes, cmap="Blues", xticks_rotation=40, colorbar=False)
    axes.set(xlabel="found", ylabel="meant", title=f"{record['run_name']}: {after['rows']} test rows")
    return figure


def plot_cost(table: pd.DataFrame) -> "Figure":
    """Time and bill of each line of `report_summarization.cost_table`, on logarithmic scales.

    Each kind of figures (published, projected with the published settings, projected with ours) has its colour.
    """
    import matplotlib.pyplot as plt

    kinds = table["Figures"].str.split("[:;]").str[0]
    colours = dict(zip(kinds.unique(), plt.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    networks = table["Network"].where(~kinds.eq("published"), "published")
    names = table["Machines"].str.split(" (", regex=False).str[0] + ", " + networks
    values = {"hours": table["Time"].map(clock_seconds) / 3600, "bill (USD)": table["Bill (USD)"].astype(float)}
    figure, panels = plt.subplots(1, 2, sharey=True, figsize=(10, 1 + 0.32 * len(table)), layout="constrained")
    for axes, (label, numbers) in zip(panels, values.items(), strict=True):
        for kind, colour in colours.items():
            lines = [number for number, other in enumerate(kinds) if other == kind]
            axes.barh(lines, numbers.iloc[lines], color=colour, label=kind)
        for line, number in enumerate(numbers):
            axes.text(number, line, f" {number:.2f}", va="center", fontsize=8)
        axes.set(xlabel=label, xscale="log", xlim=(None, 2.5 * max(numbers)))
    panels[0].set(yticks=range(len(names)), yticklabels=names)
    panels[0].invert_yaxis()
    panels[1].legend()
    return figure
