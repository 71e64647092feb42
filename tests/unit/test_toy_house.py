"""A parallelism and a task from outside of `common` are planned, trained, recorded and shown in tables."""

import json
from pathlib import Path

import pytest

from common.base.specs import PARALLELISMS, TASKS
from common.checks.planner_command import answer, read_options
from common.records.store import Record
from common.reporting.rows import results_of_this_machine
from common.reporting.tables import side_by_side
from tests.unit import toy_house
from tests.unit.ranks import run_ranks

WORKER = "toy_house.py"
STEPS = 5
SETTINGS = (
    "--report_to", "none", "--independent_judge", "none", "--max_steps", f"{STEPS + 1}", "--eval_steps", "1",
    "--dataloader_num_workers", "1", "--early_stopping_patience", "9", "--learning_rate", "1e-3",
    "--max_new_tokens", "4",
)  # fmt: skip
ROWS = {"train": range(41), "validation": range(50, 59), "test": range(60, 65)}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker registers, for each test."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setitem(PARALLELISMS, "averaging", toy_house.AVERAGING)
    monkeypatch.setitem(TASKS, "counting", toy_house.COUNTING)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One device, and two ranks that share its batch."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "rows").mkdir()
    for split, numbers in ROWS.items():
        (folder / "rows" / f"{split}.txt").write_text("\n".join(map(str, numbers)))
    own = ("--data", str(folder / "rows"), *SETTINGS)
    run_ranks(WORKER, 1, folder, *own, "--batch_size", "8")
    run_ranks(WORKER, 2, folder, *own, "--parallel", "averaging", "--devices", "2", "--batch_size", "4")
    return folder / "results"


@pytest.fixture
def runs(results: Path) -> list[Record]:
    return sorted(results_of_this_machine(results), key=lambda record: record["config"]["devices"])


def losses(record: Record, kind: str) -> list[float]:
    return [loss for _, loss in record[f"{kind}_losses"]]


def test_what_common_does_not_know_is_trained_as_one_device_does(runs: list[Record]) -> None:
    alone, shared = runs
    assert [record["parallel"] for record in runs] == ["single", "averaging"]
    assert {record["config"]["task"] for record in runs} == {"counting"}
    for kind in ("training", "validation"):
        assert losses(shared, kind) == pytest.approx(losses(alone, kind), rel=1e-5)
        assert len(set(losses(alone, kind))) == STEPS
    assert [rank["samples"] for rank in shared["world"]] == [20, 20]
    assert alone["heard"] == shared["heard"] == list(range(1, STEPS + 1)), "a callback of its own ended the training"
    assert max(shared["largest_logit_differences"].values()) < 1e-4


def test_its_own_metric_chooses_the_checkpoint(results: Path, runs: list[Record]) -> None:
    state = results / "torchrun-batch4-seed42" / "checkpoints" / f"checkpoint-{STEPS}" / "trainer_state.json"
    metric = toy_house.FOUND.best_metric
    _, *found = (entry[metric] for entry in json.loads(state.read_text())["log_history"] if metric in entry)
    assert len(found) == STEPS
    assert runs[1]["checkpoints"]["best"] == f"checkpoint-{found.index(max(found)) + 1}"


def test_it_is_planned_and_its_plan_is_beside_what_was_measured(
    runs: list[Record], capsys: pytest.CaptureFixture[str]
) -> None:
    question = "--model llama-3.2-1b --technique full --parallel averaging --gpu a6000 --gpus 2 --json"
    assert answer(read_options(question.split())) == 0
    (planned,) = json.loads(capsys.readouterr().out)["ranked"]
    assert (planned["parallel"], len(planned["per_device"])) == ("averaging", 2)
    assert planned["why"].startswith("each of 2 GPUs holds it all")
    for memory in runs[1]["memory"]:
        assert memory["planned_gib"] == pytest.approx(memory["peak_training_gib"], rel=0.2)


def test_its_runs_are_in_the_tables(runs: list[Record]) -> None:
    shown = side_by_side(runs).filter(like="torchrun-batch4").iloc[:, 0]
    assert shown["approach"] == "Full fine-tuning with averaging by hand"
    assert shown["speed-up at the same effective batch"].endswith("x")
