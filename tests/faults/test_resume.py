"""A run that was stopped and goes on ends where a straight one does: the largest difference is 0, dropout on."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest

from common.base.paths import REPOSITORY
from common.runtime.launchers import torchrun_command
from common.training.checkpoints import MANIFEST_FILE, read_manifest, write_manifest
from tests.forked import run_forked

STEPS = 10
STOPS = {
    "at an epoch's end": "raise step=6 point=batch",
    "within an epoch": "raise step=8 point=batch",
    "within an accumulation": "raise step=8 point=batch times=2",
}
"""An epoch has five steps, of two accumulated batches each."""


@dataclass
class Job:
    place: str
    name: str
    overrides: tuple[str, ...]
    faults: list[str] = field(default_factory=lambda: list(STOPS.values()))
    forgets: str = ""


ACCUMULATES = ("--gradient_accumulation_steps", "2", "--batch_size")


MORE = {
    "single": (*ACCUMULATES, "8"),
    "ddp": (*ACCUMULATES, "4"),
    "fsdp": (*ACCUMULATES, "4", "--technique", "lora"),
    "pp": (*ACCUMULATES, "8", "--technique", "lora"),
    "machines": (*ACCUMULATES, "4"),
}
"""Adapters where there are any, as they have dropout."""


IN_MAKE_TEST, IN_TEST_ALL = ("single",), ("ddp", "fsdp", "pp", "machines")


def _job(workflows: dict[str, tuple[str, int, tuple[str, ...]]], technique: str) -> Job:
    place, _, overrides = workflows[technique]
    return Job(place, technique, (*overrides, *MORE[technique]))


def _work(folder: Path, jobs: list[Job], ranks: int) -> None:
    (folder / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]))
    script = str(REPOSITORY / "tests" / "faults" / "resume_worker.py")
    command = [sys.executable, script] if ranks == 1 else torchrun_command(script, ranks)
    places = [str(REPOSITORY / Path(job.place).parent) for job in jobs]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *places])}
    log = folder / "jobs.log"
    code = run_forked([*command, str(folder / "jobs.json")], folder, env, log, timeout=600)
    assert code == 0, log.read_text(errors="replace")[-8000:]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory, workflows: dict) -> Callable[[str], Path]:
    """Where a technique's runs are; those that start as many ranks, and as seldom, are done together."""
    folder = tmp_path_factory.mktemp("resume")

    @cache
    def done(techniques: tuple[str, ...], ranks: int) -> None:
        jobs = [_job(workflows, technique) for technique in techniques]
        if "single" in techniques:
            faults = [STOPS["within an epoch"]]
            jobs.append(replace(jobs[0], name="forgetful", faults=faults, forgets="_load_rng_state"))
        _work(folder, jobs, ranks)

    def found(technique: str) -> Path:
        done((technique,) if technique in IN_MAKE_TEST else IN_TEST_ALL, workflows[technique][1])
        return folder / "results"

    return found


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize(
    "technique", [*IN_MAKE_TEST, *(pytest.param(each, marks=pytest.mark.slow) for each in IN_TEST_ALL)]
)
def test_a_run_that_goes_on_ends_where_a_straight_one_does(
    results_of: Callable, largest_difference: Callable, outcomes: object, technique: str, stop: str
) -> None:
    results = results_of(technique)
    number = list(STOPS).index(stop)
    folders = [results / f"{technique}-{name}" / "checkpoints" / f"checkpoint-{STEPS}" for name in ("straight", number)]
    assert (folders[0] / MANIFEST_FILE).exists()
    assert largest_difference(*folders) == 0
    record = json.loads((results / f"{technique}-{number}" / "run_record.json").read_text())
    assert record["status"] == "completed"
    assert record["checkpoints"]["went_on_from"] == f"checkpoint-{5 if number == 0 else 7}"
    outcomes.keep(9, technique, f"stopped {stop}: ends as a straight run, difference 0")


def test_without_the_random_numbers_it_would_not(results_of: Callable, largest_difference: Callable) -> None:
    results = results_of("single")
    folders = [results / name / "checkpoints" / f"checkpoint-{STEPS}" for name in ("single-straight", "forgetful-0")]
    assert largest_difference(*folders) > 1e-6


def test_without_a_ranks_random_numbers_or_with_other_rows_a_run_does_not_go_on(
    results_of: Callable, tmp_path: Path, workflows: dict, outcomes: object
) -> None:
    """And as many rows on another number of ranks do; `tests/recipes/test_sharding.py` has them divided anew."""
    kept = tmp_path / "checkpoint-10"
    shutil.copytree(results_of("single") / "single-straight" / "checkpoints" / kept.name, kept)
    about = read_manifest(kept)["about"]
    (kept / "rng_state.pth").unlink()
    (kept / MANIFEST_FILE).unlink()
    write_manifest(kept, about)
    place, _, own = workflows["single"]
    command = [
        sys.executable,
        Path(place).name,
        *own,
        "--num_train_epochs",
        "3",
        *MORE["single"],
        "--resume_from_checkpoint",
        str(kept),
    ]
    refusals = {"lacks rng_state.pth": (), "of steps of 16 rows, but this run's have 8": ("--batch_size", "4")}
    for said, more in refusals.items():
        log = tmp_path / "refused.log"
        refused = [*command, *more, "--results_root", str(tmp_path)]
        assert run_forked(refused, (REPOSITORY / place).parent, os.environ, log, timeout=60) == 2
        assert said in log.read_text()
    outcomes.keep(6, "all", "an exact resume is refused")
    outcomes.keep(8, "all", "the same rows in the same steps, or refused")
