"""Tokens of the environment are in no record, log or notebook, whatever fails with them."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import papermill
import pytest

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.print_prefix import printing_with_prefix
from common.base.run_config import RunConfig
from common.base.secrets import HIDDEN, hide_secrets, secrets_here, without_secrets
from tests.faults.cases import write_notebook
from tests.forked import run_forked

SECRETS = {"HF_TOKEN": "hf_not-a-real-one-0123456789", "WANDB_API_KEY": "0123456789abcdef-not-real"}


@pytest.fixture(autouse=True)
def _tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def test_only_what_is_secret_is_hidden() -> None:
    assert secrets_here() == SECRETS
    assert without_secrets(f"a {SECRETS['HF_TOKEN']}, false") == "a ***, false"


@pytest.mark.parametrize("setting", ["model", "data", "link", "report_to"])
@pytest.mark.parametrize("value", [SECRETS["HF_TOKEN"], f"https://x/{SECRETS['WANDB_API_KEY']}", "s3://me:hush@x/rows"])
def test_a_setting_with_a_secret_is_refused_without_saying_it(setting: str, value: str) -> None:
    with pytest.raises(BadInputError, match=f"{setting} has (the value of|a password)") as refused:
        replace(RunConfig(), **{setting: value})
    assert value not in str(refused.value)
    assert "hush" not in str(refused.value)


class TellingError(Exception):
    """Says more than its arguments, as errors of network libraries do."""

    def __str__(self) -> str:
        return f"401 for {os.environ['HF_TOKEN']}"


@pytest.mark.parametrize(
    "error",
    [
        ValueError(f"no {SECRETS['HF_TOKEN']}"),
        TellingError("x"),
        FileNotFoundError(2, "no such file", f"/{SECRETS['HF_TOKEN']}/x"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, SECRETS["HF_TOKEN"]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_loses_its_secrets_and_stays_what_it_is(error: Exception) -> None:
    kind, outer = type(error), RuntimeError("outer")
    outer.__cause__ = error
    assert SECRETS["HF_TOKEN"] in str(error)
    hide_secrets(outer)
    assert SECRETS["HF_TOKEN"] not in str(error)
    assert HIDDEN in str(error)
    assert isinstance(error, kind)


def test_printed_lines_lose_them(capsys: pytest.CaptureFixture[str]) -> None:
    with printing_with_prefix("[RANK0:CPU]"):
        print("logs in with", SECRETS["WANDB_API_KEY"])
    assert capsys.readouterr().out == "[RANK0:CPU] logs in with ***\n"


WORKFLOW = """
import my_workflow_lora_finetuning as m
from common.base.command_line import run_from_command_line
import os
def load(log, *_):
    with log.phase("load"):
        raise ValueError("cannot log in with " + os.environ["HF_TOKEN"])
m.load = load
m.evaluate_before = load
run_from_command_line(m.workflow, m.RUN)
"""


def _files_with_secrets(folder: Path) -> list[str]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return [path.name for path in found if any(value.encode() in path.read_bytes() for value in SECRETS.values())]


def test_a_run_that_fails_with_a_token_shows_it_nowhere(tmp_path: Path, outcomes: object) -> None:
    folder = REPOSITORY / "2.1_lora_finetuning" / "run_0_cpu_x1"
    script, log = tmp_path / "workflow.py", tmp_path / "log"
    script.write_text(WORKFLOW)
    command = [sys.executable, str(script), "--results_root", str(tmp_path), "--run_name", "run"]
    around = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{folder}"}
    assert run_forked(command, folder, around, log, timeout=60) == 1
    assert "cannot log in with ***" in log.read_text()
    assert json.loads((tmp_path / "results" / "run" / "run_record.json").read_text())["status"] == "failed"
    assert _files_with_secrets(tmp_path) == []
    outcomes.keep(34, "all", "0 secret bytes in record, log and notebook")


def test_a_notebook_shows_it_neither(tmp_path: Path) -> None:
    cell = (
        "from common.runtime.launchers import stream_command\nimport sys\n"
        "stream_command([sys.executable, '-c', 'import os; print(os.environ[\"HF_TOKEN\"]); raise ValueError("
        'os.environ["HF_TOKEN"])\'])'
    )
    notebook = write_notebook(tmp_path / "in.ipynb", cell)
    with pytest.raises(papermill.PapermillExecutionError, match="ended with exit code 1"):
        papermill.execute_notebook(notebook, tmp_path / "out.ipynb", cwd=REPOSITORY, progress_bar=False)
    assert _files_with_secrets(tmp_path) == []


def test_without_hiding_it_would_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    from common.records import store

    monkeypatch.setattr(store, "without_secrets", lambda text: text)
    store.write_json({"error": SECRETS["HF_TOKEN"]}, tmp_path / store.RECORD_NAME)
    assert _files_with_secrets(tmp_path) == ["run_record.json"]
