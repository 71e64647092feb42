"""A parallelism and a task from outside of `common` are planned, trained, recorded and shown in tables."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from common.base.paths import REPOSITORY
from common.base.specs import PARALLELISMS, TASKS
from common.checks.planner_command import answer, read_options
from common.records.store import Record
from common.reporting.rows import results_in
from common.reporting.tables import side_by_side
from common.runtime.launchers import torchrun_command
from tests.forked import run_forked

WORKER = Path(__file__).with_name("toy_house.py")
STEPS = 5
SETTINGS = ("--report_to", "none", "--independent_judge", "none", "--max_steps", f"{STEPS}", "--eval_steps",
            f"{1 / STEPS}", "--learning_rate", "1e-3", "--max_new_tokens", "4")  # fmt: skip
ROWS = {"train": range(41), "validation": range(50, 59), "test": range(60, 65)}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The worker's module, with what it registers, for this test."""
    monkeypatch.syspath_prepend(str(WORKER.parent))
    import toy_house

    monkeypatch.setitem(PARALLELISMS, "averaging", toy_house.AVERAGING)
    monkeypatch.setitem(TASKS, "counting", toy_house.COUNTING)
    return toy_house


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One device, and two ranks that share its batch."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "rows").mkdir()
    for split, numbers in ROWS.items():
        (folder / "rows" / f"{split}.txt").write_text("\n".join(map(str, numbers)))
    own = (str(folder), "--data", str(folder / "rows"), *SETTINGS)
    shared = ("--parallel", "averaging", "--devices", "2", "--batch_size", "4")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    for command in (
        [sys.executable, str(WORKER), *own, "--batch_size", "8"],
        torchrun_command(str(WORKER), 2, *own, *shared),
    ):
        log = folder / "log"
        assert run_forked(command, folder, environment, log, timeout=300) == 0, log.read_text(errors="replace")
    return folder / "results"


def losses(record: Record, kind: str) -> list[float]:
    return [loss for _, loss in record[f"{kind}_losses"]]


def test_what_common_does_not_know_is_trained_as_one_device_does(toy: ModuleType, results: Path) -> None:
    alone, shared = sorted(results_in(results), key=lambda record: record["config"]["devices"])
    assert (alone["parallel"], shared["parallel"]) == ("single", "averaging")
    assert {alone["config"]["task"], shared["config"]["task"]} == {"counting"}
    for kind in ("training", "validation"):
        assert losses(shared, kind) == pytest.approx(losses(alone, kind), rel=1e-5)
        assert len(set(losses(alone, kind))) == STEPS
    assert [rank["samples"] for rank in shared["world"]] == [20, 20]
    assert max(shared["largest_logit_differences"].values()) < 1e-4


def test_its_own_metric_chooses_the_checkpoint(toy: ModuleType, results: Path) -> None:
    (state,) = (results / "torchrun-batch4-seed42" / "checkpoints" / f"checkpoint-{STEPS}").glob("trainer_state.json")
    history = [entry for entry in json.loads(state.read_text())["log_history"] if toy.FOUND.best_metric in entry]
    found = [entry[toy.FOUND.best_metric] for entry in history]
    (shared,) = (record for record in results_in(results) if record["parallel"] == "averaging")
    best = max(range(STEPS), key=lambda number: found[number])
    assert shared["checkpoints"]["best"] == f"checkpoint-{best + 1}"


def test_it_is_planned_and_its_plan_is_beside_what_was_measured(
    toy: ModuleType, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = ["--model", "llama-3.2-1b", "--technique", "full", "--parallel", "averaging", "--gpu", "a6000"]
    assert answer(read_options([*question, "--gpus", "2", "--json"])) == 0
    (planned,) = json.loads(capsys.readouterr().out)["ranked"]
    assert planned["parallel"] == "averaging"
    assert len(planned["per_device"]) == 2
    assert planned["why"].startswith("each of 2 GPUs holds it all")
    (shared,) = (record for record in results_in(results) if record["parallel"] == "averaging")
    for memory in shared["memory"]:
        assert memory["planned_gib"] == pytest.approx(memory["peak_training_gib"], rel=0.2)


def test_its_runs_are_in_the_tables(toy: ModuleType, results: Path) -> None:
    table = side_by_side(results_in(results))
    shown = table.filter(like="torchrun-batch4").iloc[:, 0]
    assert shown["approach"] == "Full fine-tuning with averaging by hand"
    assert shown["speed-up at the same effective batch"].endswith("x")
