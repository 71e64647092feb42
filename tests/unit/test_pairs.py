"""Pairs of answers: read in the formats that TRL knows, refused in one sentence, and turned into tokens."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.pairs import encode_pairs, prompt_length
from common.data.row_checks import digest
from common.data.rows import IGNORED_LABEL, Row, tokens_in
from common.data.splits import load_splits, row_kind, tokens_of
from common.models.loading import load_tokenizer
from tests.row_files import refusal_of, rows_in, sizes, write

ASKED = {"role": "user", "content": "What is this?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("A coin.", "A coin of 1503, I believe."))
TEXTS = {"prompt": "What is this?", "chosen": "A coin.", "rejected": "A coin of 1503, I believe."}
WHOLE = {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}
SYSTEM = {"role": "system", "content": "Be short."}


def run_of(**settings: Any) -> RunConfig:
    return RunConfig(task="preferences", technique="lora", lora_dropout=0.0, model="assets/embedded_base", **settings)


RUN = run_of()


def read(*rows: Any) -> list[Row]:
    """The rows as they come out of a file."""
    found = [(row, f"rows.jsonl, line {number}") for number, row in enumerate(rows, 1)]
    return list(row_kind(RUN).check(found, "rows.jsonl"))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(RUN)


# -- formats


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        (TEXTS, [ASKED]),
        ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, [ASKED]),
        ({"prompt": [SYSTEM, ASKED], "chosen": [GOOD], "rejected": [BAD]}, [SYSTEM, ASKED]),
        ({"prompt": [ASKED], "chosen": "A coin.", "rejected": BAD["content"]}, [ASKED]),
        (WHOLE, [ASKED]),
        ({**WHOLE, "prompt": None}, [ASKED]),
        ({name: [SYSTEM, *WHOLE[name]] for name in WHOLE}, [SYSTEM, ASKED]),
        ({**WHOLE, "prompt": "What is this?", "messages": WHOLE["chosen"], "score_chosen": 8.0}, [ASKED]),
        (
            {
                "chosen": [{"from": "human", "value": "What is this?"}, {"from": "gpt", "value": "A coin."}],
                "rejected": [{"from": "human", "value": "What is this?"}, {"from": "gpt", "value": BAD["content"]}],
            },
            [ASKED],
        ),
        ({name: [ASKED, BAD, *WHOLE[name]] for name in WHOLE}, [ASKED, BAD, ASKED]),
    ],
    ids=[
        "texts", "messages", "system turn", "mixed", "whole", "prompt of null", "whole with system", "UltraFeedback",
        "ShareGPT", "several turns",
    ],
)  # fmt: skip
def test_pairs_are_read_whatever_their_format(row: Row, prompt: list[Row]) -> None:
    (found,) = read(row)
    assert found == {"messages": [*prompt, GOOD], "rejected": [BAD], "where": "rows.jsonl, line 1"}


def test_a_table_is_read(tmp_path: Path) -> None:
    rows = [
        {**TEXTS, "id": f"{n}", "prompt": f"What is number {n}?", "facts": '["coin"]', "tools": ""} for n in range(3)
    ]
    found = rows_in(load_splits(run_of(data=write(tmp_path / "rows.csv", rows))))
    assert sorted(row["id"] for row in found) == ["0", "1", "2"]
    assert all((row["messages"][1], row["rejected"], row["facts"]) == (GOOD, [BAD], ["coin"]) for row in found)


def test_what_is_used_besides_is_kept_and_other_columns_are_not() -> None:
    tools = [{"type": "function", "function": {"name": "open", "parameters": {}}}]
    kept = {"id": "a", "facts": ["coin"], "tools": tools}
    usual, found = (read(row)[0] for row in (TEXTS, {**TEXTS, **kept, "source": "web"}))
    assert found == usual | kept


# -- refusals


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "What?", "chosen": "A coin."}, "has no 'rejected'"),
        ({"prompt": "What?", "rejected": "A coin."}, "has no 'chosen'"),
        ({**TEXTS, "rejected": None}, "has no 'rejected'"),
        ({}, "has no 'chosen' .*none"),
        ({**TEXTS, "rejected": " A coin.\n"}, "has the same chosen and rejected answer"),
        ({"chosen": [ASKED, GOOD], "rejected": [{**ASKED, "content": "Who?"}, BAD]}, "differ before their last"),
        ({"chosen": [ASKED, GOOD], "rejected": [BAD]}, "differ before their last"),
        ({"chosen": "A coin.", "rejected": "A bowl."}, "no prompt"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "no prompt"),
        ({**TEXTS, "prompt": "  "}, "has an empty user message"),
        ({**TEXTS, "rejected": ""}, "has an empty assistant message"),
        ({**TEXTS, "prompt": 5}, "no list of messages, but '5'"),
        ({**TEXTS, "prompt": []}, "no list of messages"),
        ({"chosen": [ASKED, GOOD, ASKED], "rejected": [ASKED, GOOD, ASKED]}, "assistant's answer must be last"),
        ("A coin.", "should have the columns prompt, chosen and rejected"),
        (["A coin.", "A bowl."], "should have the columns"),
        ({**TEXTS, "id": 17, "rejected": "A coin."}, r" \(id '17'\) has the same chosen and rejected answer"),
    ],
)
def test_what_is_no_pair_is_refused_in_one_sentence(row: Any, said: str) -> None:
    with pytest.raises(BadInputError, match=rf"^rows\.jsonl, line 2.*{said}") as refused:
        read(TEXTS, row)
    assert "\n" not in str(refused.value)


# -- tokens


def test_labels_stand_on_the_chosen_answer_and_its_end_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"messages": [ASKED, BAD, ASKED, GOOD], "rejected": [BAD]}
    (tokens,) = encode_pairs([row], tokenizer)
    begin = prompt_length(tokens)
    prompt, chosen = tokens["input_ids"][:begin], tokens["input_ids"][begin:]
    assert tokens["labels"] == [IGNORED_LABEL] * begin + chosen
    assert tokens["rejected_ids"][:begin] == prompt
    assert tokenizer.decode(chosen) == "A coin.<|end|>"
    assert tokenizer.decode(tokens["rejected_ids"][begin:]) == f"{BAD['content']}<|end|>"
    assert tokenizer.decode(prompt).endswith("<|user|>What is this?<|end|><|assistant|>")


def test_exchanged_answers_are_learnt_instead(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = read(TEXTS)
    (usual,), (exchanged,) = (tokens_of(rows, tokenizer, run_of(exchange_answers=is_so)) for is_so in (False, True))
    both = ("input_ids", "rejected_ids")
    assert [exchanged[name] for name in both] == [usual[name] for name in reversed(both)]
    assert tokenizer.decode(exchanged["labels"][prompt_length(exchanged) :]) == f"{BAD['content']}<|end|>"
    assert rows == read(TEXTS)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['role'] + ' to ' + messages[-1]['content'][-5:] + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}",
        "{{ messages[-1]['content'] | length }}{% for m in messages %}{{ m['content'] + '|' }}{% endfor %}",
    ],
)
def test_a_template_that_writes_a_prompt_otherwise_before_another_answer_is_refused(template: str) -> None:
    tokenizer = load_tokenizer(RUN)
    tokenizer.chat_template = template
    with pytest.raises(BadInputError, match=r"the prompt of rows\.jsonl, line 1 otherwise"):
        tokens_of(read(TEXTS), tokenizer, RUN)


# -- too long


def cut(tokenizer: PreTrainedTokenizerBase, max_length: int, *rows: Row, **settings: Any) -> Any:
    return tokens_of(read(*rows), tokenizer, run_of(max_length=max_length, **settings))


def test_a_rejected_answer_that_is_too_long_is_cut(tokenizer: PreTrainedTokenizerBase) -> None:
    (whole,) = encode_pairs(read(TEXTS), tokenizer)
    chosen, longest = len(whole["input_ids"]), tokens_in(whole)
    assert longest == len(whole["rejected_ids"]) > chosen
    (tokens,) = cut(tokenizer, longest - 2, TEXTS)
    assert tokens["input_ids"] == whole["input_ids"]
    assert tokens["rejected_ids"] == whole["rejected_ids"][:-2]


def test_pairs_that_are_equal_within_max_length_are_refused_or_left_out(tokenizer: PreTrainedTokenizerBase) -> None:
    begins_alike = {**TEXTS, "chosen": "A coin of copper.", "rejected": "A coin of gold."}
    (whole,) = encode_pairs(read(begins_alike), tokenizer)
    together = zip(whole["input_ids"], whole["rejected_ids"], strict=False)
    alike = next(place for place, (one, other) in enumerate(together) if one != other)
    assert alike > prompt_length(whole)
    assert len(cut(tokenizer, alike + 1, begins_alike)) == 1
    rows = (begins_alike, {**TEXTS, "chosen": "Gold.", "rejected": "Copper."})
    assert len(cut(tokenizer, alike, *rows, max_truncated_fraction=0.5)) == 1
    for fraction in (0.0, 0.49):
        with pytest.raises(BadInputError, match="line 1"):
            cut(tokenizer, alike, *rows, max_truncated_fraction=fraction)


def test_a_pair_whose_answers_lie_beyond_max_length_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    (whole,) = encode_pairs(read(TEXTS), tokenizer)
    with pytest.raises(BadInputError, match="max_truncated_fraction"):
        cut(tokenizer, prompt_length(whole), TEXTS)


# -- beside other rows


def test_training_rows_that_are_test_rows_are_found(tmp_path: Path) -> None:
    other = {**TEXTS, "prompt": "And this?"}
    for name, rows in {
        "train": [TEXTS, other],
        "validation": [other],
        "test": [{**TEXTS, "rejected": " a COIN of 1503, I believe."}],
    }.items():
        write(tmp_path / f"{name}.jsonl", rows)
    assert "1 of 2 training rows are also test rows" in refusal_of(run_of(data=str(tmp_path)))
    assert sizes(load_splits(run_of(data=str(tmp_path), shared_rows="skip"))) == (1, 1, 1)


def test_the_same_question_with_another_rejected_answer_is_another_row() -> None:
    one, other = read(TEXTS, {**TEXTS, "rejected": "A bowl."})
    assert digest(one) != digest(other)
