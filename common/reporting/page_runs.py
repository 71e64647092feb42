"""What the results page says of each run: plain values, for its table and its charts."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from common.base.specs import PARALLELISMS, TECHNIQUES
from common.planning.phases import TRAINING
from common.records.store import Record
from common.reporting.compare import settings_of
from common.reporting.memory import compared_by_phase
from common.reporting.rows import device_of, metrics_of, model_of, task_of

GIB_DIGITS, QUALITY_DIGITS = 4, 4

Values = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of the page's table.

    Attributes:
        key: Of a run's value.
        is_number: It is sorted as a number, and stands right.
    """

    key: str
    title: str
    is_number: bool = False


COLUMNS = (
    Column("run", "Run"),
    Column("technique", "Technique"),
    Column("parallel", "Parallelism"),
    Column("devices", "Devices", is_number=True),
    Column("minutes", "Training (min)", is_number=True),
    Column("tokens_per_s", "Tokens/s", is_number=True),
    Column("peak_gib", "Tensors (GiB)", is_number=True),
    Column("before", "Before", is_number=True),
    Column("quality", "After", is_number=True),
    Column("metric", "Quality is"),
    Column("model", "Model"),
    Column("data", "Data"),
    Column("precision", "Precision"),
    Column("rows_per_step", "Rows per step", is_number=True),
    Column("seed", "Seed", is_number=True),
)


def label_of(record: Record) -> str:
    """Return `2.1 python-batch16-seed42`, with the run folder where that is not the one for the CPU."""
    technique, _, folder = record["run_folder"].partition("/")
    number = technique.partition("_")[0]
    place = "" if folder.startswith("run_0_") else f" {folder}"
    return f"{number}{place} {record['run_name']}"


def values_of(record: Record) -> Values:
    """Return the values of the table's columns, and what a click on the run shows; None: the run has none."""
    config = record["config"]
    metric, before, after = _quality(record)
    return {
        "run": label_of(record),
        "technique": TECHNIQUES[record["technique"]].label,
        "parallel": PARALLELISMS[record["parallel"]].label,
        "devices": config["devices"],
        "device": device_of(record),
        "task": task_of(record),
        "model": model_of(record),
        "data": Path(config["data"]).name,
        "precision": config["precision"],
        "rows_per_step": record["effective_batch_size"],
        "seed": config["seed"],
        "minutes": round(record["train_time_s"] / 60, 2),
        "tokens_per_s": round(record["tokens_per_s"]),
        "peak_gib": _tensors_gib(record),
        "metric": metric,
        "before": before,
        "quality": after,
        "folder": record["run_folder"],
        "command": record["command"],
        "gallery": record.get("gallery", []),
        "settings": {name: str(value) for name, value in settings_of(record).items() if value is not None},
        "is_trial": config.get("max_steps", -1) >= 0 or config.get("test_rows", -1) >= 0,
    }


def _quality(record: Record) -> tuple[str | None, float | None, float | None]:
    """Return the main metric that the run has, before and after; None: data without facts, or no baseline."""
    before, after = record["quality"].get("before") or {}, record["quality"]["after"]
    for metric in metrics_of(record):
        if metric.direction == "higher" and after.get(metric.name) is not None:
            found = before.get(metric.name), after[metric.name]
            return metric.label, *(value if value is None else round(value, QUALITY_DIGITS) for value in found)
    return None, None, None


def _tensors_gib(record: Record) -> float | None:
    """Return what tensors took in training on the fullest device; on a CPU the process's memory is mostly Python."""
    peaks = [entry.get("peak_gib_by_phase", {}).get(TRAINING) for entry in record["memory"]]
    known = [peak for peak in peaks if peak]
    return round(max(known), GIB_DIGITS) if known else None


def losses_of(record: Record) -> Iterable[Values]:
    """Yield every logged loss of a run."""
    for kind, name in (("training", "training_losses"), ("validation", "validation_losses")):
        for step, loss in record[name]:
            if not math.isfinite(loss):
                continue  # JSON has no such number
            yield {"run": label_of(record), "loss of": kind, "step": step, "loss": round(loss, 5)}


def planned_and_measured(records: list[Record]) -> Iterable[Values]:
    """Yield each phase of each device, as planned and as measured."""
    for phase, compared in compared_by_phase(records).items():
        for run, planned_gib, measured_gib in compared:
            planned, measured = (round(gib, GIB_DIGITS + 1) for gib in (planned_gib, measured_gib))
            yield {"run": run, "phase": phase, "planned": planned, "measured": measured}


def comparable(runs: Iterable[Values], cost: str) -> list[Values]:
    """Return the runs with a quality and a `cost`, without trials of a few steps or test rows."""
    return [run for run in runs if run[cost] and run["quality"] is not None and not run["is_trial"]]


def group_of(run: Values) -> str:
    """Return what runs share whose quality compares, and their time and memory as far as their machines are alike."""
    return f"{run['task']}: {run['model']}, {run['data']}"


def pareto_front(runs: Iterable[Values], cost: str) -> list[Values]:
    """Return the comparable runs that no other beats in quality and `cost`, the cheapest first, by group."""
    known = sorted(comparable(runs, cost), key=group_of)
    front: list[Values] = []
    for group, members in groupby(known, key=group_of):
        best = -1.0
        for run in sorted(members, key=lambda run: (run[cost], -run["quality"])):
            if run["quality"] > best:
                best = run["quality"]
                front.append({"group": group, "cost": run[cost], "quality": run["quality"]})
    return front
