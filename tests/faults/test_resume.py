"""A run that was stopped and goes on ends where a straight one does: the largest difference is 0, dropout on."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest

from common.base.paths import REPOSITORY
from common.runtime.launchers import torchrun_command
from common.training.checkpoints import MANIFEST_FILE, read_manifest, write_manifest
from tests.faults.cases import STEPS, WORKFLOWS, cases
from tests.faults.compare import largest_difference
from tests.forked import run_forked

EPOCHS_END, WITHIN_EPOCH, WITHIN_ACCUMULATION = "at an epoch's end", "within an epoch", "within an accumulation"
STOPS = {
    EPOCHS_END: ("raise step=4 point=batch", 3),
    WITHIN_EPOCH: ("raise step=5 point=batch", 4),
    WITHIN_ACCUMULATION: ("raise step=5 point=batch times=2", 4),
}
"""How a run is stopped, and the step that it resumes after. An epoch has three steps, of two accumulated batches."""
FAST = {"single": (EPOCHS_END, WITHIN_EPOCH, WITHIN_ACCUMULATION)}
SLOW = {
    "ddp": (WITHIN_ACCUMULATION,),
    "fsdp": (WITHIN_EPOCH,),
    "pp": (EPOCHS_END, WITHIN_EPOCH),
    "machines": (EPOCHS_END, WITHIN_ACCUMULATION),
    "rewards": (WITHIN_EPOCH,),
    "sp": (WITHIN_ACCUMULATION,),
}
SOAK = {
    "fsdp": (EPOCHS_END, WITHIN_ACCUMULATION),
    "ddp": (EPOCHS_END, WITHIN_EPOCH),
    "pp": (WITHIN_ACCUMULATION,),
    "machines": (WITHIN_EPOCH,),
}
ACCUMULATES = ("--gradient_accumulation_steps", "2", "--batch_size")
MORE = {
    "single": (*ACCUMULATES, "8"),
    "rewards": (*ACCUMULATES, "8"),
    "ddp": (*ACCUMULATES, "4"),
    "fsdp": (*ACCUMULATES, "4", "--technique", "lora"),
    "pp": (*ACCUMULATES, "8", "--technique", "lora"),
    "machines": (*ACCUMULATES, "4"),
    "sp": (*ACCUMULATES, "8", "--technique", "lora"),
}
"""Adapters where there are any, as they have dropout."""


def listed(stops: Mapping[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(technique, stop) for technique, of_technique in stops.items() for stop in of_technique]


def _job(technique: str, stops: tuple[str, ...], forgets: bool = False) -> dict[str, object]:
    """Of resume_worker.py; each of its runs is named by the number of its stop."""
    place, _, overrides = WORKFLOWS[technique]
    faults = {str(list(STOPS).index(stop)): STOPS[stop][0] for stop in stops}
    name = "forgetful" if forgets else technique
    return {"place": place, "name": name, "overrides": (*overrides, *MORE[technique]), "faults": faults,
            "forgets": forgets}  # fmt: skip


def _work(folder: Path, jobs: list[dict], ranks: int) -> None:
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = str(REPOSITORY / "tests" / "faults" / "resume_worker.py")
    command = [sys.executable, script] if ranks == 1 else torchrun_command(script, ranks)
    places = [str(REPOSITORY / Path(job["place"]).parent) for job in jobs]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *places])}
    log = folder / "jobs.log"
    code = run_forked([*command, str(folder / "jobs.json")], folder, env, log, timeout=600)
    assert code == 0, log.read_text(errors="replace")[-8000:]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Where the runs of a technique and a stop are; those that are tested as seldom are done in one start."""

    @cache
    def done(number: int) -> Path:
        folder, stops = tmp_path_factory.mktemp("resume"), (FAST, SLOW, SOAK)[number]
        jobs = [_job(technique, of_technique) for technique, of_technique in stops.items()]
        if stops is FAST:
            jobs.append(_job("single", (WITHIN_EPOCH,), forgets=True))
        _work(folder, jobs, ranks=1 if stops is FAST else 2)
        return folder / "results"

    def found(technique: str, stop: str) -> Path:
        return done(next(i for i, stops in enumerate((FAST, SLOW, SOAK)) if stop in stops.get(technique, ())))

    return found


@pytest.mark.parametrize(("technique", "stop"), cases(listed(FAST), listed(SLOW), listed(SOAK)))
def test_a_run_that_goes_on_ends_where_a_straight_one_does(
    results_of: Callable, outcomes: object, technique: str, stop: str
) -> None:
    results = results_of(technique, stop)
    names = (f"{technique}-straight", f"{technique}-{list(STOPS).index(stop)}")
    folders = [results / name / "checkpoints" / f"checkpoint-{STEPS}" for name in names]
    assert (folders[0] / MANIFEST_FILE).exists()
    assert largest_difference(*folders) == 0
    record = json.loads((results / names[1] / "run_record.json").read_text())
    assert (record["status"], record["checkpoints"]["went_on_from"]) == ("completed", f"checkpoint-{STOPS[stop][1]}")
    outcomes.keep(9, technique, f"stopped {stop}: ends as a straight run, difference 0")


def test_without_the_random_numbers_it_would_not(results_of: Callable) -> None:
    results = results_of("single", WITHIN_EPOCH)
    folders = [results / name / "checkpoints" / f"checkpoint-{STEPS}" for name in ("single-straight", "forgetful-1")]
    assert largest_difference(*folders) > 1e-6


@pytest.mark.parametrize(
    ("fault", "outcome", "more", "said"),
    [
        (6, "an exact resume is refused", (), "lacks rng_state_0.pth"),
        (
            8,
            "the same rows in the same steps, or refused",
            ("--batch_size", "4"),
            "of steps of 16 rows, but this run's have 8",
        ),
        pytest.param(
            35,
            "refused by its name, before anything loads",
            ("--lora_r", "4"),
            "with lora_r 8, but this run's is 4",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["random numbers", "rows", "settings"],
)
def test_without_a_ranks_random_numbers_or_with_other_rows_a_run_does_not_go_on(
    results_of: Callable, tmp_path: Path, outcomes: object, fault: int, outcome: str, more: tuple[str, ...], said: str
) -> None:
    """And as many rows on another number of ranks do; `tests/recipes/test_sharding.py` has them divided anew."""
    kept = tmp_path / f"checkpoint-{STEPS}"
    shutil.copytree(results_of("single", WITHIN_EPOCH) / "single-straight" / "checkpoints" / kept.name, kept)
    about = read_manifest(kept)["about"]
    for name in ("rng_state_0.pth", MANIFEST_FILE):
        (kept / name).unlink()
    write_manifest(kept, about)
    place, _, own = WORKFLOWS["single"]
    settings = (*own, "--num_train_epochs", "3", *MORE["single"], "--resume_from_checkpoint", str(kept), *more)
    command, log = [sys.executable, Path(place).name, *settings, "--results_root", str(tmp_path)], tmp_path / "log"
    assert run_forked(command, (REPOSITORY / place).parent, os.environ, log, timeout=60) == 2
    assert said in log.read_text()
    outcomes.keep(fault, "all", outcome)
