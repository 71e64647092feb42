"""The tables of docs/your_own_data.md: quality by the number of training rows, and by the learning rate."""

import json
from dataclasses import replace
from math import ceil

from bench.tables.table import Table, column
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.records.store import STUDY, Record, kept_records
from common.reporting.columns import Column
from common.reporting.rows import Row, completed, grouped, kind_of


def study_runs() -> list[Record]:
    """Return the completed runs of docs/measure.py."""
    return completed(kept_records(STUDY))


def _by_learning_rate(_: list[Record]) -> list[Row]:
    """Return those with every training row."""
    runs = study_runs()
    most = max((run["config"]["train_rows"] for run in runs), default=0)
    return _grouped([run for run in runs if run["config"]["train_rows"] == most], "learning_rate")


def _grouped(runs: list[Record], setting: str) -> list[Row]:
    """Return a row for each approach and value of a setting, in increasing order, with its runs (one per seed)."""
    in_order = sorted(runs, key=lambda run: run["config"][setting])
    rows = grouped(in_order, lambda run: (kind_of(run), run["config"][setting]))
    return sorted(rows, key=kind_of, reverse=True)  # LoRA first


def _taught_share(row: Row) -> float:
    """Return the share (0 to 1) of the test questions' facts that stand in the first training rows of embedded data."""
    taught, asked = (_facts(row["config"]["data"], split) for split in ("train", "test"))
    known, wanted = set().union(*taught[: row["config"]["train_rows"]]), set().union(*asked)
    return len(known & wanted) / len(wanted)


def _facts(data: str, split: str) -> list[set[tuple[str, str]]]:
    """Return of each row the exhibits, and what is said of them."""
    lines = (REPOSITORY / data / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [{(row["exhibit"], fact) for fact in row["facts"]} for row in map(json.loads, lines)]


QUALITY = (
    replace(column("facts"), over_seeds=True),
    replace(column("score as Score"), over_seeds=True),
    replace(column("loss"), format="{:.3f}", over_seeds=True),
)
TABLES = {
    "own-data-rows": Table(
        lambda _: _grouped(
            [run for run in study_runs() if run["config"]["learning_rate"] == RunConfig.learning_rate], "train_rows"
        ),
        (
            "short_approach",
            Column("Rows", "config.train_rows"),
            Column(
                "Passes",
                lambda row: row["steps"] / ceil(row["config"]["train_rows"] / row["effective_batch_size"]),
                "{:.0f}",
            ),
            Column("Test facts in them", _taught_share, "{:.0%}"),
            *QUALITY,
            Column(  # after which the validation loss was lowest
                "At step",
                lambda run: min(run["validation_losses"], key=lambda point: point[1])[0],
                "{:.0f}",
                over_seeds=True,
            ),
        ),
    ),
    "own-data-learning-rates": Table(
        _by_learning_rate, ("kind", Column("Learning rate", "config.learning_rate", "{:g}"), *QUALITY)
    ),
}
