"""Run folders for GPUs have the settings that the plan finds best for rows as long as they take."""

from dataclasses import replace

import pytest

from common.base.run_config import RunConfig
from common.base.run_folders import run_folders
from common.checks.tried_rows import batch_of_length
from common.planning.plans import Plan, plan_run

FOLDERS = {
    run.run_folder: run for run in run_folders().values() if run.device == "cuda" and run.run_folder.startswith("2.")
}


def planned(run: RunConfig) -> Plan:
    return plan_run(run, batch_of_length(run, run.max_length))


def test_there_are_folders_for_gpus() -> None:
    assert len(FOLDERS) >= 15


@pytest.mark.parametrize("folder", FOLDERS)
def test_rows_as_long_as_a_folder_takes_are_likely_to_fit(folder: str) -> None:
    assert planned(FOLDERS[folder]).may_fit


@pytest.mark.parametrize("folder", FOLDERS)
def test_gradient_checkpointing_is_on_only_where_rows_would_not_fit_without(folder: str) -> None:
    """It costs a third to a half more computing."""
    run = FOLDERS[folder]
    other = planned(replace(run, gradient_checkpointing=not run.gradient_checkpointing, use_reentrant=False))
    if run.gradient_checkpointing:
        assert not other.fits
    else:
        assert other.tokens_per_s < planned(run).tokens_per_s


@pytest.mark.parametrize("folder", [name for name, run in FOLDERS.items() if run.method.has_adapters])
def test_adapters_draw_no_masks(folder: str) -> None:
    run = FOLDERS[folder]
    dropout = planned(replace(run, lora_dropout=RunConfig.lora_dropout))
    assert run.lora_dropout == 0
    assert dropout.highest.phase.peak_gib >= planned(run).highest.phase.peak_gib
