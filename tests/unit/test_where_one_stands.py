"""Relative paths mean from where the user stands, whichever command reads them, and what is printed can be pasted."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.compare import found_runs
from bench.repeat import records_below
from common import launch
from common.base import paths
from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import literal_of
from common.checks import dry_run, preview
from common.checks.run_command import run_command
from common.data.row_checks import say_once
from common.planning.job import BatchShape
from common.planning.plans import plan_run
from tests.pace import patient

FOLDER = "2.1_lora_finetuning/run_0_cpu_x1"
SCRIPT = REPOSITORY / FOLDER / "my_workflow_lora_finetuning.py"
KEPT = REPOSITORY / FOLDER / "records" / "python-batch16-seed42.json"
ODD_NAMES = ('it\'s "mine" $HOME `date` back\\slash!', "#1 & (2); [3]* 100% Gérät")


@pytest.fixture
def stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's own, in which commands are given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path.resolve()


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Give a command: its exit code, output and errors."""

    def give(main: Callable[[], None], *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        return (code, *capsys.readouterr())

    return give


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, given: Callable) -> Callable[..., tuple[RunConfig, list[str]]]:
    """Launch a folder: the run that is checked, and the command that takes the process's place."""

    def launches(*arguments: str) -> tuple[RunConfig, list[str]]:
        checked, started = [], []
        monkeypatch.setattr(launch, "check_inputs", checked.append)
        monkeypatch.setattr(launch.os, "execv", lambda _, words: started.append(words) or sys.exit())
        code, _, said = given(launch.main, *arguments)
        assert code == 0, said
        return checked[0], started[0]

    return launches


def test_a_folder_is_launched_from_anywhere_and_the_user_stays_where_they_are(stands: Path, launched: Callable) -> None:
    (stands / "mine.yaml").write_text("max_steps: 2\nresults_root: my results\n")
    run, command = launched(FOLDER, "--config", "mine.yaml", "--resume_from_checkpoint", "old/checkpoint-1")
    assert Path.cwd() == stands
    assert (run.max_steps, run.results_folder("x").resolve()) == (2, stands / "my results" / "results" / "x")
    assert Path(command[1]).resolve() == SCRIPT
    assert command[2:] == ["--config", "mine.yaml", "--resume_from_checkpoint", "old/checkpoint-1"]


