"""What is handed on is the tuned model, with its tokenizer and a card without a path of this machine."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.models.loading import EMBEDDED_BASE
from common.records.store import RECORD_NAME, SCHEMA_VERSION, settings_anywhere
from common.serving import cards, export
from common.serving.tuned_runs import TunedRun, find_run


@pytest.fixture
def tuned(tmp_path: Path) -> TunedRun:
    """A run on a data file outside the repository, with a changed model."""
    rows, folder = tmp_path / "rows.csv", tmp_path / "one"
    rows.write_text("question,answer\n")
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_BASE)
    torch.nn.init.ones_(model.model.norm.weight)
    model.save_pretrained(folder / "merged")
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_BASE)
    tokenizer.save_pretrained(folder / "merged")
    get_peft_model(model, LoraConfig(init_lora_weights=False)).save_pretrained(folder / "adapter")
    tokenizer.save_pretrained(folder / "adapter")
    run = RunConfig(data=str(rows), learning_rate=0.25)
    scores = {"similarity_score": 0.5, "similarity_score_minilm": None, "facts_said_share": 0.125, "questions": 8}
    record = {
        "schema_version": SCHEMA_VERSION, "status": "completed", "config": settings_anywhere(run),
        "run_folder": "2.1/run_0",
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
        "2.1/run_0",
        "8 questions (too few to judge by)",
    ):
        assert said in text
    assert "MiniLM" not in text  # it judged nothing
    for file in folder.glob("*.json*"):
        text += file.read_text()
    assert not [place for place in (str(tmp_path), str(REPOSITORY), str(Path.home())) if place in text]


def test_the_adapter_has_its_tokenizer_and_a_card_and_names_no_path(tuned: TunedRun, tmp_path: Path) -> None:
    folder = export.export_adapter(tuned, tmp_path / "out")
    card = ModelCard.load(folder / export.CARD_NAME)
    assert card.data.library_name == "peft"
    assert "base_model_name_or_path" in card.text  # of a base that is a folder
    settings = folder / "adapter_config.json"
    said = json.loads(settings.read_text())
    assert said["base_model_name_or_path"] == "embedded_base"
    assert not [file for file in folder.glob("*.[jm]*") if str(REPOSITORY) in file.read_text()]
    settings.write_text(json.dumps({**said, "base_model_name_or_path": str(EMBEDDED_BASE)}))
    ids = AutoTokenizer.from_pretrained(folder)("Who?", return_tensors="pt")
    with torch.no_grad():
        logits = [
            AutoPeftModelForCausalLM.from_pretrained(each)(**ids).logits for each in (folder, f"{tuned.folder}/adapter")
        ]
    assert torch.equal(*logits)
    (tuned.folder / "adapter" / "tokenizer_config.json").unlink()
    with pytest.raises(BadInputError, match=r"adapter/tokenizer_config\.json"):
        export.export_adapter(tuned, tmp_path / "other")
    with pytest.raises(BadInputError, match="--to merged"):
        export.export_adapter(replace(tuned, run=tuned.run.changed_to(technique="full")), tmp_path / "other")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("assets/embedded_base", "embedded_base"),
        ("../some/where/mine", "mine"),
        ("me/mine", "me/mine"),
        ("./mine", "mine"),
    ],
)
def test_a_base_is_called_by_its_id_on_the_hub_or_by_its_folder(tuned: TunedRun, model: str, name: str) -> None:
    other = replace(tuned, record={**tuned.record, "config": {**tuned.record["config"], "model": model}})
    assert cards.base_name(other) == name
    about = cards.card_of(other).data
    assert about.base_model == (name if "/" in name else None)


def test_the_card_names_the_licence_of_the_bases_own_card_or_says_that_there_is_none(
    tuned: TunedRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def card_with(model: str) -> ModelCard:
        return cards.card_of(
            replace(tuned, record={**tuned.record, "config": {**tuned.record["config"], "model": model}})
        )

    assert cards.card_of(tuned).data.license == "apache-2.0"  # the embedded base's
    assert "apache-2.0, which" in cards.card_of(tuned).text
    assert card_with(str(tmp_path)).data.license is None
    assert "No licence is named" in card_with(str(tmp_path)).text
    of_base = tmp_path / "README.md"
    of_base.write_text("---\nlicense: other\nlicense_name: house-rules\nlicense_link: LICENSE\n---\nIts card.")
    assert (
        card_with(str(tmp_path)).data.to_dict().items() >= {"license": "other", "license_name": "house-rules"}.items()
    )
    assert card_with(str(tmp_path)).data.license_link is None  # a file of the base's, which does not come along
    monkeypatch.setattr(cards, "try_to_load_from_cache", lambda *asked, revision: kept.get((*asked, revision)))
    kept = {("me/mine", cards.CARD_NAME, None): str(of_base)}
    assert "house-rules, which" in card_with("me/mine").text
    assert card_with("me/other").data.license is None
    kept = {("me/mine", cards.CARD_NAME, "a1"): str(of_base)}
    assert card_with("me/mine").data.license is None
    tuned = replace(tuned, run=tuned.run.changed_to(model_revision="a1"))
    assert "house-rules, which" in card_with("me/mine").text


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
    assert "llama-server --jinja -m" in capsys.readouterr().out
    (file,) = tuned.folder.glob("*.gguf")
    again = AutoModelForCausalLM.from_pretrained(tuned.folder, gguf_file=file.name)
    assert torch.equal(again.model.norm.weight, torch.ones(128))


@pytest.mark.parametrize(
    ("to", "said"),
    [("adapter", f"vllm serve {EMBEDDED_BASE} --enable-lora"), ("ollama", "ollama run one"), ("merged", "vllm")],
)
def test_the_command_says_how_to_serve_what_it_makes(
    to: str, said: str, tuned: TunedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["export", str(tuned.folder), "--to", to])
    export.main()
    assert said in capsys.readouterr().out
    assert (tuned.folder / export.FOLDERS[to]).is_dir()
    if to == "ollama":
        monkeypatch.setattr(sys, "argv", [*sys.argv, "--weight_type", "f32"])  # would be another file in that folder
    with pytest.raises(SystemExit, match="2"):
        export.main()
    assert "exists already" in capsys.readouterr().err


def test_the_adapter_of_random_weights_is_refused_as_no_base_has_these(tuned: TunedRun, tmp_path: Path) -> None:
    random = replace(tuned, run=tuned.run.changed_to(weights="random"))
    with pytest.raises(BadInputError, match="--to merged"):
        export.export_adapter(random, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_adapter_belongs_to_the_commit_of_the_base_that_it_was_trained_on(
    tuned: TunedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {**tuned.record, "model_commit": "a1b2", "config": {**tuned.record["config"], "model": "me/mine"}}
    (tuned.folder / RECORD_NAME).write_text(json.dumps(record))
    monkeypatch.setattr(sys, "argv", ["export", str(tuned.folder), "--to", "adapter"])
    export.main()
    said = json.loads((tuned.folder / "exported_adapter" / "adapter_config.json").read_text())
    assert (said["base_model_name_or_path"], said["revision"]) == ("me/mine", "a1b2")
    assert "vllm serve me/mine --revision a1b2 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--to", "merged", "--push"], "--push"),
        (["--to", "merged", "--weight_type", "f32"], "--weight_type"),
        (["--to", "hub", "--repo_id", "me/it", "--weight_type", "f16"], "--weight_type"),
    ],
)
def test_an_option_of_another_export_is_refused(
    options: list[str], said: str, tuned: TunedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["export", str(tuned.folder), *options])
    with pytest.raises(SystemExit, match="2"):
        export.main()
    assert said in capsys.readouterr().err


def test_what_was_listed_can_be_uploaded(
    tuned: TunedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uploaded = Mock(return_value="its address")
    monkeypatch.setattr(export, "upload", uploaded)
    monkeypatch.setattr(sys, "argv", ["export", str(tuned.folder), "--to", "hub", "--repo_id", "me/it"])
    export.main()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--push"])
    export.main()
    uploaded.assert_called_once_with(tuned.folder / "exported", "me/it")
    assert "its address" in capsys.readouterr().out


def test_a_folder_that_no_export_made_is_not_uploaded(
    tuned: TunedRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "private").mkdir()
    words = ["--to", "hub", "--repo_id", "me/it", "--push", "--output", str(tmp_path / "private")]
    monkeypatch.setattr(sys, "argv", ["export", str(tuned.folder), *words])
    with pytest.raises(SystemExit, match="2"):
        export.main()
    assert "exists already" in capsys.readouterr().err
