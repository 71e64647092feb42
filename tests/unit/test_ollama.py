"""Ollama's template writes what the tokenizer's writes, or the export is refused."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.models.loading import EMBEDDED_BASE
from common.serving.gguf_file import export_gguf
from common.serving.ollama_file import MODELFILE, affixes_of, export_ollama, go_text, text_of
from tests.families import make_tiny

TURN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}"
ANSWER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
DEFAULT = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe \"kind\".<|im_end|>\n{% endif %}"
TEMPLATES = Path(find_spec("trl").origin).parent / "chat_templates"
CHAT = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "Vance."},
    {"role": "user", "content": " When? "},
]


def published(name: str) -> str:
    """A template that TRL has a copy of."""
    return (TEMPLATES / f"{name}.jinja").read_text()


def by_go(template: str, messages: list[dict[str, str]]) -> str:
    """Render what `go_template` makes, by its lines: a small part of Go's text/template."""

    def action(written: str, message: dict[str, str]) -> str:
        parts = re.findall(r'{{- ("(?:[^"\\]|\\.)*"|\.Content) -}}', written)
        return "".join(message["content"] if part == ".Content" else json.loads(part) for part in parts)

    lines = template.split("\n")
    openings = [line for line in lines if "eq $i 0" in line]
    conditions = [(re.search(r'eq \.Role "(\w+)" -}}', line), line) for line in lines if line not in openings]
    by_role = {found[1]: line for found, line in conditions if found}
    start = "" if messages[0]["role"] == "system" else "".join(action(line, messages[0]) for line in openings)
    return start + "".join(action(by_role[each["role"]], each) for each in messages) + action(lines[-1], {})


@pytest.mark.parametrize("template", ["", LOOP + ANSWER, DEFAULT + LOOP + ANSWER, "Chat:\n" + LOOP + ANSWER])
@pytest.mark.parametrize("messages", [CHAT, CHAT[1:], CHAT[1:2]])
def test_the_template_writes_what_the_tokenizers_writes(
    tokenizer: PreTrainedTokenizerBase, template: str, messages: list[dict[str, str]]
) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    affixes = affixes_of(tokenizer)
    assert affixes.rendered(messages) == expected
    assert by_go(affixes.go_template(), messages) == expected


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LOOP.replace("m['content']", "m['content'] | trim") + ANSWER, "white space"),
        (LOOP.replace("m['content']", "m['content'].split('</think>')[-1]") + ANSWER, "thoughts"),
        (LOOP.replace("im_end|>", "im_end|>{{ loop.index }}") + ANSWER, "plain messages"),
        ("{% for m in messages | reverse %}" + TURN + "{% endfor %}" + ANSWER, "plain messages"),
        ("{% if messages[0]['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}" + LOOP, "none"),
        ("{% set messages = messages[1:] %}" + LOOP, "leaves out"),
        ("{{ strftime_now('%d') }}" + LOOP, "the day"),
        pytest.param(published("qwen3"), "thoughts", id="qwen3"),
        pytest.param(published("llama3_1"), "white space", id="llama3_1"),
        pytest.param(published("llama3_2"), "day", id="llama3_2"),
    ],
)
def test_a_template_that_does_more_is_refused(tokenizer: PreTrainedTokenizerBase, template: str, said: str) -> None:
    tokenizer.chat_template, tokenizer.bos_token = template, "<|system|>"
    with pytest.raises(BadInputError, match=f"{said}(?s:.*)llama-server --jinja"):
        affixes_of(tokenizer)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507"])
def test_a_published_template_that_does_no_more_is_written(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    tokenizer.chat_template = published(name)
    assert '{{- "<|im_start|>user\\n" -}}' in affixes_of(tokenizer).go_template()


def test_the_begin_token_is_left_to_llama_cpp(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.bos_token = "<|system|>"
    tokenizer.chat_template = "{{ bos_token }}" + LOOP + ANSWER
    assert text_of(CHAT[1:2], tokenizer).startswith("<|system|><|im_start|>")  # which adds none
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", tokenizer.bos_token_id)]
    )
    assert text_of(CHAT[1:2], tokenizer).startswith("<|im_start|>user")
    assert affixes_of(tokenizer).before["system"].startswith("<|im_start|>system")
    tokenizer.chat_template = LOOP + ANSWER
    with pytest.raises(BadInputError, match=r"<\|system\|>"):
        affixes_of(tokenizer)


def test_texts_are_go_strings_of_characters_that_a_modelfile_keeps() -> None:
    assert go_text('a "b"\n\\{{') == r'{{- "a \"b\"\n\\{{" -}}'
    assert go_text("\u00a0\u3000é") == r'{{- "\U000000a0\U00003000é" -}}'


def test_the_folder_has_the_model_and_a_modelfile_that_names_it(tmp_path: Path) -> None:
    folder = export_ollama(EMBEDDED_BASE, tmp_path / "it", "q8_0")
    said, (file,) = (folder / MODELFILE).read_text(), folder.glob("*.gguf")
    assert said.startswith(f"FROM ./{file.name}\n")
    assert 'PARAMETER stop """<|end|>"""\n' in said
    assert '{{- "<|user|>" -}}{{- .Content -}}{{- "<|end|>" -}}' in said.partition('TEMPLATE """')[2]
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
