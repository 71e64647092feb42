"""What tables are made of: columns, which say where a value is found and how it is written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from statistics import fmean
from typing import Any

from common.reporting.rows import NOT_RUN, Row, clock, device_name, devices_of, kind_name, model_of, setting_name

NO_BASELINE, NO_FACTS, OFF = "-", "no facts in the data", "off"
MISSING = object()


def _part(value: Any, name: str) -> Any:
    return value[name] if isinstance(value, dict) else getattr(value, name)


@dataclass(frozen=True)
class Column:
    """A column of tables."""

    title: str
    value: str | Callable[[Any], Any]  # keys and attributes with dots between ("config.seed"), or a function of the row
    format: str | Callable[[Any], Any] = "{}"  # as of `str.format`, or a function of the value
    none: str | None = NOT_RUN  # what stands where the value is None
    missing: str | None = NOT_RUN  # where a measured row, as older ones, has no such key; other rows show their status
    over_seeds: bool = False  # the mean of a row's "seeds", with the lowest and the highest

    def titled(self, title: str) -> "Column":
        """Return the same column with another heading."""
        return replace(self, title=title)

    def value_in(self, row: Any, missing: object = None) -> Any:
        """Return the value in a row; `missing` of a run that failed, of another task, or of an older record."""
        try:
            return self.value(row) if callable(self.value) else reduce(_part, self.value.split("."), row)
        except (KeyError, IndexError, TypeError, AttributeError, ZeroDivisionError):
            return missing

    def written(self, value: Any) -> Any:
        """Return a value as it stands in a table: a text; of some columns in a terminal a number."""
        return self.format(value) if callable(self.format) else self.format.format(value)

    def cell(self, row: Any) -> Any:
        """Return what stands in a row's cell."""
        runs = row.get("seeds", [row]) if self.over_seeds else [row]
        values = [self.value_in(run, MISSING) for run in runs]
        if MISSING in values:
            status = row.get("status", "completed")
            return self.missing if status == "completed" else status
        if None in values:
            return self.none
        if len(values) == 1:
            return self.written(values[0])
        mean, low, high = map(self.written, (sum(values) / len(values), min(values), max(values)))
        return mean if low == high else f"{mean} ({low} to {high})"


def column(named: str | Column, columns: Mapping[str, Column] | None = None) -> Column:
    """Return the column with this name, with another heading as `time as Time`; a column is returned as it is."""
    if isinstance(named, Column):
        return named
    name, _, title = named.partition(" as ")
    found = (columns or COLUMNS)[name]
    return found.titled(title) if title else found


def training_time(row: Row) -> str:
    """Return how long training took; of a run that resumed from a checkpoint, since then."""
    before = row.get("checkpoints", {}).get("went_on_from")
    return clock(row["train_time_s"]) + (f" (since {before})" if before else "")


def in_percent(share: float) -> str:
    """Return `93.4`, for a column whose heading says that it is a share."""
    return f"{100 * share:.1f}"


def speedup(row: Row) -> float:
    """Return the training time of a row's baseline over its own."""
    return row["baseline"]["train_time_s"] / row["train_time_s"]


def mean_time_s(row: Row) -> float:
    """Return the mean seconds of training over a row's seeds."""
    return fmean(run["train_time_s"] for run in row.get("seeds", [row]))


def planned_and_measured_gib(row: Row) -> tuple[float, float] | None:
    """Return training's peak as planned and measured, in GiB, of the device that is off most; None: not both known."""
    pairs = [(entry["planned_gib"], entry.get("peak_training_gib")) for entry in row["memory"]]
    return max((pair for pair in pairs if None not in pair), key=lambda pair: abs(pair[0] / pair[1] - 1), default=None)


def _share_of_facts(title: str, path: str) -> Column:
    """Return the column of a share in percent, over the seeds: `93.4 (92.8 to 94.1)`."""
    return Column(title, f"quality.{path}", in_percent, none="no facts", missing=NO_BASELINE, over_seeds=True)


