"""What is handed on is the tuned model, with its tokenizer and a card without a path of this machine."""

import json
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.models.loading import EMBEDDED_BASE
from common.records.store import RECORD_NAME, SCHEMA_VERSION, settings_anywhere
from common.serving import export
from common.serving.tuned_runs import TunedRun, find_run


@pytest.fixture
def tuned(tmp_path: Path) -> TunedRun:
    """A run on a data file outside the repository, with a changed model."""
    rows, folder = tmp_path / "rows.csv", tmp_path / "one"
    rows.write_text("question,answer\n")
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_BASE)
    torch.nn.init.ones_(model.model.norm.weight)
    model.save_pretrained(folder / "merged")
    AutoTokenizer.from_pretrained(EMBEDDED_BASE).save_pretrained(folder / "merged")
    run = RunConfig(data=str(rows), learning_rate=0.25)
    scores = {"similarity_score": 0.5, "similarity_score_minilm": None, "facts_said_share": 0.125, "questions": 8}
    record = {
        "schema_version": SCHEMA_VERSION, "status": "completed", "config": settings_anywhere(run),
        "command": f"python my_workflow.py --data {rows}", "data": {"training_rows": 60, "training_tokens": 1234},
        "quality": {"before": scores, "after": {**scores, "facts_said_share": 0.75}},
    }  # fmt: skip
    (folder / RECORD_NAME).write_text(json.dumps(record))
    return find_run(str(folder))


def test_the_folder_is_the_tuned_model_as_plain_transformers_loads_it(tuned: TunedRun, tmp_path: Path) -> None:
    folder = export.export_merged(tuned, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Who?"}], return_dict=True, return_tensors="pt")
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(each)(**ids).logits for each in (folder, tuned.whole_model)]
    assert torch.equal(*logits)
    with pytest.raises(BadInputError, match="exists already"):
        export.export_merged(tuned, folder)


def test_the_card_says_what_was_done_and_names_no_path(tuned: TunedRun, tmp_path: Path) -> None:
    folder = export.export_merged(tuned, tmp_path / "out")
    card = ModelCard.load(folder / export.CARD_NAME)
    assert card.data.library_name == "transformers"
    text = (folder / export.CARD_NAME).read_text()
    for said in (
        "| learning_rate | 0.25 |",
        "rows.csv",
        "60 training rows",
        "| 0.125 | 0.750 |",
        "assets/embedded_base",
    ):
        assert said in text
    assert "MiniLM" not in text  # it judged nothing
    for file in folder.glob("*.json*"):
        text += file.read_text()
    assert not [place for place in (str(tmp_path), str(REPOSITORY), str(Path.home())) if place in text]


def test_files_are_listed_and_nothing_is_uploaded_unasked_or_without_a_token(
    tuned: TunedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["export", str(tuned.folder), "--to", "hub", "--repo_id", "me/it"])
    export.main()
    out = capsys.readouterr().out
    assert "model.safetensors" in out
    assert "not uploaded: pass --push" in out
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(BadInputError, match="hf auth login"):
        export.upload(tuned.folder, "me/it")
    monkeypatch.setattr(sys, "argv", ["export", str(tuned.folder), "--to", "hub"])
    with pytest.raises(SystemExit, match="2"):
        export.main()
    assert "--repo_id NAME/MODEL" in capsys.readouterr().err


def test_the_command_writes_a_gguf_file_into_the_results(
    tuned: TunedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["export", str(tuned.folder), "--to", "gguf", "--weight_type", "f32"])
    export.main()
    assert "llama-server -m" in capsys.readouterr().out
    (file,) = tuned.folder.glob("*.gguf")
    again = AutoModelForCausalLM.from_pretrained(tuned.folder, gguf_file=file.name)
    assert torch.equal(again.model.norm.weight, torch.ones(128))
