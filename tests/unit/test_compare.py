"""Runs are compared by what differs first; each number is the record's own, and what does not compare is said."""

import copy
import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from bench import report
from bench.compare import found_runs, labels_of, main, parts_of, text_of, warning_of
from bench.curves import plot_curves
from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.records.store import RECORD_NAME, Record, load_record
from common.reporting.layout import fitted
from common.reporting.rows import called

LORA = REPOSITORY / "2.1_lora_finetuning" / "run_0_cpu_x1" / "records" / "python-batch16-seed42.json"
CLASSES = REPOSITORY / "3.1_text_classification" / "run_0_cpu_x2" / "records"
SUMMARIES = REPOSITORY / "3.2_summarization" / "run_0_cpu_x2" / "records"
RECORDS = REPOSITORY / "2.2_lora_finetuning_with_ddp" / "run_0_cpu_x2" / "records"
SMALL, LARGE, SEED_7 = (
    RECORDS / f"torchrun-{name}.json" for name in ("batch8-seed42", "batch16-seed42", "batch8-seed7")
)


def loaded(*files: Path) -> list[Record]:
    return [load_record(file) for file in files]


def test_settings_that_differ_are_named_and_numbers_are_those_of_the_records() -> None:
    runs = loaded(SMALL, LARGE)
    parts = {part: {line.name: line.values for line in lines} for part, lines in parts_of(runs).items()}
    assert parts["settings"]["per_device_train_batch_size"] == [8, 16]
    assert not {"seed", "learning_rate", "run_name"} & parts["settings"].keys()
    assert parts["time"]["training time"] == [run["train_time_s"] for run in runs]
    assert "status" not in parts["time"]  # both completed
    facts = next(values for name, values in parts["quality"].items() if name.startswith("fact recall"))
    assert facts == [[run["quality"][when]["facts_said_share"] for when in ("before", "after")] for run in runs]
    peaks = [max(rank["peak_training_gib"] for rank in run["memory"]) for run in runs]
    assert parts["memory"]["training's peak, measured (GiB)"] == peaks


def test_runs_that_do_not_compare_are_said_first() -> None:
    assert warning_of(loaded(SMALL, LARGE)) == ""
    assert text_of(loaded(SMALL, SEED_7), Path("p.png")).startswith("These runs do not compare")


def test_a_table_is_never_wider_than_the_screen_and_loses_nothing() -> None:
    row = ["steps", *(str(10**number) for number in range(9))]
    text = fitted(["", *(f"run {number}" for number in range(9))], [row], width=40)
    assert max(map(len, text.splitlines())) <= 40
    assert {*map(str, range(9)), *row} <= set(text.split())


def test_the_command_draws_a_picture_and_prints_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "losses.png"
    answer = json.loads(said_of(monkeypatch, capsys, SMALL, LARGE, "--picture", picture, "--json"))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert answer["settings"]["per_device_train_batch_size"] == [8, 16]
    assert answer["curves"]["validation_losses"][0] == load_record(SMALL)["validation_losses"]


def test_runs_are_named_by_patterns_and_a_wrong_name_gets_the_closest() -> None:
    records = loaded(SMALL, LARGE, SEED_7, LORA)
    small, large, seed_7, lora = records
    for name, expected in (
        ("*-batch8-*", [small, seed_7]), ("2.2/torchrun-batch16-seed42", [large]), ("2.1*", [lora]),
        ("python-*", [lora]), (lora["run_folder"], [lora]),
    ):  # fmt: skip
        assert called(records, [name]) == expected
    with pytest.raises(BadInputError, match="did you mean torchrun-batch16-seed42"):
        called(records, ["torchrun-batch16-seed4"])
    with pytest.raises(BadInputError, match=r"1 run is named .*, but two or more"):
        found_runs([str(SMALL)])


def said_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, arguments)])
    main()
    return capsys.readouterr().out


@pytest.fixture
def run() -> Record:
    return load_record(LORA)


