"""Rows of pages that no record has, in a record's shape: what is published, and what nobody has run."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import run_folders
from common.records.store import Record
from common.reporting.rows import NOT_RUN, Kind, Row, clock_seconds, completed, copies_of, kind_name, kind_of

PUBLISHED_FILE = REPOSITORY / "assets" / "published.json"
NOT_PUBLISHED, PROJECTED = "not published", "projected"

LORA, LORA_DDP, LORA_PP = ("lora", "single"), ("lora", "ddp"), ("lora", "pp")
QLORA, QLORA_DDP, QLORA_FSDP = ("qlora", "single"), ("qlora", "ddp"), ("qlora", "fsdp")
FULL, FULL_DDP, FULL_MP, FULL_PP = ("full", "single"), ("full", "ddp"), ("full", "mp"), ("full", "pp")
FULL_FSDP, FULL_ZERO3 = ("full", "fsdp"), ("full", "zero3")
LAUNCHERS = {"python": "", "acclaunch": "accelerate launch", "nblaunch": "notebook_launcher"}
"""By their names in records: what users call them."""


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
        if not run.goal.has_own_table and run.run_folder not in done
        if not kinds or (run.technique, run.parallel) in kinds
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
        "world": [{}] * run.data_parallel_ranks,
        "peak_learning_rate": run.peak_learning_rate,
        "command": f"make run FOLDER={place}" if run.nodes == 1 else f"a torchrun on each of {run.nodes} machines",
    }


def approach(row: Row) -> str:
    """Return what was done, what started it, unless `python` did, and whether weights were random.

    Such as `LoRA with DDP, torchrun`.
    """
    hybrid = f" ({copies_of(row)} copies)" if copies_of(row) > 1 else ""
    launcher = LAUNCHERS.get(row["launcher"], row["launcher"])
    weights = "random weights" if row["config"].get("weights") == "random" else ""
    return ", ".join(filter(None, (f"{kind_name(*kind_of(row))}{hybrid}", launcher, weights)))
