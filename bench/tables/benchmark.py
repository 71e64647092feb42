"""The tables of bench/README.md, and 1.1's of the planner: what `make bench` measured last, and which bars hold."""

import re
from collections.abc import Iterator
from operator import attrgetter
from statistics import fmean
from typing import Any

from bench.entries import read_kept
from bench.tables.columns import Table
from common.base.paths import REPOSITORY
from common.records.store import Record
from common.reporting.columns import Column
from common.reporting.page_runs import compared_phases
from common.reporting.rows import NOT_RUN, Row, groups_of

PHASE_BARS = (0.03, 0.1)
"""Largest mean and largest single error of all phases of all kept runs."""
BENCH_FILE = REPOSITORY / "bench" / "bench.json"

Entry = dict[str, Any]


def _entries(_: list[Record]) -> Iterator[Entry]:
    """Yield what `make bench` wrote, with the part that measures it, and without the point of a worst error."""
    for entry in read_kept(BENCH_FILE):
        name = re.sub(r"(?<=worst error) \(.*\)", "", entry["name"]).removesuffix(f" {NOT_RUN}")
        part, rest = re.match(r"(\w*)(.*)", name).groups()
        yield {**entry, "part": part.capitalize(), "what": rest.lstrip(", ")}


def _errors_by_phase(records: list[Record]) -> Iterator[Row]:
    """Yield how many were compared, and by how much plans were off: for each phase, for all, and the bars."""
    every = [each for record in records for each in compared_phases(record)]
    for phase, compared in {**groups_of(every, attrgetter("phase")), "all phases": every}.items():
        worst = max(compared, key=lambda each: abs(each.error), default=None)
        yield {
            "Phase": phase,
            "Compared": len(compared),
            "Mean error": f"{fmean(abs(each.error) for each in compared):.1%}" if worst else NOT_RUN,
            "Worst error": f"{worst.error:+.1%}" if worst else NOT_RUN,
            "Worst in": worst.run if worst else "",
        }
    mean, most = (f"≤ {bar:.0%}" for bar in PHASE_BARS)
    yield {"Phase": "bar", "Compared": "", "Mean error": mean, "Worst error": most, "Worst in": ""}


def _measured(entry: Entry) -> str:
    """Return a value in short: shares in per cent, runs as whole numbers; why there is none."""
    value, unit = entry["value"], entry["unit"]
    if value is None:
        return NOT_RUN if NOT_RUN in entry["name"] else "not reached"
    if unit == "share":
        return f"{value:.1%}"
    if unit == "runs":
        return f"{value:g} {unit}"
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3f} {unit}"


def _bar(entry: Entry) -> str:
    if entry["bar"] is None:
        return ""
    shown = f"{100 * entry['bar']:g}%" if entry["unit"] == "share" else f"{entry['bar']:g}"
    return f"{'≥' if entry['bar_is'] == 'at least' else '≤'} {shown}"


def _holds(entry: Entry) -> str:
    return NOT_RUN if _measured(entry) == NOT_RUN else {True: "yes", False: "**no**", None: ""}[entry["holds"]]


FIGURES = (Column("What", "what"), Column("Measured", _measured), Column("Bar", _bar), Column("Holds", _holds))
TABLES = {
    "bench": Table(
        lambda records: [entry for entry in _entries(records) if entry["bar"] is not None],
        (Column("Part", "part"), *FIGURES),
        shared=("Part",),
    ),
    "bench-planner": Table(
        lambda records: [entry for entry in _entries(records) if entry["part"] == "Planner"], FIGURES
    ),
    "memory-by-phase": Table(_errors_by_phase),
}
