"""The tables of docs/your_own_data.md: quality by the number of training rows, and by the learning rate."""

import json
from collections.abc import Iterator
from math import ceil
from typing import Any

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.records.store import STUDY, Record, kept_records
from common.reporting.rows import Row, as_table, completed, kind_name, kind_of, over_seeds

Fact = tuple[str, str]
"""An exhibit, and what is said of it."""


@as_table
def by_rows(_: list[Record]) -> Iterator[Row]:
    """Return one line for each approach and number of training rows."""
    runs = [run for run in study_runs() if run["config"]["learning_rate"] == RunConfig.learning_rate]
    for approach, rows, group in _grouped(runs, "train_rows"):
        steps, epoch = group[0]["steps"], ceil(rows / group[0]["effective_batch_size"])
        yield {
            "Approach": approach,
            "Rows": str(rows),
            "Passes": f"{steps / epoch:.0f}",
            "Test facts in them": f"{taught_share(group[0]['config']['data'], rows):.0%}",
            **_quality(group),
            "At step": over_seeds([best_step(run) for run in group], "{:.0f}"),
        }


@as_table
def by_learning_rate(_: list[Record]) -> Iterator[Row]:
    """Return one line for each approach and learning rate, all with every training row."""
    runs = study_runs()
    most = max((run["config"]["train_rows"] for run in runs), default=0)
    every_row = [run for run in runs if run["config"]["train_rows"] == most]
    for approach, rate, group in _grouped(every_row, "learning_rate"):
        yield {"Approach": approach, "Learning rate": f"{rate:g}", **_quality(group)}


def study_runs() -> list[Record]:
    """Return the completed runs of docs/measure.py."""
    return completed(kept_records(STUDY))


def taught_share(data: str, rows: int) -> float:
    """Return the share (0 to 1) of the test questions' facts that stand in the first training rows of embedded data."""
    taught, asked = (_facts(data, name) for name in ("train", "test"))
    known, wanted = set().union(*taught[:rows]), set().union(*asked)
    return len(known & wanted) / len(wanted)


def best_step(run: Record) -> int:
    """Return the optimizer step after which the validation loss was lowest."""
    step, _ = min(run["validation_losses"], key=lambda point: point[1])
    return step


def _facts(data: str, split: str) -> list[set[Fact]]:
    lines = (REPOSITORY / data / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [{(row["exhibit"], fact) for fact in row["facts"]} for row in map(json.loads, lines)]


def _grouped(runs: list[Record], setting: str) -> Iterator[tuple[str, Any, list[Record]]]:
    """Yield approach, value and runs (one per seed) of each approach and value of a setting, in increasing order."""
    for kind in sorted({kind_of(run) for run in runs}, reverse=True):  # LoRA first
        of_kind = [run for run in runs if kind_of(run) == kind]
        for value in sorted({run["config"][setting] for run in of_kind}):
            yield kind_name(*kind), value, [run for run in of_kind if run["config"][setting] == value]


def _quality(group: list[Record]) -> Row:
    def after(name: str) -> list[float]:
        return [run["quality"]["after"][name] for run in group]

    shown: list[tuple[str, list[float], str]] = [
        ("Facts said", after("facts_said_share"), "{:.0%}"),
        ("Score", after("similarity_score"), "{:.3f}"),
        ("Validation loss", [run["best_validation_loss"] for run in group], "{:.3f}"),
    ]
    return {name: over_seeds(values, form) for name, values, form in shown}
