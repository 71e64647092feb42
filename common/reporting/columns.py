"""What tables are made of: columns, which say where a value is found and how it is written, and tables of them.

Every row is `measured` (from a committed record), `published` (with its source), `projected` or `not run`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from statistics import fmean
from typing import Any

import pandas as pd

from common.base.specs import TECHNIQUES
from common.hardware.devices import gpu_of_device
from common.records.store import Record
from common.reporting.rows import (
    NOT_PUBLISHED,
    NOT_RUN,
    Kind,
    Row,
    approach,
    clock,
    data_parallel_ranks,
    device_of,
    devices_of,
    first_device,
    kind_name,
    kind_of,
    model_of,
    published,
    waiting,
)

NO_BASELINE, NO_FACTS, NO_GPU, OFF = "-", "no facts in the data", "no GPU", "off"
MISSING = object()


def _part(value: Any, name: str) -> Any:
    return value[name] if isinstance(value, dict) else getattr(value, name)


@dataclass(frozen=True)
class Column:
    """A column of tables.

    Attributes:
        title: Its heading.
        value: Where the value of a row is found: keys and attributes with dots between them ("config.seed"), or a
            function of the row.
        format: How a value is written: a form as of `str.format`, or a function of the value.
        none: What stands where the value is None.
        missing: What stands in a measured row that has no such key, as older records and other settings have not.
        over_seeds: Whether the mean of a row's "seeds" is meant, with the lowest and the highest.
    """

    title: str
    value: str | Callable[[Any], Any]
    format: str | Callable[[Any], Any] = "{}"
    none: str | None = NOT_RUN
    missing: str | None = NOT_RUN
    over_seeds: bool = False

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
            status = row.get("status")
            return status if status in (NOT_RUN, NOT_PUBLISHED) else self.missing
        if None in values:
            return self.none
        if len(values) == 1:
            return self.written(values[0])
        mean, low, high = map(self.written, (sum(values) / len(values), min(values), max(values)))
        return f"{mean} ({low} to {high})"


def column(named: str | Column) -> Column:
    """Return the column of `COLUMNS` with this name; `time as Time` has another heading. Other columns are returned."""
    if isinstance(named, Column):
        return named
    name, _, title = named.partition(" as ")
    return COLUMNS[name].titled(title) if title else COLUMNS[name]


@dataclass(frozen=True)
class Table:
    """A table of the pages, which makes the cells of some records.

    Attributes:
        select: Returns a row for each line, of the kept records.
        columns: What is said of each, as `column` takes it; none: the rows are texts by heading already.
        waiting: Techniques and parallelisms whose run folders have a line as long as nobody has run them.
        published: Those of which results of others follow.
        shared: Headings of the columns whose values stand above the table's parts.
        line: The form of a line where the table is shown as a list.
    """

    select: Callable[[list[Record]], Iterable[Any]]
    columns: Sequence[str | Column] = ()
    waiting: Sequence[Kind] = ()
    published: Sequence[Kind] = ()
    shared: Sequence[str] = ()
    line: str = ""

    def __call__(self, records: list[Record]) -> pd.DataFrame:
        """Return the table's cells."""
        rows = list(self.select(records))
        if self.waiting:
            rows += waiting(records, *self.waiting)
        if self.published:
            rows += published(*self.published)
        if not self.columns:
            return pd.DataFrame(rows).fillna(NOT_RUN)
        columns = list(map(column, self.columns))
        cells = [[each.cell(row) for each in columns] for row in rows]
        return pd.DataFrame(cells, columns=[each.title for each in columns], dtype=object)


# -- values that are worked out


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


def rows_with_accumulation(row: Row) -> int:
    """Return the rows that a rank works on before each optimizer step."""
    return row["config"]["per_device_train_batch_size"] * row["config"]["gradient_accumulation_steps"]


def planned_and_measured_gib(row: Row) -> tuple[float, float] | None:
    """Return training's peak as planned and measured, in GiB, of the device that is off most; None: not both known."""
    pairs = [(entry["planned_gib"], entry.get("peak_training_gib")) for entry in row["memory"]]
    return max((pair for pair in pairs if None not in pair), key=lambda pair: abs(pair[0] / pair[1] - 1), default=None)


def as_code(command: str) -> str:
    """Return a command as code; what is said in words instead of one as it is."""
    return command if command.startswith(("the notebook", "a torchrun")) else f"`{command}`"


def gpu_sizes(row: Row) -> dict[str, tuple[float, str]] | None:
    """Return cores and memory of one of a row's GPUs, as numbers and as written; None: it is none of the catalogue."""
    if row["status"] == NOT_PUBLISHED:
        return {
            "cores": (row["cuda_cores"], f"{row['cuda_cores']:,}"),
            "memory": (row["vram_gb"], f"{row['vram_gb']}G"),
        }
    gpu = gpu_of_device(first_device(row))
    return gpu and {
        "cores": (gpu.cuda_cores, f"{gpu.cuda_cores:,}"),
        "memory": (gpu.memory_gib, f"{gpu.memory_gib:.0f} GiB"),
    }


def times_baseline(row: Row, name: str) -> str | None:
    """Return `2x (10,752 x2)`: what a row's GPUs have, as a multiple of what those of its baseline have."""
    sizes, count, baseline = gpu_sizes(row), row["config"]["devices"], row["baseline"]
    if sizes is None:
        return None
    size, written = sizes[name]
    one_device = gpu_sizes(baseline)[name][0] * baseline["config"]["devices"] if baseline else size
    return f"{size * count / one_device:.3g}x ({written} x{count})"


