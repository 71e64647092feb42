"""What tables of pages are made of: rows that no record has, columns that only pages show, and tables of both.

Every row is `measured` (from a committed record), `published` (with its source), `projected` or `not run`.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import run_folders
from common.base.specs import PARALLELISMS, TECHNIQUES
from common.hardware.devices import gpu_of_device
from common.records.store import Record
from common.reporting import columns as shared
from common.reporting.columns import NO_BASELINE, Column
from common.reporting.rows import (
    NOT_RUN,
    WITH_SP,
    Kind,
    Row,
    clock_seconds,
    completed,
    devices_of,
    first_device,
    kind_name,
    kind_of,
    model_of,
    sp_size_of,
)

PUBLISHED_FILE = REPOSITORY / "assets" / "published.json"
NOT_PUBLISHED, PROJECTED = "not published", "projected"

LORA, LORA_DDP, LORA_PP = ("lora", "single"), ("lora", "ddp"), ("lora", "pp")
QLORA, QLORA_DDP = ("qlora", "single"), ("qlora", "ddp")
FULL, FULL_DDP, FULL_MP, FULL_PP = ("full", "single"), ("full", "ddp"), ("full", "mp"), ("full", "pp")
FULL_FSDP, FULL_ZERO3 = ("full", "fsdp"), ("full", "zero3")
FULL_SP, FULL_FSDP_SP = ("full", f"ddp{WITH_SP}"), ("full", f"fsdp{WITH_SP}")
LORA_SP, QLORA_SP = ("lora", f"ddp{WITH_SP}"), ("qlora", f"ddp{WITH_SP}")
# By their names in records: what users call them
LAUNCHERS = {"python": "", "acclaunch": "accelerate launch", "nblaunch": "notebook_launcher"}


def kind_of_run(run: RunConfig) -> Kind:
    """Return the same of a run that nobody may have taken."""
    return run.technique, run.parallel + WITH_SP * (run.sp_size > 1)


def sharing_label(row: Row) -> str:
    """Return how the devices share the work: `FSDP`, or `DDP, SP`."""
    return PARALLELISMS[row["parallel"]].label + ", SP" * (sp_size_of(row) > 1)


def data_parallel_ranks(row: Row) -> int:
    """Return the number of ranks that worked on rows of their own; the stages of a model work on the same rows."""
    return len(row["world"]) // sp_size_of(row) if PARALLELISMS[row["parallel"]].splits_rows else 1


def published(*kinds: Kind, metric: str = "similarity_score") -> list[Row]:
    """Return what others published with this metric, with its source, of these kinds; none given: of all kinds.

    The "baseline" of each is the first with its technique.
    """
    found = [
        _as_record(result)
        for result in json.loads(PUBLISHED_FILE.read_text(encoding="utf-8"))
        if metric in result and (not kinds or kind_of(result) in kinds)
    ]
    firsts = {row["technique"]: row for row in reversed(found)}
    return [{**row, "baseline": firsts[row["technique"]]} for row in found]


def _as_record(result: dict[str, Any]) -> Row:
    """Return a published result with a record's keys beside its own; what was not published is None, or not there."""
    rate, devices = result.get("learning_rate"), result.get("devices", result.get("machines"))
    return {
        **result,
        "status": NOT_PUBLISHED,
        "figures": f"published: {result['source']}",
        "launcher": "python",
        "config": {
            "model": result.get("model"),
            "weights": "pretrained",
            "device": "cuda",
            "devices": devices,
            "micro_batches": 1,
            "num_train_epochs": result["epochs"],
            "learning_rate": rate and rate / result.get("learning_rate_factor", 1),
            "per_device_train_batch_size": result.get("batch_size"),
            "gradient_accumulation_steps": 1,
        },
        "environment": {"devices": [result.get("gpu", result.get("machine"))]},
        "world": [{}] * devices,
        "peak_learning_rate": rate,
        "quality": {"after": {"similarity_score": result.get("similarity_score")}},
        "best_accuracy": result.get("accuracy"),
        "train_time_s": clock_seconds(result.get("train_time", result.get("time"))),
    }


