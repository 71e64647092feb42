"""Every folder for GPUs has room for all that is alive in each of its phases, not only for its training step."""

from pathlib import Path

import pytest

from common.base.paths import REPOSITORY
from common.checks.folder_runs import run_of_folder
from common.planning.job import BatchShape
from common.planning.phases import PHASES
from common.planning.plans import Plan, plan_run

FOLDERS = [path for path in sorted(REPOSITORY.glob("[23].*/run_*")) if not path.name.startswith("run_0_")]


def plan_of(folder: Path) -> Plan:
    """Return the plan of the folder's run with rows as long as it takes."""
    run = run_of_folder(folder, [])
    target_length = run.max_target_length if run.goal.summarizes else 0
    labelled, classes = (1, 5) if run.goal.classifies else (target_length or run.max_length, 0)
    return plan_run(run, BatchShape(run.rows_per_rank, run.max_length, labelled, True, classes, target_length))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: f"{path.parent.name[:3]}-{path.name}")
def test_what_is_alive_in_each_phase_fits_the_card(folder: Path) -> None:
    plan = plan_of(folder)
    for gpu, phases in zip(plan.cluster.gpus, plan.phases, strict=True):
        assert [phase.name for phase in phases] == list(PHASES)
        for phase in phases:
            assert phase.alive
            assert phase.safe_gib <= gpu.memory_gib, f"{phase.name}: {phase.safe_gib:.1f} GiB of {phase.alive}"
