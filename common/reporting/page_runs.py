"""What the results page says of each run: plain values, for its table and its charts."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from common.base.run_config import RunConfig
from common.base.specs import PARALLELISMS, TECHNIQUES
from common.planning.phases import PHASES, TRAINING
from common.records.store import Record
from common.reporting.compare import NAMES
from common.reporting.rows import METRICS, device_of, model_of, task_of

GIB_DIGITS, QUALITY_DIGITS = 4, 4
MAIN_METRICS = tuple(metric for metric in METRICS if metric.direction == "higher")

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
        "settings": settings_of(record),
    }


def settings_of(record: Record) -> dict[str, str]:
    """Return the settings that may cause a difference between two runs, as they are passed."""
    known = RunConfig.__dataclass_fields__
    return {name: str(value) for name, value in record["config"].items() if name in known and name not in NAMES}


def _quality(record: Record) -> tuple[str, float, float]:
    before, after = (record["quality"][when] for when in ("before", "after"))
    metric = next(metric for metric in MAIN_METRICS if metric.name in after)
    return metric.label, *(round(each[metric.name], QUALITY_DIGITS) for each in (before, after))


def _tensors_gib(record: Record) -> float | None:
    """Return what tensors took in training on the fullest device; on a CPU the process's memory is mostly Python."""
    peaks = [entry.get("peak_gib_by_phase", {}).get(TRAINING) for entry in record["memory"]]
    known = [peak for peak in peaks if peak]
    return round(max(known), GIB_DIGITS) if known else None


def losses_of(record: Record) -> Iterable[Values]:
    """Yield every logged loss of a run."""
    for kind, name in (("training", "training_losses"), ("validation", "validation_losses")):
        for step, loss in record[name]:
            yield {"run": label_of(record), "loss of": kind, "step": step, "loss": round(loss, 5)}


def planned_and_measured(record: Record) -> Iterable[Values]:
    """Yield each phase of each device, as planned and as measured."""
    for entry in record["memory"]:
        planned, measured = (entry.get(f"{kind}_gib_by_phase", {}) for kind in ("planned", "peak"))
        for phase in PHASES:
            if phase in planned and phase in measured:
                yield {
                    "run": f"{label_of(record)}, rank {entry['rank']}",
                    "phase": phase,
                    "planned": round(planned[phase], GIB_DIGITS + 1),
                    "measured": round(measured[phase], GIB_DIGITS + 1),
                }


def group_of(run: Values) -> str:
    """Return what runs share whose quality, time and memory compare."""
    return f"{run['task']}: {run['model']}, {run['data']}"


def pareto_front(runs: Iterable[Values], cost: str) -> list[Values]:
    """Return the runs that no other beats in quality and `cost`, the cheapest first, of each group by itself.

    Runs without a value are left out.
    """
    known = sorted((run for run in runs if run[cost]), key=group_of)
    front: list[Values] = []
    for group, members in groupby(known, key=group_of):
        best = -1.0
        for run in sorted(members, key=lambda run: (run[cost], -run["quality"])):
            if run["quality"] > best:
                best = run["quality"]
                front.append({"group": group, "cost": run[cost], "quality": run["quality"]})
    return front
