"""The tables of bench/README.md, and 1.1's of the planner: what `make bench` measured last, and which bars hold."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from common.base.paths import REPOSITORY
from common.records.store import Record
from common.reporting.columns import Column, Table
from common.reporting.rows import NOT_RUN, Row

BENCH_FILE = REPOSITORY / "bench" / "bench.json"
ERROR = re.compile(
    r"planner, (?P<by>.+?) against (?P<with>.+?)(, (?P<points>\d+) points)?: (?P<error>mean|worst) error.*"
)
"""Names of how far the planner or its dry run is off: from what, over how many points."""
FAILS = "**no**"
SIGNS = {"at least": "≥", "at most": "≤"}

Entry = dict[str, Any]


def read_entries() -> list[Entry]:
    """Return what `make bench` wrote; nothing if it never ran."""
    return json.loads(BENCH_FILE.read_text(encoding="utf-8")) if BENCH_FILE.is_file() else []


def _planner_errors(_: list[Record]) -> list[Row]:
    """Return what the planner is compared with, each with the entries of mean and worst error."""
    rows: defaultdict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in read_entries():
        if found := ERROR.fullmatch(entry["name"]):
            rows[found["with"], found["by"]].append({**entry, **found.groupdict()})
    return [{**entries[0], "entries": entries} for entries in rows.values()]


def _other_planner_entries(_: list[Record]) -> list[Entry]:
    return [
        {**entry, "what": _said(entry["name"].removeprefix("planner, "))}
        for entry in read_entries()
        if entry["name"].startswith("planner, ") and not ERROR.fullmatch(entry["name"])
    ]


def _with_bars(_: list[Record]) -> Iterator[Entry]:
    """Yield the entries that have a bar, with the part of the benchmark that measures them."""
    for entry in read_entries():
        if entry["bar"] is not None:
            part, rest = re.match(r"(\w*)(.*)", _said(entry["name"])).groups()
            yield {**entry, "part": part.capitalize(), "what": rest.lstrip(", ")}


def _said(name: str) -> str:
    """Return a name that fits a table, without the point of a worst error."""
    return re.sub(r"(?<=worst error) \(.*\)", "", name).removesuffix(f" {NOT_RUN}")


# -- columns


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
    return f"{SIGNS[entry['bar_is']]} {shown}"


def _holds(entry: Entry) -> str:
    return NOT_RUN if _measured(entry) == NOT_RUN else {True: "yes", False: FAILS, None: ""}[entry["holds"]]


def _together(row: Row, shown: Callable[[Entry], str]) -> str:
    """Return what is shown of a row's entries side by side; `not run` once."""
    known = list(filter(None, map(shown, row["entries"])))
    return NOT_RUN if set(known) == {NOT_RUN} else ", ".join(known)


def _all_hold(row: Row) -> str:
    """Return the verdict on all bars; empty: there are none."""
    verdicts = [_holds(entry) for entry in row["entries"]]
    return next((verdict for verdict in (FAILS, NOT_RUN, "yes") if verdict in verdicts), "")


FIGURES = (Column("Measured", _measured), Column("Bar", _bar), Column("Holds", _holds))
WHAT = Column("What", "what")
TABLES = {
    "bench": Table(_with_bars, (Column("Part", "part"), WHAT, *FIGURES), shared=("Part",)),
    "planner-errors": Table(
        _planner_errors,
        (
            Column("Compared with", "with"),
            Column("Planned by", "by"),
            Column("Points", "points", none=""),
            Column("Mean, worst error", lambda row: _together(row, _measured)),
            Column("Allowed", lambda row: _together(row, _bar).replace("≤ ", "")),
            Column("Holds", _all_hold),
        ),
    ),
    "planner-others": Table(_other_planner_entries, (WHAT, *FIGURES)),
}
