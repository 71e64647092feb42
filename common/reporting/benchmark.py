"""The tables of bench/README.md, and 1.1's of the planner: what `make bench` and kept runs measured, and the bars."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from statistics import fmean
from typing import Any, NamedTuple

from common.base.paths import REPOSITORY
from common.planning.phases import PHASES
from common.records.store import Record
from common.reporting.columns import Column, Table
from common.reporting.rows import NOT_RUN, Row, groups_of

PHASE_BARS = (0.03, 0.1)
"""Largest mean and largest single error of all phases of all kept runs."""
BENCH_FILE = REPOSITORY / "bench" / "bench.json"
WORST = re.compile(r"(?P<what>(.*: )?worst error) \((?P<point>.*)\)")
"""Names that say which point was worst."""
ERROR = re.compile(
    r"planner, (?P<by>.+?) against (?P<with>.+?)(, (?P<points>\d+) points)?: (?P<error>mean|worst) error.*"
)
"""Names of how far the planner, or another tool, is off: from what, over how many points."""
FAILS = "**no**"

Entry = dict[str, Any]


def read_entries() -> list[Entry]:
    """Return what `make bench` wrote; nothing if it never ran."""
    return json.loads(BENCH_FILE.read_text(encoding="utf-8")) if BENCH_FILE.is_file() else []


def _planner_errors(_: list[Record]) -> list[Row]:
    """Return what the planner and fitcheck-llm are compared with, each with the entries of mean and worst error."""
    found = [{**entry, **found.groupdict()} for entry in read_entries() if (found := ERROR.fullmatch(entry["name"]))]
    rows = groups_of(found, lambda entry: (entry["with"], entry["by"]))
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


def _by_command(_: list[Record]) -> list[Entry]:
    """Return all entries by the command that measures them, with what their names share as their part."""
    by_command = groups_of(read_entries(), lambda entry: re.sub(r" --tool \S+", "", entry["command"]))
    prefixes = {command: _prefix(entry["name"] for entry in entries) for command, entries in by_command.items()}
    return [
        {
            **entry,
            "part": prefixes[command].rstrip(",: "),
            "command": command,
            "what": _said(entry["name"].removeprefix(prefixes[command])),
        }
        for command, entries in by_command.items()
        for entry in entries
    ]


def _worst_points(_: list[Record]) -> list[Row]:
    """Return at which point each worst error of the planner was found: planned of found memory."""
    found = (WORST.fullmatch(entry["name"]) for entry in read_entries() if entry["name"].startswith("planner, "))
    return [each.groupdict() for each in found if each]


def _prefix(names: Iterable[str]) -> str:
    """Return what names share at their beginning, up to a comma or a colon."""
    equal = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    shared = "".join(letters[0] for letters in equal)
    end = max(shared.rfind(", "), shared.rfind(": "))
    return shared[: end + 2] if end >= 0 else ""


def _said(name: str) -> str:
    """Return a name that fits a table, without the point of a worst error."""
    worst = WORST.fullmatch(name)
    sooner = r"ours against (.+), times as soon at the loss"
    return re.sub(sooner, r"time to the loss, \1 over ours", worst["what"] if worst else name).removesuffix(
        f" {NOT_RUN}"
    )


# -- phases of kept runs


class Compared(NamedTuple):
    """A phase on one device of a kept run, in GiB: of tensors on a CPU, allocated on a GPU."""

    run: str
    planned_gib: float
    measured_gib: float

    @property
    def error(self) -> float:
        """Planned over measured, less one."""
        return self.planned_gib / self.measured_gib - 1


def compared_by_phase(records: list[Record]) -> dict[str, list[Compared]]:
    """Return what kept runs planned and measured, by phase; runs from before phases were measured have nothing."""
    found: defaultdict[str, list[Compared]] = defaultdict(list)
    for record in records:
        for entry in record["memory"]:
            planned, measured = (entry.get(f"{kind}_gib_by_phase", {}) for kind in ("planned", "peak"))
            run = f"{record['run_folder'].partition('_')[0]}, {record['run_name']}, rank {entry['rank']}"
            for phase in PHASES:
                if planned.get(phase) and measured.get(phase):  # a phase may hold nothing on a device
                    found[phase].append(Compared(run, planned[phase], measured[phase]))
    return dict(found)


def _errors_by_phase(records: list[Record]) -> Iterator[Row]:
    """Yield how many were compared, and by how much plans were off: for each phase, for all, and the bars."""
    by_phase = compared_by_phase(records)
    every = [each for compared in by_phase.values() for each in compared]
    for phase, compared in {**by_phase, "all phases": every}.items():
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
    return f"{'≥' if entry['bar_is'] == 'at least' else '≤'} {shown}"


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
PART, WHAT, COMMAND = Column("Part", "part"), Column("What", "what"), Column("Command", "command", "`{}`")
TABLES = {
    "bench": Table(_with_bars, (PART, WHAT, *FIGURES), shared=("Part",)),
    "bench-all": Table(_by_command, (PART, COMMAND, WHAT, *FIGURES), shared=("Part", "Command")),
    "bench-worst": Table(
        _worst_points,
        (
            Column("What", lambda row: row["what"].partition(", ")[2].removesuffix(": worst error")),
            Column("Point", "point"),
        ),
        line="- {What}: {Point}",
    ),
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
    "memory-by-phase": Table(_errors_by_phase),
    "planner-others": Table(_other_planner_entries, (WHAT, *FIGURES)),
}
