"""Tokens of the environment are in no record, log or notebook, whatever fails with them."""

import json
import os
import shlex
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import papermill
import pytest

from common.base.command_line import refused_in_one_sentence
from common.base.errors import BadInputError
from common.base.parsing import OneSentenceParser
from common.base.paths import REPOSITORY
from common.base.print_prefix import printing_with_prefix
from common.base.run_config import RunConfig
from common.base.secrets import HIDDEN, hide_secrets, secrets_here, without_secrets
from common.data.row_checks import say_once
from common.records import store
from common.runtime.launchers import stream_command
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


USUAL = ("DB_PASS", "DB_PWD", "MYSQL_PWD", "PGPASSWORD", "REDIS_AUTH", "AZURE_STORAGE_KEY", "OPENAI_KEY", "COMET_KEY",
         "AZURE_STORAGE_CONNECTION_STRING", "KAGGLE_KEY", "PRIVATE_KEY", "SSH_KEY", "ENCRYPTION_KEY", "DATABASE_URL",
         "REDIS_URL",
         "MONGODB_URI", "SENTRY_DSN", "SLACK_WEBHOOK_URL", "GITHUB_PAT", "SESSION_COOKIE", "JWT", "SAS", "HTTP_AUTH",
         "GPG_PASSPHRASE", "AWS_ACCESS_KEY_ID", "dbPassword", "api-key", "CREDS")  # fmt: skip
HARMLESS = ("TOKENIZERS_PARALLELISM", "KEYBOARD", "KEYBOARD_LAYOUT", "SSH_AUTH_SOCK", "XAUTHORITY", "GIT_ASKPASS",
            "AUTHOR", "GIT_AUTHOR_NAME", "COMPASS", "BYPASS_CHECKS", "MONKEY", "PWD", "OLDPWD", "PATH", "HF_TOKEN_PATH",
            "KEYMAP", "GPG_KEY", "SSH_PUBLIC_KEY", "PASSENGER", "SIGNAL")  # fmt: skip


@pytest.mark.parametrize("value", ["hunter2-hunter2", "  s3cret of mine\n"])
def test_secrets_are_known_by_their_usual_names(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*USUAL, *HARMLESS):
        monkeypatch.setenv(name, value)
    assert sorted(secrets_here()) == sorted([*USUAL, *SECRETS])
    assert without_secrets(f"it is {value.strip()}.") == "it is ***."


def test_the_place_of_a_secret_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path))
    assert without_secrets(f"{tmp_path}/x") == f"{tmp_path}/x"


@pytest.mark.parametrize(
    "value",
    [
        "quo\"te's and \\backslash",
        "umlauts-äöü-and-☃",
        "two words & more",
        "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0B\n",
    ],
)
def test_a_secret_is_hidden_however_it_is_written(value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", value)
    data = {"error": f"no {value}", "config": {"data": [value, {value: 1}]}, "number": 2.5, "none": None}
    store.write_json(data, tmp_path / "x.json")
    secret = value.strip()
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "error": without_secrets(f"no {value}"),
        "config": {"data": [without_secrets(value), {without_secrets(value): 1}]},
        "number": 2.5,
        "none": None,
    }
    shown = (
        secret,
        repr(secret),
        json.dumps(secret),
        json.dumps(secret, ensure_ascii=False),
        quote(secret),
        shlex.quote(secret),
    )
    for text in ((tmp_path / "x.json").read_text(), *map(without_secrets, (*shown, *secret.splitlines()[1:]))):
        assert not [form for form in (*shown, *secret.splitlines()[1:]) if form.strip("'\"") in text]


