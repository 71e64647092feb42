"""Around a workflow, a Valohai step finds its input and names its model."""

import json
import sys
from pathlib import Path

import pytest

from common.base.errors import BadInputError
from common.valohai_step import data_option, main, name_model

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
    make_model(tmp_path, "a")
    make_model(tmp_path, "b")
    said = f"{tmp_path} has 2 models (a, b), but 'summarizer' names one: run one workflow in a step."
    with pytest.raises(BadInputError) as refused:
        name_model(tmp_path, "summarizer", "exec-7")
    assert str(refused.value) == said
    monkeypatch.setenv("VH_OUTPUTS_DIR", str(tmp_path))
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, "name-model", "--alias", "summarizer")
    assert capsys.readouterr().err == f"error: {said}\n"


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
