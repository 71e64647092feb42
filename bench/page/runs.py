"""What the results page says of each run: plain values, for its table and its charts."""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from bench.tables.table import sharing_label
from common.base.run_config import DEFAULTS
from common.base.specs import TECHNIQUES
from common.planning.phases import PHASES, TRAINING
from common.records.store import Record
from common.reporting.columns import Column, column
from common.reporting.rows import NAMING, Metric, groups_of, metrics_of, model_of, settings_of, task_of

MIB_PER_GIB = 2**10
MIB_DIGITS, QUALITY_DIGITS, LOSS_DIGITS = 1, 4, 5
LEAST_MIB = 0.01  # a logarithmic scale has no zero
MOST_POINTS = 500  # of a curve: a chart has hardly more columns
PLACES_PER_E_FOLD = 50  # places that the chart of memory tells apart: two pixels each, and a point is seven wide
# The settings of a run that asks for nothing, as they are shown
USUAL = {name: str(value) for name, value in DEFAULTS.items() if name not in NAMING}

Values = dict[str, Any]


def label_of(record: Record) -> str:
    """Return `2.1 python-batch16-seed42`, with the run folder where that is not the one for the CPU."""
    technique, _, folder = record["run_folder"].partition("/")
    number = technique.partition("_")[0]
    place = "" if folder.startswith("run_0_") else f" {folder}"
    return f"{number}{place} {record['run_name']}"


def _metric(record: Record) -> Metric | None:
    """Return the main metric that the run has; None: its data have no facts."""
    after = record["quality"]["after"]
    higher = (metric for metric in metrics_of(record) if metric.direction == "higher")
    return next((metric for metric in higher if after.get(metric.name) is not None), None)


def _quality(record: Record, when: str) -> float | None:
    """Return a run's main metric; None also for what is not finite, which JSON cannot say."""
    value = record["quality"][when].get(_metric(record).name)
    return None if value is None or not math.isfinite(value) else round(value, QUALITY_DIGITS)


def rise_on_general_texts(record: Record) -> float:
    """Return by how much the loss on texts that have nothing to do with the task has risen, in nats a token."""
    before, after = (record["quality"][when]["general_loss"] for when in ("before", "after"))
    return round(after - before, QUALITY_DIGITS)


def _tensors_mib(record: Record) -> float | None:
    """Return what tensors took in training on the fullest device; on a CPU the process's memory is mostly Python."""
    peaks = [entry.get("peak_gib_by_phase", {}).get(TRAINING, 0) for entry in record["memory"]]
    return round(MIB_PER_GIB * max(peaks), MIB_DIGITS) if any(peaks) else None


# What the page has of a run
VALUES = {
    "run": Column("Run", label_of),
    "technique": Column("Technique", lambda record: TECHNIQUES[record["technique"]].label),
    "parallel": Column("Parallelism", sharing_label),
    "devices": column("device_count"),
    "device": column("machine"),
    "task": Column("Task", task_of),
    "model": column("model"),
    "data": Column("Data", lambda record: Path(record["config"]["data"]).name),
    "precision": Column("Precision", "config.precision"),
    "rows_per_step": Column("Rows per step", "effective_batch_size"),
    "seed": column("seed"),
    "minutes": Column("Training (min)", lambda record: round(record["train_time_s"] / 60, 2)),
    "tokens_per_s": Column("Tokens/s", lambda record: round(record["tokens_per_s"])),
    "peak_mib": Column("Tensors (MiB)", _tensors_mib),
    "metric": Column("Quality is", lambda record: _metric(record).label),
    "before": Column("Before", partial(_quality, when="before")),
    "quality": Column("After", partial(_quality, when="after")),
    "forgotten": Column("Loss on general texts rose by", rise_on_general_texts),
    "folder": Column("Run folder", "run_folder"),
    "command": Column("Command", "command"),
    "gallery": Column("Gallery", lambda record: record.get("gallery", [])),
    "settings": Column(
        "Settings",
        lambda record: {name: str(value) for name, value in settings_of(record).items() if value is not None},
    ),
    "is_trial": Column(  # of a few steps or test rows only
        "Trial", lambda record: any(record["config"].get(name, -1) >= 0 for name in ("max_steps", "test_rows"))
    ),
    "group": Column(  # whose quality compares, and time and memory as far as their machines are alike
        "Group", lambda record: f"{task_of(record)}: {model_of(record)}, {Path(record['config']['data']).name}"
    ),
}
NUMBERS = ("devices", "minutes", "tokens_per_s", "peak_mib", "before", "quality", "forgotten", "rows_per_step", "seed")
# Of the page's table; those of numbers stand right, and are sorted as such
COLUMNS = [
    {"key": key, "title": VALUES[key].title, "is_number": key in NUMBERS}
    for key in ("run", "technique", "parallel", "devices", "minutes", "tokens_per_s", "peak_mib", "before", "quality",
                "forgotten", "metric", "model", "data", "precision", "rows_per_step", "seed")
]  # fmt: skip