@pytest.mark.parametrize("place", ["", FOLDER, "2.1_lora_finetuning"])
def test_the_folder_is_the_one_where_one_stands_or_is_named_from_there(
    place: str, launched: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(REPOSITORY / place)
    named = {"": [f"./{FOLDER}/"], FOLDER: [], "2.1_lora_finetuning": ["run_0_cpu_x1"]}[place]
    run, command = launched(*named, "--max_steps", "2")
    assert (run.run_folder, Path(command[1]).resolve(), command[2:]) == (FOLDER, SCRIPT, ["--max_steps", "2"])


def test_what_is_offered_in_place_of_a_wrong_folder_is_taken(stands: Path, given: Callable, launched: Callable) -> None:
    code, _, said = given(launch.main, "2.1_lora_finetunin/run_0_cpu_x1")
    assert code == 2
    offered = said.partition("did you mean ")[2].partition("?")[0]
    assert launched(offered)[0].run_folder == offered == FOLDER
    assert literal_of(Path(offered)).run_folder == FOLDER
    assert records_below([FOLDER]).keys() == records_below([str(REPOSITORY / FOLDER)]).keys()


def test_what_a_check_says_is_left_to_the_ranks_unless_it_refuses(
    stands: Path, given: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(run: RunConfig) -> None:
        print("rows are read")
        if run.max_steps == 3:
            raise BadInputError("no rows")

    monkeypatch.setattr(launch, "check_inputs", check)
    monkeypatch.setattr(launch.os, "execv", lambda *_: sys.exit())
    assert given(launch.main, FOLDER) == (0, "", "")
    assert given(launch.main, FOLDER, "--max_steps", "3") == (2, "rows are read\n", "error: no rows\n")


@pytest.mark.parametrize(("rank", "said"), [("0", "a note\n"), ("1", "")])
def test_a_note_is_said_by_one_rank_of_a_machine(
    rank: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    say_once("a note")
    say_once("a note")
    assert capsys.readouterr().out == said


def test_runs_are_compared_by_bare_names_where_they_were_told_to_write(stands: Path) -> None:
    record = json.loads(KEPT.read_text())
    for name, seed in (("one", 1), ("two", 2)):
        folder = stands / "my results" / "results" / name
        folder.mkdir(parents=True)
        changed = {**record, "run_name": name, "config": {**record["config"], "seed": seed}}
        (folder / "run_record.json").write_text(json.dumps(changed))
    found = found_runs(["one", "two"], Path("my results"))
    assert [run["config"]["seed"] for run in found.values()] == [1, 2]
    assert list(found) == [Path("my results", "results", name, "run_record.json") for name in ("one", "two")]


def test_summaries_are_looked_at_without_a_technique(stands: Path, given: Callable) -> None:
    rows = "".join(f"A long text about number {number}.,Number {number}.\n" for number in range(20))
    (stands / "rows.csv").write_text(f"text,summary\n{rows}")
    code, said, error = given(
        preview.main, "rows.csv", "--task", "summarization", "--model", "assets/embedded_summarizer"
    )
    assert (code, error) == (0, "")
    assert "16 train, 2 validation, 2 test" in said


@pytest.mark.parametrize(
    ("folder", "options", "said"),
    [
        ("2.6_full_finetuning_with_fsdp/run_1_a100_80g_x2", [], "parallel is fsdp"),
        ("2.6_full_finetuning_with_fsdp/run_1_a100_80g_x2", ["--parallel", "zero3"], "parallel is zero3"),
        ("2.3_qlora_finetuning/run_1_a5000_24g_x1", [], "cannot be quantized"),
    ],
)
def test_a_dry_run_refuses_what_it_cannot_do_before_it_looks_for_a_model(
    folder: str, options: list[str], said: str, given: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "suited_to_model", lambda _: pytest.fail("looked for"))
    code, _, error = given(dry_run.main, folder, *options, "--model", "nobody/nothing")
    assert (code, said in error) == (2, True)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_the_planners_command_names_the_model_as_it_was_asked(
    name: str, stands: Path, given: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pasted into a shell, whose make gives it to another one: what arrives there is the model's folder."""
    (stands / name).mkdir()
    shutil.copy(REPOSITORY / "assets" / "embedded_base" / "config.json", stands / name)
    plan = plan_run(RunConfig(technique="full"), BatchShape(16, 40, 20))
    command = run_command(plan, name)
    assert command.startswith(f"make -C {REPOSITORY} run FOLDER=")
    monkeypatch.chdir(REPOSITORY)
    assert run_command(plan, str(stands / name)) == command.replace(f" -C {REPOSITORY}", "")
    makefile = "run:\n\t@printf '%s\\n' $(ARGS)\n"
    (stands / "Makefile").write_text(makefile)
    pasted = command.replace(f"-C {REPOSITORY}", f"-s -C {shlex.quote(str(stands))}")
    words = subprocess.run(["bash", "-c", pasted], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[words.index("--model") + 1] == str(stands / name)


BALLAST = "held = b'x' * 3 * 10**8\n"
"""As `sitecustomize.py`: another machine's Python process holds more than ours."""


@pytest.mark.slow
@pytest.mark.parametrize("folder", [FOLDER, "2.2_lora_finetuning_with_ddp/run_0_cpu_x2"], ids=["one rank", "two ranks"])
def test_a_run_says_each_thing_once_warns_of_nothing_and_its_last_command_can_be_pasted(
    folder: str, stands: Path
) -> None:
    (stands / "sitecustomize.py").write_text(BALLAST)
    rows = "".join(f"Who is number {number}?,It is number {number}.\n" for number in range(40))
    (stands / "my rows.csv").write_text(f"question,answer\n{rows}")
    (stands / "mine.yaml").write_text("data: my rows.csv\nmax_steps: 2\nindependent_judge: none\nreport_to: none\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(stands), str(REPOSITORY)])}

    def give(*words: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=patient(300), check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return re.sub(r"^\[RANK\d:CPU\] ", "", done.stdout, flags=re.MULTILINE).splitlines()

    named = ("--config", "mine.yaml", "--results_root", "my results")
    lines = give("-m", "common.launch", folder, *named, "--run_name", "mine")
    assert [line for line in lines if "WARNING" in line] == []
    assert [sum(said in line for line in lines) for said in ("read as questions", "are held out for each")] == [1, 1]
    record = json.loads((stands / "my results" / "results" / "mine" / "run_record.json").read_text())
    for entry in record["memory"]:
        assert entry["process_gib"] > 0.28
        assert entry["planned_gib"] == pytest.approx(entry["peak_training_gib"], rel=0.2)
    _, *pasted = shlex.split(lines[-1].partition("talk to it: ")[2])
    assert give(*pasted, "Who is number 3?")


@pytest.mark.parametrize("place", ["", "2.1_technique/run_0", ".."])
def test_a_printed_command_starts_this_python_from_where_one_stands(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "a copy"
    python = repository / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (repository / place).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(paths, "REPOSITORY", repository)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.chdir(repository / place)
    named, *rest = shlex.split(paths.command_here("chat"))
    assert (Path(named).resolve(), rest) == (python.resolve(), ["-m", "common.chat"])
    assert not Path(named).is_absolute()
