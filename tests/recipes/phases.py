"""Whether what a run planned for its phases is what was counted in them."""

from typing import Any

import pytest

WORST = 0.1
"""As in 1.1: by how much a phase's plan may be off."""
COMPARED = ("training", "validation", "saving", "merging")
"""Evaluations are left out: a test with a row or two has other lengths than the longest that are planned."""


def check_phases(run: Any) -> None:
    """Check each phase of each rank."""
    for entry in run.record["memory"]:
        planned, measured = ({phase: entry[f"{kind}_gib_by_phase"][phase] for phase in COMPARED}
                             for kind in ("planned", "peak"))  # fmt: skip
        assert planned == {phase: pytest.approx(gib, rel=WORST) for phase, gib in measured.items()}