def values_of(record: Record) -> Values:
    """Return the values of the table's columns, and what a click on the run shows; None: the run has none."""
    return {key: each.value_in(record) for key, each in VALUES.items()}


def divided(record: Record) -> tuple[Values, Values]:
    """Return what table and charts show of a run, and what a choice loads: losses, settings that are not the usual."""
    values = values_of(record)
    settings = values.pop("settings")
    details = {
        **{name: values.pop(name) for name in ("command", "gallery")},
        "settings": {name: settings.get(name) for name, usual in USUAL.items() if settings.get(name) != usual},
        "losses": {kind: _curve(record[f"{kind}_losses"]) for kind in ("training", "validation")},
    }
    return values, details


def _curve(points: list[list[float]]) -> list[list[float]]:
    """Return the points of a curve that can be drawn, at most `MOST_POINTS` of them, evenly spread."""
    finite = [[step, round(loss, LOSS_DIGITS)] for step, loss in points if math.isfinite(step) and math.isfinite(loss)]
    return finite[:: -(-len(finite) // MOST_POINTS) or 1]


class Compared(NamedTuple):
    """A phase on one device of a run, in GiB: of tensors on a CPU, allocated on a GPU."""

    run: str
    planned_gib: float
    measured_gib: float
    phase: str = TRAINING

    @property
    def error(self) -> float:
        """Planned over measured, less one."""
        return self.planned_gib / self.measured_gib - 1


def compared_phases(record: Record) -> Iterator[Compared]:
    """Yield what a run planned and measured, by phase and device; older runs have nothing."""
    for phase, entry in product(PHASES, record["memory"]):
        planned, measured = (entry.get(f"{kind}_gib_by_phase", {}).get(phase) for kind in ("planned", "peak"))
        if planned and measured:  # a phase may hold nothing on a device
            run = f"{record['run_folder'].partition('_')[0]}, {record['run_name']}, rank {entry['rank']}"
            yield Compared(run, planned, measured, phase)


def memory_points(peaks: Iterable[Compared]) -> list[Values]:
    """Return the points of the chart of planned and measured memory; those that would cover each other are one."""
    points: dict[tuple[object, ...], Values] = {}
    for run, *pair, phase in peaks:
        planned, measured = (max(round(MIB_PER_GIB * gib, MIB_DIGITS + 1), LEAST_MIB) for gib in pair)
        place = (phase, *(round(PLACES_PER_E_FOLD * math.log(mib)) for mib in (planned, measured)))
        new = {"run": run, "phase": phase, "planned": planned, "measured": measured, "peaks": 0}
        points.setdefault(place, new)["peaks"] += 1
    return list(points.values())


def comparable(runs: Iterable[Values], cost: str) -> list[Values]:
    """Return the runs with a quality and a `cost`, without trials of a few steps or test rows."""
    return [run for run in runs if run[cost] and run["quality"] is not None and not run["is_trial"]]


def pareto_front(runs: Iterable[Values], cost: str) -> list[Values]:
    """Return the comparable runs that no other beats in quality and `cost`, the cheapest first, by group."""
    front: list[Values] = []
    for group, members in sorted(groups_of(comparable(runs, cost), itemgetter("group")).items()):
        best = -1.0
        for run in sorted(members, key=lambda run: (run[cost], -run["quality"])):
            if run["quality"] > best:
                best = run["quality"]
                front.append({"group": group, "cost": run[cost], "quality": run["quality"]})
    return front
