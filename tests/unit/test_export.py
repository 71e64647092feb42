"""What is handed on is the tuned model, with its tokenizer and a card without a path of this machine."""

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import export
from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.models.loading import EMBEDDED_BASE
from common.records.store import RECORD_NAME, kept_files, settings_anywhere
from common.serving import cards
from common.serving.tuned_runs import TunedRun, find_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a run on a data file outside the repository, with a changed model."""
    place = tmp_path_factory.mktemp("run")
    rows, folder = place / "rows.csv", place / "one"
    rows.write_text("question,answer\n")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(EMBEDDED_BASE), AutoTokenizer.from_pretrained(EMBEDDED_BASE)
    torch.nn.init.ones_(model.model.norm.weight)
    model.save_pretrained(folder / "merged")
    get_peft_model(model, LoraConfig(init_lora_weights=False)).save_pretrained(folder / "adapter")
    for part in ("merged", "adapter"):
        tokenizer.save_pretrained(folder / part)
    scores = {"similarity_score": 0.5, "similarity_score_minilm": None, "facts_said_share": 0.125, "questions": 8}
    whole = json.loads(next(file for file in kept_files() if "2.1_" in str(file)).read_text())
    record = {
        **whole, "technique": "lora", "parallel": "single",
        "run_name": "one", "launcher": "python", "model_commit": None,
        "config": settings_anywhere(RunConfig(data=str(rows), learning_rate=0.25)), "run_folder": "2.1/run_0",
        "command": f"python my_workflow.py --data {rows}",
        "data": {**whole["data"], "training_rows": 60, "training_tokens": 1234},
        "quality": {"before": whole["quality"]["before"] | scores,
                    "after": whole["quality"]["after"] | scores | {"facts_said_share": 0.75}},
    }  # fmt: skip
    (folder / RECORD_NAME).write_text(json.dumps(record))
    return folder


@pytest.fixture
def tuned(made: Path, tmp_path: Path) -> TunedRun:
    return find_run(str(shutil.copytree(made, tmp_path / "one")))


@pytest.fixture
def said(tuned: TunedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the command says with these words, of a refusal as well."""

    def run(*words: str, is_refused: bool = False) -> str:
        monkeypatch.setattr(sys, "argv", ["export", str(tuned.folder), *words])
        with pytest.raises(SystemExit, match="2") if is_refused else nullcontext():
            export.main()
        output = capsys.readouterr()
        return output.err if is_refused else output.out

    return run


def with_base(tuned: TunedRun, model: str) -> TunedRun:
    """The same run, of another base."""
    return replace(tuned, record={**tuned.record, "config": {**tuned.record["config"], "model": model}})


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
    assert ModelCard.load(folder / export.CARD_NAME).data.library_name == "transformers"
    text = (folder / export.CARD_NAME).read_text()
    expected = (
        "| learning_rate | 0.25 |", "rows.csv", "60 training rows", "| 0.125 | 0.750 |", "assets/embedded_base",
        "2.1/run_0", "8 questions (too few to judge by)",
    )  # fmt: skip
    assert [each for each in expected if each not in text] == []
    assert "MiniLM" not in text  # it judged nothing
    files = "".join(file.read_text() for file in (folder / export.CARD_NAME, *folder.glob("*.json*")))
    assert not [place for place in (str(tmp_path.parent), str(REPOSITORY), str(Path.home())) if place in files]


def test_the_adapter_has_its_tokenizer_and_a_card_and_names_no_path(tuned: TunedRun, tmp_path: Path) -> None:
    folder = export.export_adapter(tuned, tmp_path / "out")
    card, settings = ModelCard.load(folder / export.CARD_NAME), folder / "adapter_config.json"
    assert card.data.library_name == "peft"
    assert "base_model_name_or_path" in card.text  # of a base that is a folder
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
    for changes, refusal in (
        ({}, r"adapter/tokenizer_config\.json"), ({"technique": "full"}, "--to merged"),
        ({"weights": "random"}, "--to merged"),  # no base has these
    ):  # fmt: skip
        with pytest.raises(BadInputError, match=refusal):
            export.export_adapter(replace(tuned, run=tuned.run.changed_to(**changes)), tmp_path / "other")
    assert not (tmp_path / "other").exists()


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
    other = with_base(tuned, model)
    assert cards.base_name(other) == name
    assert cards.card_of(other).data.base_model == (name if "/" in name else None)


