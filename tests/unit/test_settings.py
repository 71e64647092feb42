"""Each setting of 3.1 is a valid run of the same steps, overrides win, and no two settings write one folder."""

import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import literal_of, read_literal
from common.checks.folder_runs import name_of, quick, run_of_folder
from common.checks.inputs import check_folder
from common.data.splits import load_splits
from common.launch import run_settings_from_command_line

FOLDER = REPOSITORY / "3.1_text_classification" / "run_0_cpu_x2"
NAME = "my_workflow_text_classification"


@pytest.fixture(scope="module")
def workflow() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module(NAME)


@pytest.fixture
def runs(workflow: ModuleType) -> list[RunConfig]:
    return [run_of_folder(FOLDER, setting) for setting in workflow.SETTINGS]


def test_every_setting_is_done_by_the_folder_at_the_same_effective_batch_size(runs: list[RunConfig]) -> None:
    assert (len(runs), {run.effective_batch_size for run in runs}) == (10, {64})
    ways = {(technique, way) for technique in ("full", "lora") for way in ("single", "ddp", "pp", "tp")}
    assert {(run.technique, run.parallel) for run in runs} == ways
    for run in runs:
        check_folder(run)


def test_one_device_pipelines_and_the_recipe_of_adapters(workflow: ModuleType, runs: list[RunConfig]) -> None:
    of_full = {name: getattr(workflow.RUN, name) for name in workflow.LORA}
    for run in runs:
        assert run.devices == run.world_size == (1 if run.parallel == "single" else 2)
        recipe = workflow.LORA if run.technique == "lora" else of_full
        assert {name: getattr(run, name) for name in recipe} == recipe
        assert run.eval_steps == workflow.RUN.eval_steps
    ways = [(run.micro_batches, run.schedule) for run in runs if run.parallel == "pp"]
    assert ways == [(1, "gpipe"), (8, "1f1b")] * 2


def test_without_arguments_a_setting_is_the_folders_own_run(workflow: ModuleType) -> None:
    assert run_of_folder(FOLDER, []) == workflow.RUN
    assert workflow.defaults_for("full", "ddp") == workflow.RUN


def test_overrides_win_over_the_setting(workflow: ModuleType) -> None:
    setting = ["--technique", "lora", "--parallel", "pp"]
    overrides = ["--micro_batches", "4", "--num_train_epochs", "2", "--seed", "7"]
    expected = replace(workflow.defaults_for("lora", "pp"), micro_batches=4, num_train_epochs=2, seed=7)
    assert run_of_folder(FOLDER, [*setting, *overrides]) == expected
    assert run_of_folder(FOLDER, ["--parallel", "single", "--batch_size", "5"]).per_device_train_batch_size == 5


def test_a_folder_may_have_one_setting_only() -> None:
    single = Path("2.1_lora_finetuning/run_0_cpu_x1")
    assert run_of_folder(single, ["--num_train_epochs", "2"]) == replace(literal_of(single), num_train_epochs=2)


