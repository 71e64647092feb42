"""The tables of bench/README.md, and 1.1's of the planner: what `make bench` measured last, and which bars hold."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

import pandas as pd

from common.base.paths import REPOSITORY
from common.records.store import Record
from common.reporting.rows import NOT_RUN, Row

BENCH_FILE = REPOSITORY / "bench" / "bench.json"
WORST = re.compile(r"(?P<what>(.*: )?worst error) \((?P<point>.*)\)")
"""Names that say which point was worst."""
ERROR = re.compile(
    r"planner, (?P<by>.+?) against (?P<with>.+?)(, (?P<points>\d+) points)?: (?P<error>mean|worst) error.*"
)
"""Names of how far the planner, or another tool, is off: from what, over how many points."""
SOONER = re.compile(r"ours against (.+), times as soon at the loss")
ONE_TOOL = re.compile(r" --tool \S+")
FAILS = "**no**"
SIGNS = {"at least": "≥", "at most": "≤"}

Entry = dict[str, Any]


def read_entries() -> list[Entry]:
    """Return what `make bench` wrote; nothing if it never ran."""
    return json.loads(BENCH_FILE.read_text(encoding="utf-8")) if BENCH_FILE.is_file() else []


def planner_errors(_: list[Record]) -> pd.DataFrame:
    """Return how far the planner and fitcheck-llm are off, a line for each of the two and what it is compared with.

    `Allowed` has the bars of mean and worst error.
    """
    rows: defaultdict[tuple[str, str], Row] = defaultdict(dict)
    for entry in read_entries():
        if found := ERROR.fullmatch(entry["name"]):
            row, figures = rows[found["with"], found["by"]], _figures(entry)
            row |= {"Compared with": found["with"], "Planned by": found["by"]}
            row.setdefault("Points", found["points"] or "")
            row["Mean, worst error"] = _joined(row.get("Mean, worst error"), figures["Measured"])
            row["Allowed"] = _joined(row.get("Allowed"), figures["Bar"].removeprefix("≤ "))
            row["Holds"] = _both(row.get("Holds"), figures["Holds"])
    return pd.DataFrame(rows.values())


def planner_others(_: list[Record]) -> pd.DataFrame:
    """Return the planner's other figures, in short."""
    return pd.DataFrame(
        {"What": _said(entry["name"].removeprefix("planner, ")), **_figures(entry)}
        for entry in read_entries()
        if entry["name"].startswith("planner, ") and not ERROR.fullmatch(entry["name"])
    )


def bars(_: list[Record]) -> pd.DataFrame:
    """Return the entries that have a bar, in short; `Part` is the part of the benchmark that measures them."""
    return pd.DataFrame(
        {"Part": part.capitalize(), "What": rest.lstrip(", "), **_figures(entry)}
        for entry in read_entries()
        if entry["bar"] is not None
        for part, rest in [re.match(r"(\w*)(.*)", _said(entry["name"])).groups()]
    )


def every_entry(_: list[Record]) -> pd.DataFrame:
    """Return all entries in short, by the command that measures them; `Part` is what their names share."""
    by_command: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in read_entries():
        by_command[ONE_TOOL.sub("", entry["command"])].append(entry)
    rows = []
    for command, entries in by_command.items():
        prefix = _prefix(entry["name"] for entry in entries)
        rows += [
            {
                "Part": prefix.rstrip(",: "),
                "Command": f"`{command}`",
                "What": _said(entry["name"].removeprefix(prefix)),
                **_figures(entry),
            }
            for entry in entries
        ]
    return pd.DataFrame(rows)


def worst_points(_: list[Record]) -> pd.DataFrame:
    """Return at which point each worst error of the planner was found: planned of found memory."""
    names = (entry["name"] for entry in read_entries() if entry["name"].startswith("planner, "))
    found = filter(None, map(WORST.fullmatch, names))
    return pd.DataFrame(
        {"What": each["what"].partition(", ")[2].removesuffix(": worst error"), "Point": each["point"]}
        for each in found
    )


def _joined(*figures: str | None) -> str:
    """Return figures side by side, without those that are none; `not run` once."""
    known = [figure for figure in figures if figure]
    return NOT_RUN if set(known) == {NOT_RUN} else ", ".join(known)


def _both(one: str | None, other: str) -> str:
    """Return the verdict on two bars; empty: there are none."""
    return next((verdict for verdict in (FAILS, NOT_RUN, "yes") if verdict in (one, other)), "")


def _said(name: str) -> str:
    """Return a name that fits a table, without the point of a worst error."""
    worst = WORST.fullmatch(name)
    return SOONER.sub(r"time to the loss, \1 over ours", worst["what"] if worst else name).removesuffix(f" {NOT_RUN}")


def _figures(entry: Entry) -> Row:
    """Return value, bar and verdict in short: shares in per cent, runs as whole numbers."""
    is_share, bar = entry["unit"] == "share", entry["bar"]
    return {
        "Measured": _not_measured(entry) or _short(entry["value"], entry["unit"]),
        "Bar": "" if bar is None else f"{SIGNS[entry['bar_is']]} " + (f"{100 * bar:g}%" if is_share else f"{bar:g}"),
        "Holds": _holds(entry),
    }


def _short(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:g} {unit}" if unit == "runs" else _with_unit(value, unit)


def _not_measured(entry: Entry) -> str:
    """Return why there is no value; empty = there is one."""
    if entry["value"] is not None:
        return ""
    return NOT_RUN if NOT_RUN in entry["name"] else "not reached"


def _with_unit(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3f} {unit}"


def _holds(entry: Entry) -> str:
    if _not_measured(entry) == NOT_RUN:
        return NOT_RUN
    return {True: "yes", False: FAILS, None: ""}[entry["holds"]]


def _prefix(names: Iterable[str]) -> str:
    """Return what names share at their beginning, up to a comma or a colon."""
    equal = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    shared = "".join(letters[0] for letters in equal)
    end = max(shared.rfind(", "), shared.rfind(": "))
    return shared[: end + 2] if end >= 0 else ""
