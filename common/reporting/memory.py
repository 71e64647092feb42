"""How near the plans of kept runs came to the memory that was measured in each phase."""

from collections import defaultdict
from statistics import fmean
from typing import NamedTuple

import pandas as pd

from common.planning.phases import PHASES
from common.records.store import Record

ALL = "all phases"
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


def memory_by_phase(records: list[Record]) -> pd.DataFrame:
    """Return a line for each phase, and one for all: how many were compared, and by how much plans were off.

    The last line has the bars.
    """
    by_phase = compared_by_phase(records)
    every = [each for compared in by_phase.values() for each in compared]
    mean, worst = PHASE_BARS
    bars = {
        "Phase": "bar",
        "Compared": "",
        "Mean error": f"≤ {mean:.0%}",
        "Worst error": f"≤ {worst:.0%}",
        "Worst in": "",
    }
    return pd.DataFrame([*(_line(phase, compared) for phase, compared in {**by_phase, ALL: every}.items()), bars])


def _line(phase: str, compared: list[Compared]) -> dict[str, object]:
    if not compared:
        return {"Phase": phase, "Compared": 0, "Mean error": "not run", "Worst error": "not run", "Worst in": ""}
    worst = max(compared, key=lambda each: abs(each.error))
    return {
        "Phase": phase,
        "Compared": len(compared),
        "Mean error": f"{fmean(abs(each.error) for each in compared):.1%}",
        "Worst error": f"{worst.error:+.1%}",
        "Worst in": worst.run,
    }