def written(results: Path, run: Record, name: str, **changes: object) -> None:
    """Write a run's results folder, with another record."""
    other = copy.deepcopy(run) | {"run_name": name}
    other["config"] |= changes
    (results / name).mkdir(parents=True)
    (results / name / RECORD_NAME).write_text(json.dumps(other))


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("config", {"seed": 7}, "seed (42 / 7)"),
        ("config", {"data": "/mine/rows.jsonl"}, "data (assets/exhibits / /mine/rows.jsonl)"),
        ("config", {"model": "other"}, "model (embedded_base / other)"),
        ("config", {"weights": "random"}, "random weights"),
        ("environment", {"devices": ["another processor"]}, "These runs do not compare"),
        ("environment", {"threads_per_rank": 4}, "These runs do not compare"),
    ],
)
def test_runs_that_do_not_compare_are_named_so(run: Record, part: str, change: dict, words: str) -> None:
    other = copy.deepcopy(run)
    assert warning_of([run, other]) == ""
    other[part] |= change
    assert words in warning_of([run, other])


def test_a_setting_that_means_nothing_for_a_run_is_no_difference(run: Record) -> None:
    full = copy.deepcopy(run) | {"technique": "full"}
    full["config"] |= {"technique": "full", "lora_alpha": 16, "target_modules": "all-linear"}
    names = {line.name for line in parts_of([run, full])["settings"]}
    assert names & {"technique", "lora_alpha"} == {"technique"}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("records", [CLASSES, SUMMARIES])
def test_many_runs_of_each_task_fit_the_screen(
    records: Path, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    files, picture = sorted(records.glob("*.json")), tmp_path / "c.png"
    said = said_of(monkeypatch, capsys, *files, "--picture", picture)
    assert max(map(len, said.partition("losses by step")[0].splitlines())) <= width
    assert [file.stem for file in files if file.stem not in said.replace("\n", "")] == []
    assert picture.stat().st_size > 10_000


def test_a_failed_run_is_compared_in_what_it_has(
    run: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, run, "a")
    reached = {name: run[name] for name in list(run)[: list(run).index("cost") + 1]}
    written(tmp_path, reached | {"status": "oom"}, "big", per_device_train_batch_size=4096)
    said = said_of(monkeypatch, capsys, tmp_path)
    assert [word for word in ("oom", "4096") if word in said] == ["oom", "4096"]


def test_runs_are_found_by_name_and_labelled_apart() -> None:
    found = found_runs(["2.1/python-batch16-seed42", "2.4/python-batch16-seed42"])  # of this machine, else those kept
    labels = ["2.1 python-batch16-seed42", "2.4 python-batch16-seed42"]
    assert labels_of(list(found.values())) == labels
    assert [f"{each['run_folder'].partition('_')[0]} {each['run_name']}" for each in found.values()] == labels
    with pytest.raises(BadInputError, match="did you mean python-batch16-seed7"):
        found_runs(["python-batch16-seed77", "2.1"])


def test_a_runs_name_means_this_machines_runs_before_kept_ones(run: Record, tmp_path: Path) -> None:
    assert len(found_runs(["python-batch16-seed42"])) > 1, "several folders keep one of this name"
    for name in ("python-batch16-seed42", "mine"):
        written(tmp_path / "results", run | {"run_folder": "my_folder"}, name)
    found = found_runs(["python-batch16-seed42", "mine"], tmp_path)
    assert {each["run_folder"] for each in found.values()} == {"my_folder"}
    assert len(found_runs(["python-batch16-seed*", "mine"], tmp_path)) > 2, "a pattern means all"


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
    assert ["broken" in said(*words) for words in ((), ("*",), ("broken",))] == [False, True, True]
    assert "off" not in said("python-*").split("similarity score:")[0]
    assert "learning rate" not in said("off")
    lines = {line.partition("  ")[0]: line for line in said().splitlines()}
    cells = (lines["by MiniLM before"].split()[-1], lines["learning rate"].split()[-2:])
    assert cells == ("off", ["0.001", "0.025"])
    assert max(map(len, said().splitlines())) <= 120


def test_a_picture_of_many_runs_can_be_read(run: Record) -> None:
    runs = [copy.deepcopy(run) | {"run_name": f"run-{number:03}-of-a-sweep $\\frac$"} for number in range(100)]
    for number, each in enumerate(runs):
        each["validation_losses"] = [[step, loss + abs(number - 50)] for step, loss in each["validation_losses"]]
    figure = plot_curves(runs, [each["run_name"] for each in runs])
    figure.canvas.draw()
    assert [axes.get_position().height > 0.5 and axes.get_position().width > 0.2 for axes in figure.axes] == [True] * 3
    names = [entry.get_text() for legend in figure.legends for entry in legend.get_texts()]
    assert 10 <= len(names) <= 30
    assert any("run-050" in name for name in names), "the best one"
    assert [len(axes.lines) for axes in figure.axes] == [100] * 3
    plt.close(figure)
