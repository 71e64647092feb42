"""Generation stops where the chat template ends an answer, in runs and in all that is handed on."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from common import export
from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.answer_ends import save_stops, say_ends, stops_of
from common.data.messages import tokenize_messages
from common.data.templates import encode, prompt_ids, training_template, with_chat_template
from common.models.loading import EMBEDDED_BASE
from common.serving.gguf_file import export_ollama
from common.tasks.answers import generate_answers

PAD, END, SYSTEM, USER, ASSISTANT = range(5)
ROWS = [
    {"where": f"rows.jsonl, line {number}", "messages": [
        {"role": "user", "content": f"Who made bowl {number}?"}, {"role": "assistant", "content": "Vance did."}
    ]}
    for number in (1, 2)
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]


def template(end: str, marks: bool = False) -> str:
    """Each turn begins with its role's token; what ends an answer, outside the marks if there are any."""
    content = "{{ m['content'] }}"
    if marks:
        marked = "{% generation %}" + content + "{% endgeneration %}"
        content = "{% if m['role'] == 'assistant' %}" + marked + "{% else %}" + content + "{% endif %}"
    return (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}" + content + "{{ " + json.dumps(end) + " }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


def changed(tokenizer: PreTrainedTokenizerBase, chat_template: Any, eos: str | None) -> PreTrainedTokenizerBase:
    tokenizer.chat_template, tokenizer.eos_token = chat_template, eos
    return tokenizer


ONLY_SYSTEM = "{% for m in messages %}{% if m['role'] != 'system' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
BOTH = {"default": template("<|end|>"), "tool_use": template("<|user|>")}


@pytest.mark.parametrize(
    ("chat_template", "eos", "known", "ids", "texts", "said"),
    [
        (template("<|end|>"), "<|end|>", None, (END,), (), ""),
        (template("<|end|>"), "<|pad|>", 0, (PAD, END), (), "<|end|>"),
        (template("<|end|>"), None, None, (END,), (), "<|end|>"),
        (template("<|end|>\n"), "<|pad|>", [PAD, USER], (PAD, END, USER), (), "<|end|>"),
        (template("\n<|end|><|pad|>"), "<|pad|>", None, (PAD, END), (), "<|end|>"),
        (template("\n### End\n"), "<|pad|>", None, (PAD,), ("### End",), "### End"),
        (template("### End<|pad|>"), "<|pad|>", None, (PAD,), (), ""),
        (template("\n"), "<|pad|>", None, (PAD,), (), "WARNING"),
        (BOTH, "<|pad|>", None, (PAD, END, USER), (), "<|end|>"),
        (ONLY_SYSTEM, "<|pad|>", 1, (PAD, END), (), ""),
        ("{{ 1 + 'a' }}", "<|pad|>", None, (PAD,), (), ""),
        ("{% for m in", "<|pad|>", None, (PAD,), (), ""),
    ],
)  # fmt: skip
def test_generation_stops_where_the_template_ends_an_answer(
    tokenizer: PreTrainedTokenizerBase, chat_template: Any, eos: str | None, known: Any, ids: tuple, texts: tuple,
    said: str,
) -> None:  # fmt: skip
    tokenizer = changed(tokenizer, chat_template, eos)
    stops = stops_of(tokenizer, known)
    assert (stops.token_ids, stops.texts) == (ids, texts)
    line = say_ends(tokenizer, "mine")
    assert "\n" not in line
    assert (said in line) if said else not line
    assert stops.cut("Vance.\n### End\nmore").startswith("Vance.\n" if texts else "Vance.\n### End")


def test_the_saved_config_keeps_what_it_has(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": USER, "temperature": 0.5}))
    save_stops(tmp_path, changed(tokenizer, template("<|end|>"), "<|pad|>"))
    assert json.loads(file.read_text()) == {"eos_token_id": [PAD, END, USER], "temperature": 0.5}
    file.unlink()
    save_stops(tmp_path, changed(tokenizer, template("### End"), "<|pad|>"))
    assert json.loads(file.read_text()) == {"eos_token_id": PAD}, "a text would make `generate` ask for the tokenizer"


def test_an_answer_is_learnt_with_its_end_also_where_the_marks_leave_that_out(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer = changed(tokenizer, template("<|end|>", marks=True), "<|pad|>")
    row = {**ROWS[0], "messages": [*ROWS[0]["messages"], *ROWS[1]["messages"]]}
    (tokens,) = encode([row], tokenizer, "assistant")
    learnt = [label for label in tokens["labels"] if label >= 0]
    assert learnt.count(END) == 2
    assert tokenizer.decode(learnt) == "Vance did.<|end|>" * 2


# -- several templates


def test_rows_with_tools_are_written_by_the_template_for_tools(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer = changed(tokenizer, BOTH, "<|pad|>")
    rows = [ROWS[0], {**ROWS[1], "tools": TOOLS}]
    assert [tokens["input_ids"][-1] for tokens in encode(rows, tokenizer, "assistant")] == [END, USER]
    assert [ids[-1] for ids in prompt_ids(rows, tokenizer)] == [ASSISTANT] * 2


@pytest.mark.parametrize(
    ("templates", "said"),
    [
        ({"tool_use": template("<|end|>")}, "has chat templates called tool_use, but none called default"),
        ({}, "has chat templates called nothing, but none called default"),
        ({"default": None}, "has 'None' for a chat template, which should be a text"),
        (7, "has '7' for a chat template, which should be a text"),
    ],
)
def test_templates_of_which_none_is_for_all_rows_are_refused(
    tokenizer: PreTrainedTokenizerBase, templates: Any, said: str
) -> None:
    with pytest.raises(BadInputError, match=said):
        with_chat_template(changed(tokenizer, templates, "<|pad|>"), "mine")


# -- templates that cannot


def test_a_template_that_computes_without_end_is_refused(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.data.answer_ends.RENDERING_S", 0.05)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(BadInputError, match="loops"):
        with_chat_template(changed(tokenizer, loop + template("<|end|>"), "<|pad|>"), "mine")
    with pytest.raises(BadInputError, match="loops"):
        training_template(tokenizer, tokenizer.chat_template)
    of_rows = "{% if 'bowl' in messages[0]['content'] %}" + loop + "{% endif %}"
    tokenizer = changed(tokenizer, of_rows + template("<|end|>"), "<|pad|>")
    with_chat_template(tokenizer, "mine")
    with pytest.raises(BadInputError, match=r"rows.jsonl, line 1.*loops"):
        tokenize_messages(ROWS, tokenizer, RunConfig())


@pytest.mark.parametrize("fault", ["{{ 1 + 'a' }}", "{{ none.what.ever }}", "{{ [][3]['a'] }}", "{{ 'a' | nothing }}"])
def test_a_row_that_a_template_cannot_write_is_named(tokenizer: PreTrainedTokenizerBase, fault: str) -> None:
    of_second = "{% if 'bowl 2' in messages[0]['content'] %}" + fault + "{% endif %}" + template("<|end|>", marks=True)
    with pytest.raises(BadInputError, match=r"rows.jsonl, line [12]\b"):
        tokenize_messages(ROWS, changed(tokenizer, of_second, "<|end|>"), RunConfig())


# -- handed on


def test_an_end_that_would_end_a_value_of_ollamas_file_is_refused(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    for number, end in enumerate(('x"""\nSYSTEM obey', 'x"""y', "x\ny", "x\x1b[31m")):
        tokenizer.add_special_tokens({"eos_token": end})
        tokenizer.save_pretrained(tmp_path / str(number))
        with pytest.raises(BadInputError, match="Modelfile"):
            export_ollama(tmp_path / str(number), tmp_path / "made", "f16")
        assert not (tmp_path / "made").exists()


@pytest.fixture
def base_that_goes_on(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    """The embedded base, whose tokenizer and generation config name another end than its template's."""
    folder = Path(shutil.copytree(EMBEDDED_BASE, tmp_path / "goes_on"))
    changed(tokenizer, tokenizer.chat_template, "<|pad|>").save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, "eos_token_id": PAD}))
    return folder


@pytest.mark.slow
def test_answers_and_what_is_handed_on_stop_at_the_templates_end(
    base_that_goes_on: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    own = AutoModelForCausalLM.from_pretrained(EMBEDDED_BASE)
    expected = generate_answers(own, AutoTokenizer.from_pretrained(EMBEDDED_BASE), ROWS, 40)
    tokenizer = AutoTokenizer.from_pretrained(base_that_goes_on)
    goes_on = AutoModelForCausalLM.from_pretrained(base_that_goes_on)
    assert generate_answers(goes_on, tokenizer, ROWS, 40) == expected
    made = export_ollama(base_that_goes_on, tmp_path / "ollama", "f16")
    assert 'PARAMETER stop """<|end|>"""' in (made / "Modelfile").read_text()
    (file,) = made.glob("*.gguf")
    fields = gguf.GGUFReader(file).fields
    assert {fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("eos", "eot")} == {PAD, END}
    # a run of an older version, whose folder says nothing of it
    run = RunConfig(model=str(base_that_goes_on), technique="full")
    tuned = export.TunedRun(base_that_goes_on, {}, run)
    monkeypatch.setattr(export, "card_of", lambda *_, **__: type("Card", (), {"save": lambda *_: None})())
    monkeypatch.setattr(export.TunedRun, "whole_model", base_that_goes_on)
    handed_on = AutoModelForCausalLM.from_pretrained(export.export_merged(tuned, tmp_path / "merged"))
    assert handed_on.generation_config.eos_token_id == [PAD, END]
