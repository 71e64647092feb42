"""Every folder for GPUs has room for all models that are alive in one of its phases, not only for its training step."""

from pathlib import Path

import pytest

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.checks.folder_runs import run_of_folder
from common.checks.inputs import disk_need
from common.hardware.devices import GIB, find_gpu
from common.planning.architectures import read_architecture
from common.planning.job import BatchShape
from common.planning.memory_plan import device_memory
from common.planning.plans import job_of_run
from common.planning.shares import whole_model
from common.training.strategy import as_computed

FOLDERS = [
    path for path in sorted(REPOSITORY.glob("[23].*/run_*"))
    if not path.name.startswith("run_0_") and not path.parent.name.startswith("3.2_")
]  # fmt: skip
JUDGED = 2
"""The model that answers at the end, and the base, which judges it; also while an adapter is merged."""
IN_USE = 0.93
"""Of a card's memory, what models may take: a CUDA context and a small batch need the rest."""


def whole_gib(run: RunConfig) -> float:
    return disk_need(run.changed_to(technique="full", target_modules="all")).models_bytes / GIB


def quantized_gib(run: RunConfig) -> float:
    architecture = read_architecture(run.model)
    parts = device_memory(architecture, job_of_run(run, BatchShape(1, 16, 16)), whole_model(architecture)).parts_gib
    return parts["weights"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: f"{path.parent.name[:3]}-{path.name}")
def test_the_models_of_each_phase_fit_the_card(folder: Path) -> None:
    run = run_of_folder(folder, [])
    card_gib = find_gpu(run.gpu).memory_gib
    if run.parallel == "mp":
        card_gib *= run.devices  # whole models are divided as the trained one is
    needed = JUDGED * whole_gib(as_computed(run))
    if run.technique == "qlora":
        has_room = 3 * whole_gib(run) < 0.9 * card_gib  # both merged models and the original base
        needed = 3 * whole_gib(run) if has_room else quantized_gib(run)
    assert needed < IN_USE * card_gib