COLUMNS = {
    # what was run
    "kind": Column("Approach", kind_name),
    "model": Column("Model", model_of),
    "machine": Column("Machine", lambda row: device_name(row) + " per device" * (row["config"]["device"] == "cpu")),
    "devices": Column("Devices", devices_of),
    "device_count": Column("Devices", "config.devices"),
    "setting": Column("Setting", setting_name),
    "seed": Column("Seed", "config.seed"),
    "seeds": Column("Seeds", lambda row: len(row["seeds"])),
    # how good it is
    "loss": Column("Validation loss", "best_validation_loss", "{:.4f}"),
    "score": Column("Similarity score", "quality.after.similarity_score", "{:.3f}"),
    "score_before": Column("Similarity score before", "quality.before.similarity_score", "{:.3f}", missing=NO_BASELINE),
    "shuffled": Column("Answers shuffled", "quality.after.shuffled_score", "{:.3f}"),
    # by the independent judge, in tables that tell where it was switched off
    "judged": Column("By MiniLM", "quality.after.similarity_score_minilm", "{:.3f}", none=OFF),
    "judged_before": Column(
        "By MiniLM before", "quality.before.similarity_score_minilm", "{:.3f}", none=OFF, missing=NO_BASELINE
    ),
    "judged_shuffled": Column("Shuffled, by MiniLM", "quality.after.shuffled_score_minilm", "{:.3f}", none=OFF),
    "facts": Column("Fact recall", "quality.after.facts_said_share", "{:.0%}", none=NO_FACTS),
    "facts_before": Column(
        "Fact recall before", "quality.before.facts_said_share", "{:.0%}", none=NO_FACTS, missing=NO_BASELINE
    ),
    # of an adapter that was merged into the base before it was quantized
    "facts_of_original_base": Column(
        "Fact recall", "quality.after_original_base.facts_said_share", "{:.0%}", none=NO_FACTS
    ),
    # of tasks with tables of their own
    "best_accuracy": Column("Best accuracy", "best_accuracy", "{:.4f}", over_seeds=True),
    "preferred": Column("Accuracy of preferences", "quality.after.preference_accuracy", "{:.3f}", over_seeds=True),
    "reward": Column("Reward of the chosen", "quality.after.chosen_reward", "{:+.2f}", over_seeds=True),
    "right_before": _share_of_facts("Recall before", "before.facts_said_share"),
    "commonest": _share_of_facts("Majority baseline", "after.commonest_facts_said_share"),
    "right_after": _share_of_facts("Recall after", "after.facts_said_share"),
    "swapped": _share_of_facts("Old answer, other picture", "after.swapped_facts_said_share"),
    # time
    "steps": Column("Steps", "steps"),
    "time": Column("Training time", training_time),
    "whole_time": Column("Training time", "train_time_s", clock),
    "mean_time": Column(
        "Training time", lambda row: clock(mean_time_s(row)) if len(row.get("seeds", ())) > 1 else training_time(row)
    ),
    "reporting": Column("Of that, validation and checkpoints", "reporting_s", clock),
    "tokens_per_s": Column("Tokens per second", "tokens_per_s", "{:,.0f}"),
    "speedup": Column("Training speedup factor", speedup, "{:.2f}x"),
    "speedup_of_task": Column("Speed-up", speedup, "{:.2f}x", missing="no run on one device"),
    "ceiling": Column("Upper bound", "ceiling", lambda times: "1x" if times == 1 else f"{times:.2f}x"),
    "idle": Column(
        "Idle share per stage",
        "stages",
        lambda stages: " / ".join(f"{stage['idle_share']:.0%}" for stage in stages),
        none="-",
        missing="-",
    ),
    # memory
    "peak": Column(
        "Peak memory per device (GiB)",
        "memory",
        lambda memory: " / ".join(f"{entry['peak_allocated_gib'] or entry['peak_rss_gib']:.2f}" for entry in memory),
    ),
    "planned": Column(
        "Training's peak, planned / measured (GiB)",
        planned_and_measured_gib,
        lambda gib: f"{gib[0]:.2f} / {gib[1]:.2f} ({gib[0] / gib[1] - 1:+.0%})",
    ),
}
