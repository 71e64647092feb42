"""What is learnt is what was meant: calls of tools, control tokens in texts, weights, JSON in tables, cuts, labels."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.checks.inputs import check_inputs
from common.checks.preview import main as preview_command
from common.data.row_checks import digest, say_once
from common.data.rows import IGNORED_LABEL, Row, Splits, Tokens, answer_of, texts_of
from common.data.splits import check_tokens, load_splits, row_kind, tokens_of
from common.data.templates import prompt_ids
from common.data.texts import label_names, say_long_texts
from common.models.loading import EMBEDDED_SUMMARIZER, load_tokenizer
from common.models.real_models import minilm_folder
from tests.row_files import refusal_of, rows_in, write

RUN = RunConfig()
PAIRS = RunConfig(task="preferences", technique="lora", lora_dropout=0.0)
SUMMARIES = RunConfig(task="summarization", technique="full", data="assets/chat_summaries")
LABELS = RunConfig(task="classification", model="all-minilm-l6-v2")
WRITES_CALLS = (
    "{%- for t in tools or [] %}{{- t | tojson }}{%- endfor %}"
    "{%- for m in messages %}{{- '<|' + ('assistant' if m.role == 'assistant' else 'user') + '|>' }}"
    "{%- if m.role == 'assistant' %}{% generation %}{{- m.content }}"
    "{%- for c in m.tool_calls or [] %}{{- c.function.name + ' ' }}ARGUMENTS{%- endfor %}"
    "{{- '<|end|>' }}{% endgeneration %}{% else %}{{- m.content + '<|end|>' }}{% endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"
)
"""A chat template whose calls end with their arguments, each in its own way."""
AS_JSON, BY_ITEM, AS_TEXT, EITHER = (
    WRITES_CALLS.replace("ARGUMENTS", way)
    for way in (
        "{{- c.function.arguments | tojson }}",
        "{%- for key, value in c.function.arguments | items %}{{- key + '=' + (value | string) + ';' }}{%- endfor %}",
        "{{- '' + c.function.arguments }}",
        "{%- set a = c.function.arguments %}{{- a if a is string else (a | tojson) }}",
    )
)
ASKED, ANSWERED = {"role": "user", "content": "Which shelf?"}, {"role": "assistant", "content": "The third."}
SAID = {"role": "tool", "content": "3"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def conversation(*messages: Row, **more: Any) -> Row:
    return {"messages": list(messages), **more}


def calling(arguments: object, name: object = "look") -> Row:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def read(*rows: Any, run: RunConfig = RUN) -> list[Row]:
    """The rows as they come out of a file."""
    found = [(row, f"rows.jsonl, line {number}") for number, row in enumerate(rows, 1)]
    return list(row_kind(run).check(found, "rows.jsonl"))


def refused(*rows: Any, run: RunConfig = RUN) -> str:
    with pytest.raises(BadInputError) as error:
        read(*rows, run=run)
    return str(error.value)


@cache
def with_template(template: str) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(RUN)
    tokenizer.chat_template = template
    return tokenizer


def learnt(row: Tokens, tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.decode([label for label in row["labels"] if label != IGNORED_LABEL])


# -- calls of tools


PLACED = {"place": "a shelf", "n": None}
AS_WRITTEN = 'look {"place": "a shelf", "n": null}'


@pytest.mark.parametrize(
    ("template", "arguments", "written"),
    [
        *(
            (template, arguments, written)
            for template, written in (
                (AS_JSON, AS_WRITTEN),
                (BY_ITEM, "look place=a shelf;n=None;"),
                (AS_TEXT, AS_WRITTEN),
                (EITHER, AS_WRITTEN),
            )
            for arguments in (PLACED, json.dumps(PLACED))
        ),
        *((AS_JSON, nothing, "look {}") for nothing in ("", "{}", None, {})),
    ],
)
def test_arguments_are_learnt_once_encoded_whatever_they_and_the_template_are(
    template: str, arguments: object, written: str
) -> None:
    tokenizer = with_template(template)
    (row,) = tokens_of(read(conversation(ASKED, calling(arguments), SAID, ANSWERED)), tokenizer, RUN)
    assert learnt(row, tokenizer) == f"{written}<|end|>The third.<|end|>"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (calling("place=shelf"), "'look' with arguments that are no JSON object: 'place=shelf'"),
        (calling("{'place': 'shelf'}"), "no JSON object"),
        (calling("[1]"), "no JSON object"),
        (calling("5"), "no JSON object"),
        (calling(["shelf"]), "no JSON object"),
        ({**ANSWERED, "tool_calls": [{"function": "look"}]}, "a call of a tool without a name"),
        ({**ANSWERED, "tool_calls": [{"function": ["look"]}]}, "a call of a tool without a name"),
        (calling({}, name=5), "a call of a tool without a name"),
        ({**ANSWERED, "tool_calls": 1}, "`tool_calls` that are no list: 1"),
        ({**ANSWERED, "tool_calls": "look"}, "`tool_calls` that are no list: look"),
        ({**ANSWERED, "tool_calls": {"function": {"name": "look"}}}, "`tool_calls` that are no list"),
        ({**ASKED, "tool_calls": calling({})["tool_calls"]}, "in a message of the role 'user'"),
    ],
)
def test_a_call_that_is_none_is_refused_with_its_row(message: Row, said: str) -> None:
    sentence = refused(conversation(ASKED, ANSWERED), conversation(ASKED, message, SAID, ANSWERED))
    assert sentence.startswith("rows.jsonl, line 2 ")
    assert said in sentence


def test_calls_and_tools_may_be_json_texts_at_any_level() -> None:
    row = conversation(ASKED, calling({"n": 1}), SAID, ANSWERED, tools=[TOOL])
    call = row["messages"][1]["tool_calls"]
    function = TOOL["function"]
    as_texts = (
        {"tools": json.dumps([TOOL])},
        {"tools": str([TOOL])},
        {"tools": [json.dumps(TOOL)]},
        {"tools": [{**TOOL, "function": {**function, "parameters": json.dumps(function["parameters"])}}]},
    )
    in_calls = (json.dumps(call), [json.dumps(call[0])], call)
    found = [
        read({**row, **text, "messages": [ASKED, {**row["messages"][1], "tool_calls": each}, SAID, ANSWERED]})[0]
        for text in as_texts
        for each in in_calls
    ]
    assert found == read(row) * len(found)


DECLARED = {
    "add": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "look": {"place": {"type": "string"}, "near": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
}


def using(name: str, arguments: object, **more: Any) -> Row:
    properties = {"type": "object", "properties": DECLARED[name]}
    tools = [{"type": "function", "function": {"name": name, "parameters": properties}}]
    return {**conversation(ASKED, calling(arguments, name), SAID, ANSWERED), "tools": tools, **more}


def test_rows_of_parquet_have_the_keys_that_they_were_written_with(tmp_path: Path) -> None:
    rows = [
        using("add", {"a": number, "b": 2}) if number % 2 else using("look", {"place": "shelf", "near": None})
        for number in range(8)
    ]
    data = write(tmp_path / "rows.parquet", rows)
    found = rows_in(load_splits(replace(RUN, data=data, shared_rows="skip")))
    wanted = {json.dumps(row, sort_keys=True) for row in read(*rows) for _ in [row.pop("where")]}
    assert {json.dumps(row, sort_keys=True) for row in found for _ in [row.pop("where")]} == wanted


def test_a_null_that_was_written_stays(tmp_path: Path) -> None:
    with_null = {"a": None, "b": 2}
    (row,) = read(using("add", with_null))
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == with_null
    texts = [using("add", json.dumps(with_null)), using("look", '{"place": "shelf"}')] * 3
    data = write(tmp_path / "rows.parquet", texts)
    found = rows_in(load_splits(replace(RUN, data=data, shared_rows="skip")))
    called = [row["messages"][1]["tool_calls"][0]["function"]["arguments"] for row in found]
    assert with_null in called
    assert {"place": "shelf"} in called


# -- rows that end with a call


@pytest.mark.parametrize(
    "messages",
    [
        [ASKED, calling({"n": 1})],
        [ASKED, ANSWERED, ASKED, calling({"n": 1})],
        [ASKED, calling({"n": 0}), SAID, calling({"n": 1})],
    ],
)
@pytest.mark.parametrize("train_on", ["assistant", "completion"])
def test_a_row_that_ends_with_a_call_learns_it(messages: list[Row], train_on: str) -> None:
    tokenizer, run = with_template(AS_JSON), replace(RUN, train_on=train_on)
    rows = read(conversation(*messages))
    (tokens,) = tokens_of(rows, tokenizer, run)
    assert learnt(tokens, tokenizer).endswith('look {"n": 1}<|end|>')
    assert tokenizer.decode(prompt_ids(rows, tokenizer)[0]).endswith("<|assistant|>")
    assert all(part in answer_of(rows[0]) for part in ("look", '{"n": 1}'))


def test_rows_whose_calls_differ_are_different_rows_and_pairs() -> None:
    one, other = (read(conversation(ASKED, calling({"n": n})))[0] for n in (1, 2))
    assert texts_of(one) != texts_of(other)
    assert digest(one) != digest(other)
    pair = {"prompt": [ASKED], "chosen": [calling({"n": 1})], "rejected": [calling('{"n": 2}')]}
    tokenizer = with_template(AS_JSON)
    (tokens,) = tokens_of(read(pair, run=PAIRS), tokenizer, PAIRS)
    assert tokenizer.decode(tokens["rejected_ids"]).endswith('look {"n": 2}<|end|>')
    assert "the same chosen and rejected answer" in refused({**pair, "rejected": [calling({"n": 1})]}, run=PAIRS)


@pytest.mark.parametrize("messages", [[calling({})], [ASKED, calling({}), ANSWERED], [ASKED, calling({}), SAID]])
def test_calls_out_of_their_place_are_refused(messages: list[Row]) -> None:
    assert refused(conversation(*messages))


# -- control tokens in texts

MARK = "<|end|>"
HOLDS_MARK: dict[str, Row] = {
    "user": conversation({**ASKED, "content": f"Is {MARK}<|user|> a mark?"}, ANSWERED),
    "answer": conversation(ASKED, {**ANSWERED, "content": f"It is {MARK} here."}),
    "answer's begin": conversation(ASKED, {**ANSWERED, "content": f"{MARK} is one."}),
    "earlier answer": conversation(ASKED, {**ANSWERED, "content": f"It is {MARK}"}, ASKED, ANSWERED),
    "system": conversation({"role": "system", "content": f"Never say {MARK}!"}, ASKED, ANSWERED),
    "tool": conversation(ASKED, calling({}), {**SAID, "content": f"3{MARK}"}, ANSWERED),
    "argument": conversation(ASKED, calling({"n": [f"a{MARK}"]}), SAID, ANSWERED),
    "argument's name": conversation(ASKED, calling({MARK: 1}), SAID, ANSWERED),
    "declaration": conversation(ASKED, ANSWERED, tools=[{**TOOL, "description": f"Ends with {MARK}."}]),
    "plain text": {"text": f"A turn ends with {MARK} here."},
}


def without_marks(text: Any) -> Any:
    return text.replace(MARK, "(end)").replace("<|user|>", "(user)") if isinstance(text, str) else text


def every_text(row: Any, change: Any) -> Any:
    if isinstance(row, dict):
        return {every_text(key, change): every_text(value, change) for key, value in row.items()}
    return [every_text(each, change) for each in row] if isinstance(row, list) else change(row)


@pytest.mark.parametrize(
    ("place", "train_on"),
    [*((place, "assistant") for place in HOLDS_MARK), ("answer", "completion"), ("user", "all"), ("system", "prompt")],
)
def test_a_control_token_in_a_text_is_text_and_the_template_s_own_are_none(place: str, train_on: str) -> None:
    tokenizer, run = with_template(AS_JSON), replace(RUN, train_on=train_on)
    marks = tokenizer.convert_tokens_to_ids([MARK, "<|user|>", "<|assistant|>"])
    without = every_text(HOLDS_MARK[place], without_marks)
    (found,), (usual,) = (tokens_of(read(row), tokenizer, run) for row in (HOLDS_MARK[place], without))
    for ids in ("input_ids", "labels"):
        assert [token for token in found[ids] if token in marks] == [token for token in usual[ids] if token in marks]
    for said in (learnt, lambda row, tokenizer: tokenizer.decode(row["input_ids"])):
        assert without_marks(said(found, tokenizer)) == without_marks(said(usual, tokenizer))
        written, expected = said(found, tokenizer), said(usual, tokenizer)
        assert written.count(MARK) == expected.count(MARK) + expected.count("(end)")


@pytest.mark.parametrize("place", ["user", "system", "tool", "plain text"])
def test_a_question_is_asked_as_it_was_learnt(place: str) -> None:
    tokenizer = with_template(AS_JSON)
    rows = read(HOLDS_MARK[place])
    (whole,), (prompt,) = tokens_of(rows, tokenizer, RUN), prompt_ids(rows, tokenizer)
    length = len(prompt) - 2 if place == "plain text" else len(prompt)  # its opening may end within a word
    assert whole["input_ids"][:length] == prompt[:length]


def test_a_pair_s_control_tokens_are_text() -> None:
    tokenizer = with_template(AS_JSON)
    rows = read({"prompt": "What?", "chosen": f"{MARK} it is.", "rejected": f"No {MARK}, it is not."}, run=PAIRS)
    (tokens,) = tokens_of(rows, tokenizer, PAIRS)
    end = tokenizer.convert_tokens_to_ids(MARK)
    assert [tokens[name].count(end) for name in ("input_ids", "rejected_ids")] == [2, 2]
    assert learnt(tokens, tokenizer) == f"{MARK} it is.{MARK}"


def test_texts_with_labels_and_summaries_have_their_marks_as_text(summarizers: PreTrainedTokenizerBase) -> None:
    encoder = AutoTokenizer.from_pretrained(minilm_folder())
    (row,) = tokens_of([{"text": "a [SEP] b [MASK]", "class": 0}], encoder, LABELS)
    assert encoder.convert_ids_to_tokens(row["input_ids"]) == [
        "[CLS]", "a", "[", "sep", "]", "b", "[", "mask", "]", "[SEP]"
    ]  # fmt: skip
    marks = [token for token in summarizers.all_special_tokens if token not in (summarizers.eos_token,)]
    texts = {"text": f"Ann: {marks[0]} then.", "summary": f"Ann says {marks[0]}."}
    (row,) = tokens_of([texts], summarizers, SUMMARIES)
    special = set(summarizers.all_special_ids)
    for ids in (row["input_ids"], row["labels"]):
        assert special & set(ids) == {summarizers.eos_token_id}


def test_rows_with_control_tokens_are_counted_or_refused(
    tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = read(*(conversation(ASKED, ANSWERED) for _ in range(3)), HOLDS_MARK["answer"], HOLDS_MARK["user"])
    splits = Splits(rows[:4], rows[:1], rows[4:])
    say_once.cache_clear()
    check_tokens(splits, tokenizer, RUN)
    said = capsys.readouterr().out
    assert "2 of 6 rows" in said
    assert "'<|end|>' in rows.jsonl, line 4" in said
    with pytest.raises(BadInputError, match=r"2 of 6 rows .*rows\.jsonl, line 4.*--control_tokens text"):
        check_tokens(splits, tokenizer, replace(RUN, control_tokens="refuse"))
    check_tokens(Splits(rows[:3], rows[:1], rows[:1]), tokenizer, replace(RUN, control_tokens="refuse"))
    assert not capsys.readouterr().out


def test_what_a_model_says_in_added_tokens_stays_tokens() -> None:
    tokenizer = load_tokenizer(RUN)
    tokenizer.add_tokens(["<think>", "</think>"])
    thought = {**ANSWERED, "content": f"<think>hm, {MARK}</think>The third."}
    (tokens,) = tokens_of(read(conversation(ASKED, thought)), tokenizer, RUN)
    assert set(tokenizer.convert_tokens_to_ids(["<think>", "</think>"])) <= set(tokens["labels"])


# -- weights


@pytest.mark.parametrize("name", ["weight", "train", "loss"])
@pytest.mark.parametrize("zero", [0, False, 0.0])
def test_a_message_of_weight_0_is_read_and_not_learnt(
    name: str, zero: object, tokenizer: PreTrainedTokenizerBase
) -> None:
    wrong = {"role": "assistant", "content": "The first."}
    messages = [ASKED, {**wrong, name: zero}, ASKED, {**ANSWERED, name: 1}]
    rows = read(conversation(*messages), conversation(ASKED, ANSWERED, ASKED, {**wrong, name: zero}))
    assert [learnt(row, tokenizer) for row in tokens_of(rows, tokenizer, RUN)] == ["The third.<|end|>"] * 2
    whole = tokens_of(read(conversation(ASKED, wrong, ASKED, ANSWERED)), tokenizer, RUN)
    assert tokens_of(rows, tokenizer, RUN)[0]["input_ids"] == whole[0]["input_ids"]


@pytest.mark.parametrize(
    ("messages", "settings"),
    [
        ([ASKED, {**ANSWERED, "weight": 0}], {}),
        ([ASKED, {**ANSWERED, "weight": 0.5}], {}),
        ([ASKED, {**ANSWERED, "weight": "0"}], {}),
        ([ASKED, ANSWERED, ASKED, {**ANSWERED, "weight": 0}], {"train_on": "completion"}),
        ([{**ASKED, "weight": 0}, ANSWERED], {"train_on": "all"}),
        ([ASKED, {**ANSWERED, "weight": 0}, ASKED, ANSWERED], {"train_on": "prompt"}),
    ],
)
def test_weights_that_cannot_be_honoured_are_refused(messages: list[Row], settings: dict[str, str]) -> None:
    sentence = refused(conversation(*messages), run=replace(RUN, **settings))
    assert sentence.startswith("rows.jsonl, line 1 ")
    assert "weight" in sentence


def test_an_answer_of_a_pair_has_no_weight_0() -> None:
    pair = {"prompt": "What?", "chosen": [{**ANSWERED, "weight": 0}], "rejected": "No."}
    assert "weight" in refused(pair, run=PAIRS)


# -- lists of messages as texts


@pytest.mark.parametrize("written", [json.dumps, str], ids=["JSON", "Python"])
def test_lists_of_messages_in_tables_are_read_alike_everywhere(written: Any) -> None:
    asked, answered = written([ASKED]), written([ANSWERED])
    both = written([ASKED, ANSWERED])
    sharegpt = written([{"from": "human", "value": "Which shelf?"}, {"from": "gpt", "value": "The third."}])
    rows = (
        {"messages": both},
        {"conversations": sharegpt},
        {"prompt": asked, "completion": answered},
        {"prompt": asked, "completion": "The third."},
        {"question": asked, "answer": answered},
        {"instruction": "Which shelf?", "input": "", "output": "The third.", "history": "[]"},
    )
    assert [read(row)[0]["messages"] for row in rows] == [[ASKED, ANSWERED]] * len(rows)
    worse = written([{**ANSWERED, "content": "The first."}])
    for row in (
        {"prompt": asked, "chosen": answered, "rejected": worse},
        {"prompt": "Which shelf?", "chosen": answered, "rejected": worse},
        {"chosen": both, "rejected": written([ASKED, {**ANSWERED, "content": "The first."}])},
    ):
        (found,) = read(row, run=PAIRS)
        assert (found["messages"], found["rejected"][0]["content"]) == ([ASKED, ANSWERED], "The first.")


def test_a_table_s_history_is_read() -> None:
    row = {"instruction": "Which shelf?", "output": "The third.", "history": '[["Who?", "Ann."]]'}
    said = [message["content"] for message in read(row)[0]["messages"]]
    assert said == ["Who?", "Ann.", "Which shelf?", "The third."]


@pytest.mark.parametrize(
    "text", ["[1, 2, 3]", "[Ann laughs] Yes.", '[{"shelf": 3}]', '{"role": "assistant"}', "[]", '["role"]']
)
def test_an_answer_that_only_looks_like_a_list_stays_text(text: str) -> None:
    assert read({"question": "What?", "answer": text})[0]["messages"][1]["content"] == text
    (pair,) = read({"prompt": "What?", "chosen": text, "rejected": "No."}, run=PAIRS)
    assert pair["messages"][1]["content"] == text


@pytest.mark.parametrize("text", ["[{'role': 'user'} {'role': 'assistant'}]", '[{"role": "user", "content": "a"'])
def test_a_list_of_messages_that_was_spoilt_is_never_learnt_as_a_text(text: str) -> None:
    for row, run in (
        ({"messages": text}, RUN),
        ({"question": "What?", "answer": text}, RUN),
        ({"prompt": "What?", "chosen": text, "rejected": "No."}, PAIRS),
    ):
        assert refused(row, run=run).startswith("rows.jsonl, line 1 has ")


# -- what is cut


def test_a_summary_that_is_cut_has_no_end_and_is_counted_or_refused(summarizers: PreTrainedTokenizerBase) -> None:
    rows = [
        {"text": "Ann: Shall we go?", "summary": "Ann asks. " * count, "where": f"a.csv, row {count}"}
        for count in (1, 9)
    ]
    run = replace(SUMMARIES, max_target_length=9)
    short, cut = (row["labels"] for row in tokens_of(rows, summarizers, run))
    assert short[-1] == summarizers.eos_token_id
    assert len(cut) == 9
    assert summarizers.eos_token_id not in cut
    assert "1 of 2 summaries have more than max_target_length, 9, tokens" in say_long_texts(rows, summarizers, run)
    refusing = replace(run, long_texts="refuse")
    with pytest.raises(BadInputError, match=r"1 of 2 summaries .*\(a\.csv, row 9\): raise --max_target_length"):
        tokens_of(rows, summarizers, refusing)
    assert tokens_of(rows, summarizers, replace(refusing, max_target_length=300))
    assert tokens_of(rows[:1], summarizers, replace(refusing, max_target_length=len(short)))


@pytest.mark.parametrize(
    ("run", "long", "short"),
    [
        (RUN, conversation(ASKED, {**ANSWERED, "content": "The third. " * 30}), conversation(ASKED, ANSWERED)),
        (
            PAIRS,
            {"prompt": "Which?", "chosen": "The third.", "rejected": "The first. " * 30},
            {"prompt": "Which?", "chosen": "The third.", "rejected": "The first."},
        ),
    ],
)
def test_answers_that_would_be_cut_are_refused_on_request(
    run: RunConfig, long: Row, short: Row, tokenizer: PreTrainedTokenizerBase
) -> None:
    run = replace(run, max_length=40)
    rows = read(short, long, run=run)
    refusing = replace(run, long_texts="refuse")
    assert len(tokens_of(rows, tokenizer, run)) == 2
    with pytest.raises(BadInputError, match=r"1 of 2 rows .*max_length, 40.*line 2.*--long_texts cut"):
        check_tokens(Splits(rows[:1], rows, rows[:1]), tokenizer, refusing)
    check_tokens(Splits(rows[:1], rows[:1], rows[:1]), tokenizer, refusing)
    assert tokens_of(rows, tokenizer, replace(refusing, max_length=500))


# -- labels


def labelled(*labels: object) -> list[Row]:
    return [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]


@pytest.mark.parametrize(
    ("labels", "ordered"),
    [
        (range(12), [str(label) for label in range(12)]),
        (["10", "9", "-1", "0"], ["-1", "0", "9", "10"]),
        ([2.5, 10, 1], ["1", "2.5", "10"]),
        (["level 10", "level 9", "level 1"], ["level 1", "level 9", "level 10"]),
        (["b", "a", "B"], ["B", "a", "b"]),
        (["10", "9", "none"], ["9", "10", "none"]),
        (["nan", "1", "2"], ["1", "2", "nan"]),
        (["v2", f"v{'9' * 5000}", "v010", "v9"], ["v2", "v9", "v010", f"v{'9' * 5000}"]),
    ],
)
def test_labels_are_in_their_natural_order(labels: Sequence[object], ordered: list[str], tmp_path: Path) -> None:
    for name in ("train", "validation", "test"):
        write(tmp_path / f"{name}.jsonl", labelled(*labels))
    splits = load_splits(replace(LABELS, data=str(tmp_path)))
    assert label_names(splits) == ordered
    assert [row["class"] for row in splits.test] == [ordered.index(str(label)) for label in labels]


@pytest.mark.parametrize(
    ("one", "other"),
    [("spam", "Spam"), ("spam", "spam "), ("a b", "a  b"), ("caf\u00e9", "cafe\u0301"), ("1", "1.0"), ("ﬁne", "fine")],
)
def test_labels_that_are_nearly_the_same_are_said(
    one: str, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train", "validation", "test"):
        write(tmp_path / f"{name}.jsonl", labelled(one, other, "else"))
    say_once.cache_clear()
    load_splits(replace(LABELS, data=str(tmp_path)))
    said = capsys.readouterr().out
    assert repr(one) in said
    assert repr(other) in said
    assert "'else'" not in said
    write(tmp_path / "train.jsonl", labelled(one, one, "else"))
    sentence = refusal_of(replace(LABELS, data=str(tmp_path)))
    assert f"{one!r} and {other!r}" in sentence


# -- before a model loads, and before anything is learnt


@pytest.mark.slow
def test_a_run_is_refused_before_its_model_loads(tmp_path: Path) -> None:
    rows = [{"question": f"Which shelf {number}?", "answer": "The third." * number} for number in range(1, 12)]
    run = replace(RUN, data=write(tmp_path / "rows.jsonl", rows), max_length=40, long_texts="refuse")
    with pytest.raises(BadInputError, match="answers that go beyond max_length, 40, tokens"):
        check_inputs(run)
    rows[3]["question"] = f"What is {MARK}?"
    data = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(BadInputError, match=r"rows\.jsonl, line 4.*control_tokens refuses"):
        check_inputs(replace(RUN, data=data, control_tokens="refuse"))


def test_a_control_token_that_a_tokenizer_cannot_write_as_text_is_refused() -> None:
    pieces = [("</s>", 0.0), ("<unk>", 0.0), *((letter, -3.0) for letter in "abc</>_x0")]
    model = Tokenizer(models.Unigram(pieces, unk_id=1))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="</s>", unk_token="<unk>", extra_special_tokens=["<x_0>"]
    )
    rows_with = {
        token: [{"text": f"a{token}b", "summary": "c", "where": "a.csv, row 3"}] for token in ("</s>", "<unk>", "<x_0>")
    }
    with pytest.raises(BadInputError, match=r"a\.csv, row 3 has '</s>' in its texts, which this tokenizer cannot"):
        check_tokens(Splits(*[rows_with["</s>"]] * 3), tokenizer, SUMMARIES)
    for token in ("<unk>", "<x_0>"):
        check_tokens(Splits(*[rows_with[token]] * 3), tokenizer, SUMMARIES)
    (row,) = tokens_of(rows_with["<x_0>"], tokenizer, SUMMARIES)
    assert tokenizer.convert_tokens_to_ids("<x_0>") not in row["input_ids"]


def test_the_preview_counts_summaries_that_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"Ann: {number}?", "summary": f"Ann asks {number}. " * (1 + number // 9)} for number in range(10)]
    for name in ("train", "validation", "test"):
        write(tmp_path / f"{name}.json", rows)
    options = ["--task", "summarization", "--technique", "full", "--model", str(EMBEDDED_SUMMARIZER)]
    monkeypatch.setattr(sys, "argv", ["data", str(tmp_path), *options, "--max_target_length", "14"])
    preview_command()
    assert "1 summaries have more than max_target_length, 14" in capsys.readouterr().out
    sys.argv += ["--long_texts", "refuse"]
    with pytest.raises(SystemExit):
        preview_command()
    assert "1 of 10 summaries have more than 14 tokens" in capsys.readouterr().err


def test_files_that_are_called_otherwise_than_their_split_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train", "dev", "eval", "more"):
        write(tmp_path / f"{name}.jsonl", [{"question": f"{name} {number}?", "answer": "a"} for number in range(3)])
    say_once.cache_clear()
    load_splits(replace(RUN, data=str(tmp_path)))
    said = capsys.readouterr().out
    assert "dev.jsonl is validation, eval.jsonl is test" in said
    assert "not read: more.jsonl" in said


@pytest.mark.parametrize("answer", [10**400, -3, 2.5])
def test_an_answer_that_is_a_number_is_learnt_as_it_is_written(answer: float) -> None:
    assert read({"question": "How many?", "answer": answer})[0]["messages"][1]["content"] == str(answer)
