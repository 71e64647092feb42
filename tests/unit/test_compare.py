"""Runs are compared by what differs first; each number is the record's own, and what does not compare is said."""

import copy
import json
import sys
from pathlib import Path

import pytest

from common import report
from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.records.store import RECORD_NAME, Record, load_record
from common.reporting.compare import Comparison, found_runs, labels_of, main, text_of
from common.reporting.rows import called
from common.reporting.screen import fitted

LORA = REPOSITORY / "2.1_lora_finetuning" / "run_0_cpu_x1" / "records" / "python-batch16-seed42.json"
CLASSES = REPOSITORY / "3.1_text_classification" / "run_0_cpu_x2" / "records"
SUMMARIES = REPOSITORY / "3.2_summarization" / "run_0_cpu_x2" / "records"
RECORDS = REPOSITORY / "2.2_lora_finetuning_with_ddp" / "run_0_cpu_x2" / "records"
SMALL, LARGE, SEED_7 = (
    RECORDS / f"torchrun-{name}.json" for name in ("batch8-seed42", "batch16-seed42", "batch8-seed7")
)


def compared(*files: Path) -> Comparison:
    runs = [load_record(file) for file in files]
    return Comparison(runs, labels_of(runs))


def test_settings_that_differ_are_named_and_no_others() -> None:
    lines = {line.name: line.values for line in compared(SMALL, LARGE).settings()}
    assert lines["per_device_train_batch_size"] == [8, 16]
    assert not {"seed", "learning_rate", "run_name"} & lines.keys()


def test_numbers_are_those_of_the_records() -> None:
    comparison, (small, large) = compared(SMALL, LARGE), map(load_record, (SMALL, LARGE))
    time = {line.name: line.values for line in comparison.time()}
    assert time["training time"] == [small["train_time_s"], large["train_time_s"]]
    assert "status" not in time  # both completed
    quality = {line.name: line.values for line in comparison.quality()}
    facts = next(values for name, values in quality.items() if name.startswith("facts said"))
    assert facts == [
        [run["quality"][when]["facts_said_share"] for when in ("before", "after")] for run in (small, large)
    ]
    memory = {line.name: line.values for line in comparison.memory()}
    peaks = [max(rank["peak_training_gib"] for rank in run["memory"]) for run in (small, large)]
    assert memory["training's peak, measured (GiB)"] == peaks


def test_runs_that_do_not_compare_are_said_first() -> None:
    assert compared(SMALL, LARGE).warning() == ""
    assert "seed (42 / 7)" in compared(SMALL, SEED_7).warning()
    assert text_of(compared(SMALL, SEED_7), Path("p.png")).startswith("These runs do not compare")


def test_a_table_is_never_wider_than_the_screen_and_loses_nothing() -> None:
    headers, rows = (
        ["", *(f"run {number}" for number in range(9))],
        [["steps", *(str(10**number) for number in range(9))]],
    )
    text = fitted(headers, rows, width=40)
    assert max(map(len, text.splitlines())) <= 40
    assert all(word in text.split() for word in (*map(str, range(9)), *rows[0]))


def test_the_command_draws_a_picture_and_prints_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "losses.png"
    monkeypatch.setattr(sys, "argv", ["compare", str(SMALL), str(LARGE), "--picture", str(picture), "--json"])
    main()
    answer = json.loads(capsys.readouterr().out)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert answer["settings"]["per_device_train_batch_size"] == [8, 16]
    assert answer["curves"]["validation_losses"][0] == load_record(SMALL)["validation_losses"]


def test_runs_are_named_by_patterns_and_a_wrong_name_gets_the_closest() -> None:
    records = [load_record(file) for file in (SMALL, LARGE, SEED_7)]
    assert called(records, ["*-batch8-*"]) == [records[0], records[2]]
    assert called(records, ["2.2/torchrun-batch16-seed42"]) == [records[1]]
    with pytest.raises(BadInputError, match="did you mean torchrun-batch16-seed42"):
        called(records, ["torchrun-batch16-seed4"])
    with pytest.raises(BadInputError, match="1 run is named"):
        found_runs([str(SMALL)])


def said_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, arguments)])
    main()
    return capsys.readouterr().out


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
    said = said_of(monkeypatch, capsys, *files, "--picture", picture)
    assert max(map(len, said.partition("losses by step")[0].splitlines())) <= width
    assert all(file.stem in said.replace("\n", "") for file in files)
    assert picture.stat().st_size > 10_000


def test_a_failed_run_is_compared_in_what_it_has(
    run: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, run, "a")
    reached = [*list(run)[: list(run).index("cost")], "cost"]
    written(
        tmp_path, {name: run[name] for name in reached} | {"status": "oom"}, "big", per_device_train_batch_size=4096
    )
    said = said_of(monkeypatch, capsys, tmp_path)
    assert "oom" in said
    assert "4096" in said


def test_runs_are_found_by_name_and_labelled_apart(tmp_path: Path, run: Record) -> None:
    found = found_runs(["2.1/python-batch16-seed42", "2.4/python-batch16-seed42"])  # of this machine, else those kept
    assert [each["run_folder"].partition("_")[0] for each in found.values()] == ["2.1", "2.4"]
    assert {each["run_name"] for each in found.values()} == {"python-batch16-seed42"}
    assert labels_of([run, copy.deepcopy(run) | {"run_folder": "2.4_x/run_0"}]) == [
        "2.1 python-batch16-seed42",
        "2.4 python-batch16-seed42",
    ]
    with pytest.raises(BadInputError, match="did you mean python-batch16-seed7"):
        found_runs(["python-batch16-seed77", "2.1"])
    with pytest.raises(BadInputError, match="two or more"):
        found_runs(["2.1/python-batch16-seed42"])
    assert called([run], ["2.1*"]) == called([run], [run["run_folder"]]) == called([run], ["python-*"]) == [run]


def test_results_hide_failed_runs_unless_they_are_asked_for(
    run: Record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    off = copy.deepcopy(run) | {"run_name": "off"}
    off["quality"]["before"]["similarity_score_minilm"] = None
    off["config"]["learning_rate"] = 0.025
    failed = copy.deepcopy(run) | {"run_name": "broken", "status": "failed", "error": "no"}
    monkeypatch.setattr(report, "results_of_this_machine", lambda: [run, off, failed])

    def said(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["report", "--results", *arguments])
        report.main()
        return capsys.readouterr().out

    assert "1 runs that did not complete are hidden" in said()
    assert "broken" not in said()
    assert "broken" in said("--failed")
    assert "broken" in said("broken")
    assert "off" not in said("python-*").split("similarity score:")[0]
    lines = {line.partition("  ")[0]: line for line in said().splitlines()}
    assert lines["by MiniLM before"].split()[-1] == "off"
    assert lines["learning rate"].split()[-2:] == ["0.001", "0.025"]
    assert "learning rate" not in said("off")
    assert max(map(len, said().splitlines())) <= 120