PARTS = "hidden-token", "hidden-word"


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://hidden-token@host/rows.csv", ""),
        ("https://me:hidden-word@host:8443/rows.csv?a=b", ""),
        ("simplecache::https://u:hidden-word@host/rows.csv", ""),
        ("zip://rows.csv::s3://me:hidden-word@bucket/x.zip", ""),
        ("sftp://me:hidden-word@host/rows.csv", ""),
        ("git+https://hidden-token:x-oauth-basic@host/rows.csv", ""),
        ("https://host/rows.csv?sv=1&sig=hidden-token&se=2", "https://host/rows.csv?sv=1&sig=***&se=2"),
        ("https://host/rows.csv?token=hidden-token", "https://host/rows.csv?token=***"),
        ("https://host/r?X-Amz-Credential=hidden-token&X-Amz-Signature=hidden-word&X-Amz-Date=3",
         "https://host/r?X-Amz-Credential=***&X-Amz-Signature=***&X-Amz-Date=3"),
        ("filecache::https://host/rows.csv?api_key=hidden-token#key=hidden-word",
         "filecache::https://host/rows.csv?api_key=***#key=***"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x"),
        ("sftp://me@host/rows.csv", "sftp://me@host/rows.csv"),
        ("hf://datasets/a/b@main/rows.csv", "hf://datasets/a/b@main/rows.csv"),
        ("https://host:8080/a@b?page=2&tokenizer=x", "https://host:8080/a@b?page=2&tokenizer=x"),
    ],
    ids=range(14),  # an id is in the environment, too
)  # fmt: skip
def test_who_logs_in_by_a_url_is_refused_and_what_signs_it_is_hidden(url: str, kept: str, tmp_path: Path) -> None:
    for text in (url, f"--data '{url}' --seed 3", f"[{url}] was not found"):
        assert not [part for part in PARTS if part in without_secrets(text)]
    if not kept:
        with pytest.raises(BadInputError, match="data has a password") as refused:
            RunConfig(data=url)
        assert not [part for part in PARTS if part in str(refused.value)]
        RunConfig(data=without_secrets(url))  # of a record that has it hidden
        return
    store.write_json({"config": store.settings_anywhere(RunConfig(data=url))}, tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text())["config"]["data"] == kept


def test_the_password_of_a_url_in_the_environment_is_hidden_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:hidden-word@proxy:3128")
    monkeypatch.setenv("DATABASE_URL", "postgres://me:hidden%20token@host/db")
    monkeypatch.setenv("STORE_CONNECTION_STRING", "Name=x;AccountKey=hidden-key==;Suffix=y")
    said = without_secrets("hidden-word, hidden token, hidden%20token, hidden-key==, http://me:hidden-word@proxy:3128")
    assert "hidden" not in said


def test_commands_and_refusals_are_printed_without_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, token = "https://host/rows.csv?sig=hidden-token", SECRETS["HF_TOKEN"]
    stream_command([sys.executable, "-c", "", url, token])
    say_once(f"{url}: read with semicolons")
    for error in (BadInputError(f"{url} does not exist, nor {token}"), SystemExit(f"error: {url} {token}")):
        with pytest.raises(SystemExit) as ended, refused_in_one_sentence():
            raise error
        print(ended.value.code)
    with pytest.raises(SystemExit):
        OneSentenceParser().parse_args([url, token])
    said = capsys.readouterr()
    assert "hidden-token" not in said.out + said.err
    assert token not in said.out + said.err


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
    error.add_note(f"as {SECRETS['HF_TOKEN']}")
    hide_secrets(outer)
    assert SECRETS["HF_TOKEN"] not in "".join(traceback.format_exception(outer))
    assert SECRETS["HF_TOKEN"] not in str(error)
    assert HIDDEN in str(error)
    assert isinstance(error, kind)


def test_errors_that_came_from_each_other_end() -> None:
    first, second = ValueError(SECRETS["HF_TOKEN"]), KeyError(SECRETS["HF_TOKEN"])
    first.__cause__, second.__cause__ = second, first
    hide_secrets(first)
    assert HIDDEN in str(first)
    assert HIDDEN in str(second)


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
    monkeypatch.setattr(store, "without_secrets", lambda text: text)
    store.write_json({"error": SECRETS["HF_TOKEN"]}, tmp_path / store.RECORD_NAME)
    assert _files_with_secrets(tmp_path) == ["run_record.json"]