def memory_needed(row: Row) -> str:
    """Return the memory that each device must have; of a published run that of its card, beside its baseline's."""
    if row["status"] == NOT_PUBLISHED:
        return f"{row['vram_gb'] / row['baseline']['vram_gb']:.2g}x ({row['vram_gb']} GB cards)"
    peak_gib = max(entry["peak_allocated_gib"] or entry["peak_rss_gib"] for entry in row["memory"])
    return f"{peak_gib:.2f} GiB" + (" (the process's memory)" if row["config"]["device"] == "cpu" else "")


COLUMNS = {
    # what was run
    "approach": Column("Approach", approach),
    "kind": Column("Approach", lambda row: kind_name(*kind_of(row))),
    "technique": Column("Technique", lambda row: TECHNIQUES[row["technique"]].title),
    "figures": Column("Figures", lambda row: row.get("figures", "measured")),
    "short_figures": Column("Figures", lambda row: row.get("figures", "measured").partition(":")[0]),
    "model": Column("Model", model_of),
    "model_id": Column("Model", lambda row: row["config"]["model"] if row["status"] == NOT_RUN else model_of(row)),
    "machine": Column("Machine", device_of),
    "devices": Column("Devices", devices_of),
    "short_devices": Column("Devices", lambda row: devices_of(row).replace(", 1 thread x", " x")),
    "device_count": Column("Devices", "config.devices"),
    "seed": Column("Seed", "config.seed"),
    "seeds": Column("Seeds", lambda row: len(row["seeds"])),
    "epochs": Column("Epochs", "config.num_train_epochs"),
    "batch": Column(
        "Batch size", lambda row: f"{row['config']['per_device_train_batch_size']} x{data_parallel_ranks(row)}"
    ),
    "rows": Column(
        "Batch size",
        lambda row: COLUMNS["batch"].cell(row) if row["status"] == NOT_RUN else rows_with_accumulation(row),
    ),
    "effective_batch": Column(
        "Effective batch size", lambda row: f"{rows_with_accumulation(row)} x{data_parallel_ranks(row)}"
    ),
    "learning_rate": Column(
        "Learning rate scaling",
        lambda row: (
            f"{row['peak_learning_rate'] / row['config']['learning_rate']:.3g}x ({row['peak_learning_rate']:.3g})"
        ),
    ),
    "command": Column("Command", "command", as_code),
    # how good it is
    "loss": Column("Validation loss", "best_validation_loss", "{:.4f}"),
    "score": Column("Similarity score", "quality.after.similarity_score", "{:.3f}"),
    "score_before": Column("Similarity score before", "quality.before.similarity_score", "{:.3f}", missing=NO_BASELINE),
    "score_tuned": Column("By the tuned model", "quality.after.similarity_score_tuned", "{:.3f}"),
    "minilm": Column("By MiniLM", "quality.after.similarity_score_minilm", "{:.3f}"),
    "minilm_before": Column(
        "By MiniLM before", "quality.before.similarity_score_minilm", "{:.3f}", missing=NO_BASELINE
    ),
    "shuffled": Column("Answers shuffled", "quality.after.shuffled_score", "{:.3f}"),
    "shuffled_minilm": Column("Shuffled, by MiniLM", "quality.after.shuffled_score_minilm", "{:.3f}"),
    # by the independent judge, in tables that tell where it was switched off
    "judged": Column("By MiniLM", "quality.after.similarity_score_minilm", "{:.3f}", none=OFF),
    "judged_before": Column(
        "By MiniLM before", "quality.before.similarity_score_minilm", "{:.3f}", none=OFF, missing=NO_BASELINE
    ),
    "judged_shuffled": Column("Shuffled, by MiniLM", "quality.after.shuffled_score_minilm", "{:.3f}", none=OFF),
    "facts": Column("Facts said", "quality.after.facts_said_share", "{:.0%}", none=NO_FACTS),
    "facts_before": Column(
        "Facts said before", "quality.before.facts_said_share", "{:.0%}", none=NO_FACTS, missing=NO_BASELINE
    ),
    # time
    "steps": Column("Steps", "steps"),
    "time": Column("Training time", training_time),
    "whole_time": Column("Training time", "train_time_s", clock),
    "mean_time": Column("Training time", mean_time_s, clock),
    "reporting": Column("Of that, validation and checkpoints", "reporting_s", clock),
    "tokens_per_s": Column("Tokens per second", "tokens_per_s", "{:,.0f}"),
    "speedup": Column("Training speedup factor", speedup, "{:.2f}x"),
    "speedup_of_task": Column("Speed-up", speedup, "{:.2f}x", missing="no run on one device"),
    "ceiling": Column("Machine's ceiling", "ceiling", lambda times: "1x" if times == 1 else f"{times:.2f}x"),
    "micro_batches": Column(
        "Micro-batches",
        lambda row: f"{row['config']['micro_batches']}, {row['config']['schedule']}" if row["stages"] else None,
        none="-",
        missing="-",
    ),
    "idle": Column(
        "Idle share per stage",
        "stages",
        lambda stages: " / ".join(f"{stage['idle_share']:.0%}" for stage in stages),
        none="-",
        missing="-",
    ),
    "cuda": Column("CUDA scaling factor", lambda row: times_baseline(row, "cores"), none=NO_GPU),
    "vram": Column("VRAM scaling factor", lambda row: times_baseline(row, "memory"), none=NO_GPU),
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
    "memory_needed": Column("VRAM requirement per GPU", memory_needed),
}
