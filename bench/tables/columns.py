"""Tables of pages, and their columns: beside those of `common.reporting.columns` what only pages show.

Every row is `measured` (from a committed record), `published` (with its source), `projected` or `not run`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from bench.tables.rows import NOT_PUBLISHED, approach, published, waiting
from common.base.specs import TECHNIQUES
from common.hardware.devices import gpu_of_device
from common.records.store import Record
from common.reporting import columns as shared
from common.reporting.columns import NO_BASELINE, Column
from common.reporting.rows import NOT_RUN, Kind, Row, data_parallel_ranks, devices_of, first_device, model_of

NO_GPU = "no GPU"


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


def rows_with_accumulation(row: Row) -> int:
    """Return the rows that a rank works on before each optimizer step."""
    return row["config"]["per_device_train_batch_size"] * row["config"]["gradient_accumulation_steps"]


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


COLUMNS = shared.COLUMNS | {
    "approach": Column("Approach", approach),
    "technique": Column("Technique", lambda row: TECHNIQUES[row["technique"]].title),
    "figures": Column("Figures", lambda row: row.get("figures", "measured")),
    "short_figures": Column("Figures", lambda row: row.get("figures", "measured").partition(":")[0]),
    "model_id": Column("Model", lambda row: row["config"]["model"] if row["status"] == NOT_RUN else model_of(row)),
    "short_devices": Column("Devices", lambda row: devices_of(row).replace(", 1 thread x", " x")),
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
    "command": Column(  # as code, but for what is said in words instead of one
        "Command",
        "command",
        lambda command: command if command.startswith(("the notebook", "a torchrun")) else f"`{command}`",
    ),
    "score_tuned": Column("By the tuned model", "quality.after.similarity_score_tuned", "{:.3f}"),
    "minilm": Column("By MiniLM", "quality.after.similarity_score_minilm", "{:.3f}"),
    "minilm_before": Column(
        "By MiniLM before", "quality.before.similarity_score_minilm", "{:.3f}", missing=NO_BASELINE
    ),
    "shuffled_minilm": Column("Shuffled, by MiniLM", "quality.after.shuffled_score_minilm", "{:.3f}"),
    "micro_batches": Column(
        "Micro-batches",
        lambda row: f"{row['config']['micro_batches']}, {row['config']['schedule']}" if row["stages"] else None,
        none="-",
        missing="-",
    ),
    "cuda": Column("CUDA scaling factor", lambda row: times_baseline(row, "cores"), none=NO_GPU),
    "vram": Column("VRAM scaling factor", lambda row: times_baseline(row, "memory"), none=NO_GPU),
    "memory_needed": Column("VRAM requirement per GPU", memory_needed),
}
column = partial(shared.column, columns=COLUMNS)
