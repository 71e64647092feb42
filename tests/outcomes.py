"""What tests measured, put together for the files that the tables of docs are made of."""

from bench.entries import read_kept
from bench.tables import outcomes
from bench.tables.outcomes import Outcome


def merged(measured: list[Outcome]) -> list[Outcome]:
    """Return the outcomes for the file, sorted; of a case that was not run now, what was measured before."""
    before = {_case(row): row for row in read_kept(outcomes.EQUIVALENCE)}
    rows = [before.get(_case(row), row) if row["loss_difference"] is None else row for row in measured]
    return sorted(map(_rounded, rows), key=_case)


def _case(row: Outcome) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in ("task", "strategy", "technique", "note"))


def _rounded(row: Outcome) -> Outcome:
    """Return differences with two digits: more of them are different on another machine."""
    return {name: float(f"{value:.1e}") if isinstance(value, float) else value for name, value in row.items()}
