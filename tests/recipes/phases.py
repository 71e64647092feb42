"""Whether what a run planned for its phases is what was counted in them."""

from typing import Any

WORST = 0.1
"""As in 1.1: by how much a phase's plan may be off."""
COMPARED = ("training", "validation", "saving", "merging")
"""Evaluations are left out: a test with a row or two has other lengths than the longest that are planned."""


def check_phases(run: Any) -> None:
    """Check each phase of each rank."""
    for entry in run.record["memory"]:
        planned, measured = entry["planned_gib_by_phase"], entry["peak_gib_by_phase"]
        errors = {phase: round(planned[phase] / measured[phase] - 1, 3) for phase in COMPARED}
        assert {phase: error for phase, error in errors.items() if abs(error) > WORST} == {}
