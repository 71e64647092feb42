"""The tables of docs/results.md: each kept run that answers questions, what others published, and what nobody has run.

`SHARED` names the columns whose values stand above a table instead of in each of its rows.
"""

from pathlib import Path

import pandas as pd

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import run_folders
from common.base.specs import PARALLELISMS, TECHNIQUES
from common.records.store import Record
from common.reporting.rows import (
    Row,
    before_training,
    completed,
    copies_of,
    data_parallel_ranks,
    device_of,
    judged,
    measured_quality,
    measured_speed,
    model_of,
    not_run,
    peak_memory_gib,
    percent,
    published_quality,
    published_results,
    published_speed,
    score,
)

SHARED = {
    "master": ("Technique", "Settings", "Model", "Data", "Machine", "Before"),
    "results-published": ("Source",),
    "results-not-run": ("Model", "Epochs"),
}
SETTINGS = ("quantization", "optim", "precision")
"""Settings that are named where they differ from the defaults; the first means something for QLoRA alone."""


def master(records: list[Record]) -> pd.DataFrame:
    """Return one line per kept run."""
    return pd.DataFrame(_run(record) for record in completed(records))


def _run(record: Record) -> Row:
    config, after = record["config"], record["quality"]["after"]
    quality, speed = measured_quality(record), measured_speed(record)
    rows = sum(rank["samples"] for rank in record["world"][: data_parallel_ranks(record)])
    return {
        "Technique": TECHNIQUES[record["technique"]].title,
        "Settings": ", ".join(_unusual(record)),
        "Model": model_of(record),
        "Data": f"{Path(config['data']).name}, {rows:,} rows in up to {_epochs(config['num_train_epochs'])}",
        "Machine": device_of(record),
        "Before": f"before: score {before_training(record, 'similarity_score', score)}, by MiniLM "
        f"{before_training(record, 'similarity_score_minilm', judged)}, facts said "
        f"{before_training(record, 'facts_said_share', percent)}",
        "Devices": _devices(record),
        "Launcher": record["launcher"],
        "Seed": quality["Seed"],
        "Batch": speed["Batch size"],
        "Learning rate": quality["Learning rate scaling"],
        "Time": speed["Training time"],
        "Peak GiB": peak_memory_gib(record),
        "Score": score(after["similarity_score"]),
        "MiniLM": judged(after["similarity_score_minilm"]),
        "Facts": percent(after["facts_said_share"]),
    }


def _epochs(number: object) -> str:
    return f"{number} epoch" + ("" if str(number) == "1" else "s")


def _unusual(record: Record) -> list[str]:
    """Return those of `SETTINGS` that differ from the defaults; older records may lack one."""
    names = SETTINGS if TECHNIQUES[record["technique"]].quantizes else SETTINGS[1:]
    found = {name: record["config"].get(name) for name in names}
    return [value for name, value in found.items() if value not in (None, getattr(RunConfig, name))]


def _devices(record: Record) -> str:
    """Return `1`, or `2, FSDP`: the number of devices, and how they share the work."""
    how, copies = PARALLELISMS[record["parallel"]], copies_of(record)
    shared = "" if how.is_single else f", {how.label}"
    return f"{record['config']['devices']}{shared}" + (f" ({copies} copies)" if copies > 1 else "")


def published(_: list[Record]) -> pd.DataFrame:
    """Return what others published of the same techniques."""
    rows = []
    for result in published_results():
        quality, speed = published_quality(result), published_speed(result, result)
        rows.append({
            "Source": result["source"],
            "Approach": quality["Approach"],
            "GPUs": quality["Devices"],
            "Epochs": quality["Epochs"],
            "Batch": speed["Batch size"],
            "Learning rate": quality["Learning rate scaling"],
            "Time": speed["Training time"],
            "Score": quality["Similarity score"],
        })  # fmt: skip
    return pd.DataFrame(rows)


def waiting(records: list[Record]) -> pd.DataFrame:
    """Return the run folders without a record: their settings."""
    done = {record["run_folder"] for record in completed(records)}
    rows = [
        (folder, not_run(folder, run))
        for folder, run in run_folders().items()
        if not run.goal.has_own_tables and run.run_folder not in done
    ]
    return pd.DataFrame(
        {
            "Model": row["Model"],
            "Epochs": _epochs(row["Epochs"]),
            "Run folder": f"{folder.relative_to(REPOSITORY).parts[0].partition('_')[0]}, `{folder.name}`",
            "Approach": row["Approach"],
            "GPUs": row["Devices"],
            "Batch": row["Batch size"],
            "Learning rate": row["Learning rate scaling"],
        }
        for folder, row in rows
    )
