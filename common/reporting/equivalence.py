"""The table of equal steps: how far five steps of each technique are from those of one device."""

import json

import pandas as pd

from common.base.paths import REPOSITORY
from common.base.specs import TECHNIQUES, Technique
from common.records.store import Record
from common.reporting.rows import NOT_RUN

OUTCOMES = REPOSITORY / "tests" / "recipes" / "equivalence.json"
"""What tests/recipes/test_equivalence.py measured: a list of `task`, `strategy`, `technique`, `note`, and the largest
`loss_difference` (relative) and `weight_difference` (absolute), or None where a case was skipped."""

Outcome = dict[str, object]


def kept_outcomes() -> list[Outcome]:
    """What is in the file, or nothing."""
    return json.loads(OUTCOMES.read_text(encoding="utf-8")) if OUTCOMES.exists() else []


def merged(measured: list[Outcome]) -> list[Outcome]:
    """The outcomes for the file, sorted; of a case that was not run now, what was measured before."""
    before = {_case(row): row for row in kept_outcomes()}
    rows = [before.get(_case(row), row) if row["loss_difference"] is None else row for row in measured]
    return sorted(map(_rounded, rows), key=_case)


def _case(row: Outcome) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in ("task", "strategy", "technique", "note"))


def _rounded(row: Outcome) -> Outcome:
    """Differences with two digits: more of them are another machine's next time."""
    return {name: float(f"{value:.1e}") if isinstance(value, float) else value for name, value in row.items()}


def equivalence(_: list[Record]) -> pd.DataFrame:
    """One line per task and strategy; a cell has the largest differences of losses and of weights."""
    cells: dict[tuple[str, str], dict[str, list[Outcome]]] = {}
    for row in kept_outcomes():
        cells.setdefault((str(row["task"]), str(row["strategy"])), {}).setdefault(str(row["technique"]), []).append(row)
    return pd.DataFrame([
        {
            "Task": task,
            "Strategy": strategy,
            **{_title(each): _cell(techniques.get(each.name, [])) for each in TECHNIQUES.values()},
        }
        for (task, strategy), techniques in cells.items()
    ])  # fmt: skip


def _title(technique: Technique) -> str:
    return technique.short[0].upper() + technique.short[1:]


def _cell(rows: list[Outcome]) -> str:
    found = [(row["loss_difference"], row["weight_difference"]) for row in rows if row["loss_difference"] is not None]
    if not found:
        return NOT_RUN if rows else ""
    return " / ".join(f"{max(column):.0e}" if max(column) else "0" for column in zip(*found, strict=True))


TABLES = {"equivalence": equivalence}