@pytest.fixture
def command(
    workflow: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """Run the workflow's command line: the exit code, and what it says on stdout and stderr."""

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", [f"{NAME}.py", *arguments])
        with pytest.raises(SystemExit) as left:
            run_settings_from_command_line(workflow)
        return (left.value.code, *capsys.readouterr())

    return run


def test_help_is_of_the_setting_that_is_asked_for(workflow: ModuleType, command: Callable) -> None:
    code, said, _ = command("--technique", "lora", "--parallel", "single", "--help")
    defaults = dict(re.findall(r"--(\w+)(?:, --\w+)? \S+\s[^(]*\(default: ([^)\s]+)\)", " ".join(said.split())))
    assert float(defaults["learning_rate"]) == workflow.LORA["learning_rate"]
    assert int(defaults["per_device_train_batch_size"]) == workflow.RUN.effective_batch_size
    assert (code, said.count("usage:"), "--quick" in said) == (0, 1, True)


def test_the_table_of_all_has_no_other_runs(
    workflow: ModuleType, monkeypatch: pytest.MonkeyPatch, command: Callable
) -> None:
    mine = {"run_folder": workflow.RUN.run_folder, "run_name": "python-full-single-seed42"}
    others = [{**mine, "run_folder": "elsewhere"}, {**mine, "run_name": "other-data"}]
    shown = []
    monkeypatch.setattr("common.launch.check_inputs", lambda _: None)
    monkeypatch.setattr("common.launch.stream_command", lambda *_, **__: None)
    monkeypatch.setattr("common.launch.results_of_this_machine", lambda: [mine, *others])
    monkeypatch.setattr(
        "common.launch.own_table", lambda _: SimpleNamespace(text=lambda records: shown.extend(records) or "")
    )
    command("--all")
    assert shown == [mine]


def test_quick_takes_a_tenth_of_each_split(workflow: ModuleType) -> None:
    run = run_of_folder(FOLDER, ["--quick", "--parallel", "tp"])
    assert run == replace(workflow.defaults_for("full", "tp"), train_rows=160, validation_rows=40, test_rows=40)
    assert load_splits(run).train == load_splits(workflow.RUN).train[:160]
    assert quick(replace(workflow.RUN, test_rows=3)).test_rows == 1


def test_every_setting_writes_a_folder_of_its_own(runs: list[RunConfig]) -> None:
    names = [name_of(run) for run in runs]
    assert len(set(names)) == len(runs)
    pipelines = ["torchrun-lora-pp-micro1-seed42", "torchrun-lora-pp-micro8-seed42"]
    assert (names[0], names[7:9]) == ("python-full-single-seed42", pipelines)
    assert name_of(replace(runs[0], run_name="mine")) == "mine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--technique", "prompt"], "technique is 'prompt': choose one of 'full', 'lora', 'qlora'"),
        (["--parallel", "fsdp"], "technique is full and parallel fsdp: it is done with full or lora"),
        (["--technique", "qlora"], "technique is qlora and parallel ddp: it is done with full or lora"),
    ],
)
def test_an_unknown_setting_ends_in_one_sentence(
    workflow: ModuleType, command: Callable, arguments: list[str], said: str
) -> None:
    with pytest.raises(BadInputError):
        run_of_folder(FOLDER, arguments)
    code, _, error = command(*arguments)
    assert (code, error.count("\n"), error[:7]) == (2, 1, "error: ")
    assert said in error


def test_all_settings_are_run_and_a_failure_keeps_none_from_running(
    workflow: ModuleType, monkeypatch: pytest.MonkeyPatch, command: Callable
) -> None:
    started = []

    def start(command: list[str]) -> None:
        script = next(place for place, word in enumerate(command) if word.endswith(f"{NAME}.py"))
        started.append((command[script + 1 :], Path(command[script]).resolve().parent))
        if "ddp" in command:
            raise RuntimeError("exit code 1")

    monkeypatch.setattr("common.launch.stream_command", start)
    monkeypatch.setattr("common.launch.results_of_this_machine", list)
    options = ["--quick", "--num_train_epochs", "1"]
    code, said, error = command("--all", *options)
    assert started == [([*setting, *options], FOLDER) for setting in workflow.SETTINGS]
    failed = "torchrun-full-ddp-160rows-seed42, torchrun-lora-ddp-160rows-seed42"
    assert (code, error) == (1, f"error: 2 of 10 settings failed: {failed}\n")
    assert "setting 10 of 10: torchrun-lora-tp-160rows-seed42" in said


@pytest.mark.parametrize("way", ["single", "ddp", "pp", "tp"])
def test_the_gpu_folders_settings_have_the_same_rows_per_step(workflow: ModuleType, way: str) -> None:
    """The folders are copies but for their literals, so that its settings can be made here."""
    run = read_literal((FOLDER.with_name("run_1_a100_80g_x2") / f"{NAME}.py").read_text(encoding="utf-8"))
    for technique in ("full", "lora"):
        setting = workflow.setting_of(run, workflow.LORA, technique, way)
        assert (setting.effective_batch_size, setting.gpu) == (32, run.gpu)
