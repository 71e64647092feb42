"""Every folder for GPUs has room for all that is alive in each of its phases, not only for its training step."""

from dataclasses import replace
from pathlib import Path

import pytest

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.checks.folder_runs import run_of_folder
from common.planning.job import BatchShape
from common.planning.phases import PHASES
from common.planning.plans import Plan, plan_run

FOLDERS = [path for path in sorted(REPOSITORY.glob("[23].*/run_*")) if not path.name.startswith("run_0_")]
CHATTING = [path for path in FOLDERS if path.parent.name[0] == "2"]


def plan_of(folder: Path, **changes: object) -> Plan:
    """Return the plan of the folder's run, with some settings changed, and rows as long as it takes, padded."""
    run = replace(run_of_folder(folder, []), **changes)
    target_length = run.max_target_length if run.goal.summarizes else 0
    labelled, classes = (1, 5) if run.goal.classifies else (target_length or run.max_length, 0)
    return plan_run(run, BatchShape(run.rows_per_rank, run.max_length, labelled, True, classes, target_length))


def each_of(folders: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("folder", folders, ids=lambda path: f"{path.parent.name[:3]}-{path.name}")


@each_of(FOLDERS)
def test_what_is_alive_in_each_phase_fits_the_card(folder: Path) -> None:
    plan = plan_of(folder)
    for gpu, phases in zip(plan.cluster.gpus, plan.phases, strict=True):
        assert [phase.name for phase in phases] == list(PHASES)
        for phase in phases:
            assert phase.alive
            assert phase.memory.safe_gib <= gpu.memory_gib, (
                f"{phase.name}: {phase.memory.safe_gib:.1f} GiB of {phase.alive}"
            )


@each_of(CHATTING)
def test_gradient_checkpointing_is_on_only_where_rows_would_not_fit_without(folder: Path) -> None:
    """It takes a third to a half more computing."""
    own, checkpoints = plan_of(folder), run_of_folder(folder, []).gradient_checkpointing
    other = plan_of(folder, gradient_checkpointing=not checkpoints, use_reentrant=False)
    if checkpoints:
        assert not other.fits
    else:
        assert other.tokens_per_s <= own.tokens_per_s  # equal where a step waits for the network anyway


def test_no_adapter_draws_masks() -> None:
    """A 7B model's 196 adapters would each keep one."""
    runs = [run_of_folder(folder, []) for folder in CHATTING]
    assert {run.lora_dropout for run in runs if run.method.has_adapters} == {0.0}
    assert RunConfig.lora_dropout > 0