def waiting(records: Iterable[Record], *kinds: Kind) -> list[Row]:
    """Return a row for each run folder for chats without any completed run, of these kinds; none given: of all."""
    done = {record["run_folder"] for record in completed(records, *kinds)}
    return [
        not_run(folder, run)
        for folder, run in run_folders().items()
        if not run.goal.reporting and run.run_folder not in done
        if not kinds or kind_of_run(run) in kinds
    ]


def waiting_for_task(records: Iterable[Record], task: str) -> list[Row]:
    """Return a row for each run folder for GPUs without a completed run of this task: what its tables show."""
    done = {record["run_folder"] for record in completed(records, task=task)}
    return [
        {
            "status": NOT_RUN,
            "figures": NOT_RUN,
            "technique": run.technique,
            "parallel": run.parallel,
            "goal": run.goal,
            "config": {name: getattr(run, name) for name in ("model", "weights", "device", "devices", "loop")},
            "environment": {"devices": [run.gpu]},
        }
        for run in run_folders().values()
        if run.task == task and run.device == "cuda" and run.run_folder not in done
    ]


def not_run(folder: Path, run: RunConfig) -> Row:
    """Return what is known of a run folder without a record: its settings and its command."""
    place = folder.relative_to(REPOSITORY)
    return {
        "status": NOT_RUN,
        "figures": NOT_RUN,
        "technique": run.technique,
        "parallel": run.parallel,
        "launcher": "python",
        "run_folder": str(place),
        "config": {**run.to_dict(), "dp_replicate_size": 1},  # its folder's name tells copies
        "environment": {"devices": [run.gpu or "CPU"]},
        "world": [{}] * (run.data_parallel_ranks * run.sp_size),
        "peak_learning_rate": run.peak_learning_rate,
        "command": f"make run FOLDER={place}" if run.nodes == 1 else f"a torchrun on each of {run.nodes} machines",
    }


def pretrained(runs: Iterable[Record]) -> list[Record]:
    """Return the runs of pretrained models: those with random weights show memory and speed alone."""
    return [run for run in runs if run["config"]["weights"] != "random"]


def copies_of(row: Row) -> int:
    """Return how many sharded copies of the model the ranks held; older records have no such setting."""
    return row["config"].get("dp_replicate_size", 1)


def approach(row: Row) -> str:
    """Return what was done, what started it, unless `python` did, and whether weights were random.

    Such as `LoRA with DDP, torchrun`.
    """
    hybrid = f" ({copies_of(row)} copies)" if copies_of(row) > 1 else ""
    launcher = LAUNCHERS.get(row["launcher"], row["launcher"])
    weights = "random weights" if row["config"].get("weights") == "random" else ""
    return ", ".join(filter(None, (f"{kind_name(row)}{hybrid}", launcher, weights)))


# -- columns and tables

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
        footnote: Returns where a row comes from, which stands below the table.
    """

    select: Callable[[list[Record]], Iterable[Any]]
    columns: Sequence[str | Column] = ()
    waiting: Sequence[Kind] = ()
    published: Sequence[Kind] = ()
    shared: Sequence[str] = ()
    line: str = ""
    footnote: Callable[[Row], str] | None = None

    def __call__(self, records: list[Record]) -> pd.DataFrame:
        """Return the table's cells."""
        return self.cells(self.rows(records))

    def rows(self, records: list[Record]) -> list[Any]:
        """Return what each line is about."""
        rows = list(self.select(records))
        if self.waiting:
            rows += waiting(records, *self.waiting)
        if self.published:
            rows += published(*self.published)
        return rows

    def cells(self, rows: list[Any]) -> pd.DataFrame:
        """Return what is said of rows."""
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
    "short_approach": Column("Approach", lambda row: kind_name(row).replace(" fine-tuning", "")),
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
