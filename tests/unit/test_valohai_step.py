"""Around a workflow, a Valohai step finds the other machines and its input, and names its model."""

import json
import sys
from pathlib import Path

import pytest
from valohai import distributed

from common.base.errors import BadInputError
from tests.valohai_task import distributed_task
from valohai_step import data_option, main, name_model, torchrun_options, world_options

FILES = ("config.json", "model.safetensors", "tokenizer.json")


def make_model(outputs: Path, run: str = "torchrun-seed42") -> Path:
    folder = outputs / "results" / run / "model"
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text("")
    (folder.parent / "run_record.json").write_text("{}")
    return folder


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["valohai_step", *arguments])
    main()


def test_files_of_the_input_are_the_data_and_no_files_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data_option(tmp_path) == ""
    (tmp_path / "data").mkdir()
    assert data_option(tmp_path) == ""
    (tmp_path / "data" / "train.json").write_text("[]")
    monkeypatch.setenv("VH_INPUTS_DIR", str(tmp_path))
    call(monkeypatch, "data-option")
    assert capsys.readouterr().out == f"--data {tmp_path / 'data'}\n"


def test_all_files_of_the_model_are_one_version_and_the_weights_have_the_alias(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    assert name_model(tmp_path, "summarizer", "exec-7") == [folder / name for name in FILES]
    version = [{"uri": "dataset://summarizer/exec-7", "targeting_aliases": ["summarizer"]}]
    config, weights, tokenizer = (json.loads((folder / f"{name}.metadata.json").read_text()) for name in FILES)
    assert config == tokenizer == {"valohai.dataset-versions": version}
    assert weights == {"valohai.dataset-versions": version, "valohai.alias": "summarizer"}
    assert not list(folder.parent.glob("*.metadata.json"))


def test_two_models_cannot_have_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        make_model(tmp_path, name)
    monkeypatch.setenv("VH_OUTPUTS_DIR", str(tmp_path))
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, "name-model", "--alias", "summarizer")
    assert capsys.readouterr().err == (
        f"error: {tmp_path} has 2 models (a, b), but 'summarizer' names one: run one workflow in a step.\n"
    )


def test_what_was_named_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VH_OUTPUTS_DIR", str(tmp_path))
    monkeypatch.setenv("VH_JOB_ID", "exec-7")
    call(monkeypatch, "name-model", "--alias", "summarizer")
    folder = make_model(tmp_path)
    call(monkeypatch, "name-model", "--alias", "")
    assert not list(folder.glob("*.metadata.json"))
    call(monkeypatch, "name-model", "--alias", "summarizer")
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path} has no model to name: the first member of a distributed task saves it.",
        "The model gets no alias.",
        "The 3 files of the model are 'summarizer' from now on.",
    ]
    assert "dataset://summarizer/exec-7" in (folder / "config.json.metadata.json").read_text()


@pytest.mark.parametrize("arguments", [["name-model"], ["data-option", "--alias", "summarizer"]])
def test_an_alias_is_for_naming_and_naming_needs_one(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, *arguments)
    assert f"the command is {arguments[0]}: name-model needs --alias NAME" in capsys.readouterr().err


# -- where the machines of a distributed task meet


@pytest.fixture
def valohai_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for Valohai's file, which its library reads."""
    monkeypatch.setenv("VH_CONFIG_DIR", str(tmp_path))
    distributed.flush_state()
    return tmp_path


@pytest.mark.parametrize(
    ("ids", "first"),
    [
        (("0", "1", "2", "3"), "10.0.0.10"),
        (("10", "9", "8", "11"), "10.0.0.12"),  # as numbers, not as texts
        (("d", "10", "b", "9"), "10.0.0.11"),  # as texts, where one is no number
    ],
)
def test_members_meet_at_the_first_one(valohai_folder: Path, ids: tuple[str, ...], first: str) -> None:
    hosts = []
    for number, own in enumerate(ids):
        distributed_task(valohai_folder, own, ids)
        words = torchrun_options().split()
        options = dict(zip(words[::2], words[1::2], strict=True))
        expected = {"--nnodes": "4", "--rdzv_endpoint": f"{first}:29400", "--local_addr": f"10.0.0.{10 + number}"}
        assert options.items() >= expected.items()
        hosts += [options["--local_addr"]] if "is_host=1" in options["--rdzv_conf"] else []
        assert world_options() == "--devices 4 --nodes 4"
    assert hosts == [first]


def test_a_task_that_says_no_meeting_place_or_has_no_library_is_refused(
    valohai_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = distributed_task(valohai_folder)
    for content in (
        "{",
        "[]",
        "{}",
        json.dumps({**task, "members": []}),
        json.dumps({**task, "members": [{**task["self"], "network": {**task["self"]["network"], "local_ips": []}}]}),
        json.dumps({**task, "config": {**task["config"], "member_id": "7"}}),
    ):
        (valohai_folder / "distributed.json").write_text(content)
        distributed.flush_state()
        with pytest.raises(BadInputError, match=r"Valohai does not say where .* as a Task of the type Distributed"):
            torchrun_options()
    monkeypatch.setitem(sys.modules, "valohai", None)  # importing it is an ImportError
    with pytest.raises(BadInputError, match=r"\(ModuleNotFoundError: .* with valohai-utils installed"):
        torchrun_options()
