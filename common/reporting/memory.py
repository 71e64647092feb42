"""How near the plans of kept runs came to the memory that was measured in each phase."""

from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean
from typing import NamedTuple

from common.planning.phases import PHASES
from common.records.store import Record
from common.reporting.columns import Table
from common.reporting.rows import NOT_RUN, Row

PHASE_BARS = (0.03, 0.1)
"""Largest mean and largest single error of all phases of all kept runs."""


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


def _lines(records: list[Record]) -> Iterator[Row]:
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


TABLES = {"memory-by-phase": Table(_lines)}