def test_the_card_names_the_licence_of_the_bases_own_card_or_says_that_there_is_none(
    tuned: TunedRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def card_with(model: str, commit: str = "") -> ModelCard:
        return cards.card_of(replace(with_base(tuned, model), run=tuned.run.changed_to(model_revision=commit)))

    own, none = cards.card_of(tuned), card_with(str(tmp_path))
    assert (own.data.license, none.data.license) == ("apache-2.0", None)  # the embedded base's
    assert "apache-2.0, which" in own.text
    assert "No licence is named" in none.text
    of_base = tmp_path / "README.md"
    of_base.write_text("---\nlicense: other\nlicense_name: house-rules\nlicense_link: LICENSE\n---\nIts card.")
    about = card_with(str(tmp_path)).data
    assert (about.license, about.to_dict()["license_name"]) == ("other", "house-rules")
    assert about.license_link is None  # a file of the base's, which does not come along
    monkeypatch.setattr(cards, "try_to_load_from_cache", lambda *asked, revision: kept.get((*asked, revision)))
    for commit in (None, "a1"):
        kept = {("me/mine", cards.CARD_NAME, commit): str(of_base)}
        assert "house-rules, which" in card_with("me/mine", commit or "").text
        assert card_with("me/other", commit or "").data.license is None
        assert card_with("me/mine", "" if commit else "a1").data.license is None


def test_files_are_listed_and_nothing_is_uploaded_unasked_or_without_a_token(
    said: Callable[..., str], tuned: TunedRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listed = said("--to", "hub", "--repo_id", "me/it")
    assert "model.safetensors" in listed
    assert "not uploaded: pass --push" in listed
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(BadInputError, match="hf auth login"):
        export.upload(tuned.folder, "me/it")
    uploaded = Mock(return_value="its address")
    monkeypatch.setattr(export, "upload", uploaded)
    assert listed.replace("not uploaded: pass --push", "uploaded: its address") == said(
        "--to", "hub", "--repo_id", "me/it", "--push"
    )
    uploaded.assert_called_once()
    assert not list(tuned.folder.glob("unfinished*"))


@pytest.mark.parametrize("to", ["merged", "adapter", "gguf", "ollama"])
def test_an_export_replaces_nothing(to: str, said: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "new.unfinished").write_text("mine")
    for name in ("file", "link"):
        assert "exists already" in said("--to", to, "--output", str(tmp_path / name), is_refused=True)
    said("--to", to, "--output", str(tmp_path / "new.gguf"))
    assert {(tmp_path / name).read_text() for name in ("file", "new.unfinished")} == {"mine"}


def test_the_card_shows_no_token_of_a_url(tuned: TunedRun) -> None:
    url = "simplecache::https://hidden-token@host/rows.csv?sv=1&sig=hidden-signature"
    record = {**tuned.record, "command": f"python my_workflow.py --data {url}"}
    record["config"] = {**record["config"], "data": url}
    text = str(cards.card_of(replace(tuned, record=record)))
    assert "hidden" not in text
    assert "host/rows.csv?sv=1" in text


def test_the_command_writes_a_gguf_file_into_the_results(said: Callable[..., str], tuned: TunedRun) -> None:
    assert "llama-server --jinja -m" in said("--to", "gguf", "--weight_type", "f32")
    (file,) = tuned.folder.glob("*.gguf")
    again = AutoModelForCausalLM.from_pretrained(tuned.folder, gguf_file=file.name)
    assert torch.equal(again.model.norm.weight, torch.ones(128))


@pytest.mark.parametrize(
    ("to", "how"),
    [("adapter", f"vllm serve {EMBEDDED_BASE} --enable-lora"), ("ollama", "ollama run one"), ("merged", "vllm")],
)
def test_the_command_says_how_to_serve_what_it_makes(
    to: str, how: str, said: Callable[..., str], tuned: TunedRun
) -> None:
    assert how in said("--to", to)
    assert (tuned.folder / export.FOLDERS[to]).is_dir()
    another_file = ["--weight_type", "f32"] if to == "ollama" else []  # in the same folder
    assert "exists already" in said("--to", to, *another_file, is_refused=True)


def test_the_adapter_belongs_to_the_commit_of_the_base_that_it_was_trained_on(
    said: Callable[..., str], tuned: TunedRun
) -> None:
    record = {**with_base(tuned, "me/mine").record, "model_commit": "a1b2"}
    (tuned.folder / RECORD_NAME).write_text(json.dumps(record))
    assert "vllm serve me/mine --revision a1b2 " in said("--to", "adapter")
    settings = json.loads((tuned.folder / "exported_adapter" / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("me/mine", "a1b2")


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--to", "merged", "--push"], "--push"),
        (["--to", "merged", "--weight_type", "f32"], "--weight_type"),
        (["--to", "hub", "--repo_id", "me/it", "--weight_type", "f16"], "--weight_type"),
        (["--to", "hub"], "--repo_id NAME/MODEL"),
        (["--to", "hub", "--repo_id", "me/it", "--output", "here"], "--output"),
    ],
)
def test_an_option_that_does_not_suit_the_export_is_refused(
    options: list[str], refusal: str, said: Callable[..., str]
) -> None:
    assert refusal in said(*options, is_refused=True)
