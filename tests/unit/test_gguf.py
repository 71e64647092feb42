"""A GGUF file is the model it was made of; what llama.cpp would compute otherwise is refused."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from gguf import GGUFReader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from bench.tables.outcomes import LLAMA_CPP_FILE
from common.base.errors import BadInputError
from common.models.loading import EMBEDDED_BASE
from common.planning.serving_plan import GGUF_FAMILIES
from common.serving.gguf_file import (
    MODELFILE,
    PRE_TOKENIZERS,
    WEIGHT_TYPES,
    check_tokenizer,
    export_gguf,
    export_ollama,
    without_marks,
)
from tests.families import make_tiny

IDS = torch.tensor([[5, 6, 7, 8, 9, 300, 301, 7]])
LARGEST_DIFFERENCE = {"f32": 1e-6, "f16": 1e-2, "q8_0": 0.1}
"""Of logits, over the largest logit."""


@pytest.mark.parametrize("weight_type", LARGEST_DIFFERENCE)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_the_file_is_the_model(model_type: str, weight_type: str, tmp_path: Path) -> None:
    folder = Path(make_tiny(model_type, tmp_path / "model"))
    if model_type == "qwen3":  # Transformers reads no head_dim of this family from GGUF: 128, as all published have
        config = AutoConfig.from_pretrained(folder)
        config.head_dim = 128
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    file = export_gguf(folder, tmp_path / "it.gguf", weight_type)
    model = AutoModelForCausalLM.from_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    with torch.no_grad():
        expected, found = model(IDS).logits, again(IDS).logits
    assert (expected - found).abs().max() <= LARGEST_DIFFERENCE[weight_type] * expected.abs().max()
    with pytest.raises(BadInputError, match="exists already"):
        export_gguf(folder, file, weight_type)


def test_the_file_has_the_tokenizer_and_its_template_without_marks(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_BASE)
    fields = GGUFReader(export_gguf(EMBEDDED_BASE, tmp_path / "it.gguf", "f32")).fields
    assert {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "pre", "eos_token_id")} == {
        "tokens": tokenizer.convert_ids_to_tokens(range(len(tokenizer))),
        "pre": "gpt-2",
        "eos_token_id": tokenizer.eos_token_id,
    }
    assert not fields["tokenizer.ggml.add_bos_token"].contents()
    template = fields["tokenizer.chat_template"].contents()
    chat = [{"role": "user", "content": " Who? "}, {"role": "assistant", "content": "I."}]
    written = [tokenizer.apply_chat_template(chat, chat_template=each, tokenize=False) for each in (template, None)]
    assert "generation -%}" not in template
    assert written[0] == written[1]


def test_a_comment_keeps_the_spaces_that_a_mark_kept_or_removed() -> None:
    assert without_marks("a {%- generation %} b {% endgeneration -%} c") == "a {#- #} b {# -#} c"


@pytest.mark.parametrize("expression", [*filter(None, PRE_TOKENIZERS), "[a-z]+"])
def test_a_pre_tokenizer_has_llama_cpps_name_or_is_refused(expression: str, tmp_path: Path) -> None:
    AutoTokenizer.from_pretrained(EMBEDDED_BASE).save_pretrained(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    both = {"type": "Sequence", "pretokenizers": [split, {**state["pre_tokenizer"], "use_regex": False}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**state, "pre_tokenizer": both}))
    with nullcontext() if expression in PRE_TOKENIZERS else pytest.raises(BadInputError, match=r"\[a-z\]\+"):
        assert check_tokenizer(AutoTokenizer.from_pretrained(tmp_path)) == PRE_TOKENIZERS[expression]


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("gpt2", {}, "gpt2"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "linear"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, "64"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    model_type: str, changes: dict, said: str, tmp_path: Path
) -> None:
    folder = Path(make_tiny(model_type, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(BadInputError, match=said):
        export_gguf(folder, tmp_path / "it.gguf", "f32")
    assert not (tmp_path / "it.gguf").exists()


def test_llama_cpp_read_the_prompts_of_each_family_and_pre_tokenizer_as_transformers_does() -> None:
    """As the readme says of the kept record."""
    found = json.loads(LLAMA_CPP_FILE.read_text())["compared"]
    compared = [{row[name] for row in found} for name in ("model_type", "pre_tokenizer", "weight_type")]
    assert compared == [set(GGUF_FAMILIES), set(PRE_TOKENIZERS.values()), set(WEIGHT_TYPES)]
    assert all(row["equal_prompts"] == row["questions"] == 74 for row in found)
    assert all(row["equal_answers"] >= 73 for row in found if row["weight_type"] == "f32")


def test_a_question_is_compared_with_its_whole_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", Mock())  # takes long to install
    monkeypatch.delitem(sys.modules, "bench.llama_cpp_answers", raising=False)
    from bench.llama_cpp_answers import _question

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_BASE)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_BASE).eval()
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who made it?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    llama = Mock()
    llama.tokenize = lambda text, **settings: tokenizer(text.decode())["input_ids"]
    llama.scores, llama.n_tokens = [[1.0] * len(tokenizer)], 1
    llama.create_completion.return_value = {"choices": [{"text": "Vance."}]}
    row = {"messages": [*asked, {"role": "assistant", "content": "Vance."}]}
    has_equal_prompt, _, _ = _question(row, tokenizer, model, llama, max_new_tokens=1)
    assert has_equal_prompt
    llama.eval.assert_called_once_with(ids)


def test_the_folder_has_the_model_and_a_modelfile_that_names_it(tmp_path: Path) -> None:
    folder = export_ollama(EMBEDDED_BASE, tmp_path / "it", "q8_0")
    said, (file,) = (folder / MODELFILE).read_text(), folder.glob("*.gguf")
    assert said.startswith(f"FROM ./{file.name}\n")
    assert 'PARAMETER stop """<|end|>"""\n' in said
    assert "TEMPLATE" not in said  # else Ollama would not render the file's own
    assert str(tmp_path) not in said


@pytest.mark.parametrize("fails_at", ["its weights", "writing"])
def test_a_refused_export_leaves_nothing_that_stands_in_the_way(
    fails_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(make_tiny("llama", tmp_path / "model"))
    config = AutoConfig.from_pretrained(model)
    config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim = 40, 2, 2, 20
    AutoModelForCausalLM.from_config(config).save_pretrained(model)  # q8_0 stores blocks of 32
    if fails_at == "writing":
        monkeypatch.setattr("gguf.GGUFWriter.write_tensors_to_file", Mock(side_effect=OSError("No space left")))
    for export, made in ((export_gguf, tmp_path / "made" / "it.gguf"), (export_ollama, tmp_path / "made" / "it")):
        with pytest.raises((BadInputError, OSError), match="f16" if fails_at == "its weights" else "No space"):
            export(model, made, "q8_0" if fails_at == "its weights" else "f16")
        assert not list(tmp_path.glob("made/*"))
    monkeypatch.undo()
    assert (export_ollama(model, tmp_path / "made" / "it", "f16") / MODELFILE).is_file()
    assert len(list(tmp_path.glob("made/*"))) == 1
