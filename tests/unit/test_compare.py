"""Runs are compared by what differs, what does not compare is said first, and no line is wider than the screen."""

import copy
import json
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from common import report
from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.records.store import RECORD_NAME, Record, load_record
from common.reporting.compare import Comparison, found_runs, labels_of, main
from common.reporting.rows import called
from common.reporting.screen import fitted

LORA = REPOSITORY / "2.1_lora_finetuning" / "run_0_cpu_x1" / "records" / "python-batch16-seed42.json"
CLASSES = REPOSITORY / "3.1_text_classification" / "run_0_cpu_x2" / "records"
SUMMARIES = REPOSITORY / "3.2_summarization" / "run_0_cpu_x2" / "records"


@pytest.fixture
def run() -> Record:
    return load_record(LORA)


def written(results: Path, run: Record, name: str, **changes: object) -> Record:
    """A run's results folder, with another record."""
    other = copy.deepcopy(run) | {"run_name": name}
    other["config"] |= changes
    (results / name).mkdir(parents=True)
    (results / name / RECORD_NAME).write_text(json.dumps(other))
    return other


def compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, arguments)])
    main()
    return capsys.readouterr().out


def test_settings_that_differ_stand_first_and_the_rest_is_left_out(
    run: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, run, "slow", learning_rate=1e-4)
    written(tmp_path, run, "fast", lora_r=16)
    said = compared(monkeypatch, capsys, tmp_path / "slow", tmp_path / "fast")
    settings = said.partition("Quality")[0]
    assert said.startswith("Settings that differ")
    assert [line.split() for line in settings.splitlines() if line.startswith(("learning", "lora"))] == [
        ["learning_rate", "0.0001", "0.001"],
        ["lora_r", "8", "16"],
    ]
    assert "seed" not in settings
    assert "facts said (higher is better)" in said
    assert "9% -> 100%" in said
    assert imread(tmp_path / "slow" / "compare.png").shape[1] > 1000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 7}, "seed (42 / 7)"),
        ({"data": "/mine/rows.jsonl"}, "data (assets/exhibits / /mine/rows.jsonl)"),
        ({"model": "other"}, "model (embedded_base / other)"),
        ({"weights": "random"}, "random weights"),
    ],
)
def test_runs_that_do_not_compare_are_named_so(run: Record, change: dict, words: str) -> None:
    other = copy.deepcopy(run)
    assert Comparison([run, other], ["a", "b"]).warning() == ""
    other["config"] |= change
    assert words in Comparison([run, other], ["a", "b"]).warning()


def test_other_machines_and_threads_do_not_compare(run: Record) -> None:
    for name, value in (("devices", ["another processor"]), ("threads_per_rank", 4)):
        other = copy.deepcopy(run)
        other["environment"][name] = value
        assert "These runs do not compare" in Comparison([run, other], ["a", "b"]).warning()


def test_a_setting_that_means_nothing_for_a_run_is_no_difference(run: Record) -> None:
    full = copy.deepcopy(run) | {"technique": "full"}
    full["config"] |= {"technique": "full", "lora_alpha": 16, "target_modules": "all-linear"}
    names = [line.name for line in Comparison([run, full], ["a", "b"]).settings()]
    assert "technique" in names
    assert "lora_alpha" not in names


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("records", [CLASSES, SUMMARIES])
def test_many_runs_of_each_task_fit_the_screen(
    records: Path, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    files = sorted(records.glob("*.json"))
    picture = tmp_path / "c.png"
    said = compared(monkeypatch, capsys, *files, "--picture", picture)
    assert max(map(len, said.partition("losses by step")[0].splitlines())) <= width
    assert all(file.stem in said.replace("\n", "") for file in files)
    assert picture.stat().st_size > 10_000


def test_json_has_the_same_as_numbers(
    run: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, run, "a", learning_rate=1e-4)
    written(tmp_path, run, "b")
    said = json.loads(compared(monkeypatch, capsys, tmp_path, "--json"))
    assert said["runs"] == ["a", "b"]
    assert said["settings"]["learning_rate"] == [1e-4, 1e-3]
    assert said["quality"]["facts said (higher is better)"][0] == [
        run["quality"][when]["facts_said_share"] for when in ("before", "after")
    ]
    assert said["curves"]["training_losses"][0] == run["training_losses"]


def test_a_failed_run_is_compared_in_what_it_has(
    run: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, run, "a")
    reached = [*list(run)[: list(run).index("cost")], "cost"]
    written(
        tmp_path, {name: run[name] for name in reached} | {"status": "oom"}, "big", per_device_train_batch_size=4096
    )
    said = compared(monkeypatch, capsys, tmp_path)
    assert "oom" in said
    assert "4096" in said


def test_runs_are_found_by_name_and_labelled_apart(tmp_path: Path, run: Record) -> None:
    assert next(iter(found_runs(["2.1/python-batch16-seed42", "2.4/python-batch16-seed42"]).values())) == run
    assert labels_of([run, copy.deepcopy(run) | {"run_folder": "2.4_x/run_0"}]) == [
        "2.1 python-batch16-seed42",
        "2.4 python-batch16-seed42",
    ]
    with pytest.raises(BadInputError, match="did you mean python-batch16-seed7"):
        found_runs(["python-batch16-seed77", "2.1"])
    with pytest.raises(BadInputError, match="two or more"):
        found_runs(["2.1/python-batch16-seed42"])
    assert called([run], ["2.1*"]) == called([run], [run["run_folder"]]) == called([run], ["python-*"]) == [run]


def test_columns_that_do_not_fit_stand_below_with_the_first_one() -> None:
    said = fitted(["", *(f"column {n}" for n in range(9))], [["name", *"abcdefghi"], ["long " * 30, *"123456789"]], 60)
    assert max(map(len, said.splitlines())) <= 60
    tables = said.split("\n\n")
    assert len(tables) > 1
    assert all("name" in table for table in tables)
    assert [column for column in range(9) if f"column {column}" not in said] == []


def test_results_hide_failed_runs_unless_they_are_asked_for(
    run: Record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    off = copy.deepcopy(run) | {"run_name": "off"}
    off["quality"]["before"]["similarity_score_minilm"] = None
    off["config"]["learning_rate"] = 0.025
    failed = copy.deepcopy(run) | {"run_name": "broken", "status": "failed", "error": "no"}
    monkeypatch.setattr(report, "results_of_this_machine", lambda: [run, off, failed])

    def said(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["report", "--results", *arguments])
        report.main()
        return capsys.readouterr().out

    assert "Hidden: 1 that did not complete" in said()
    assert "broken" not in said()
    assert "broken" in said("--failed")
    assert "broken" in said("broken")
    assert "off" not in said("python-*").split("similarity score:")[0]
    lines = {line.partition("  ")[0]: line for line in said().splitlines()}
    assert lines["by MiniLM before"].split()[-1] == "off"
    assert lines["learning rate"].split()[-2:] == ["0.001", "0.025"]
    assert "learning rate" not in said("off")
    assert max(map(len, said().splitlines())) <= 120
