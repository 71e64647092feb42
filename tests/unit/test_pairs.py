"""Pairs of answers: read in the formats that TRL knows, refused in one sentence, and turned into tokens."""

import csv
import json
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

MODEL = "assets/embedded_base"
ASKED = {"role": "user", "content": "What is this?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("A coin.", "A coin of 1503, I believe."))
TEXTS = {"prompt": "What is this?", "chosen": "A coin.", "rejected": "A coin of 1503, I believe."}
WHOLE = {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}
SYSTEM = {"role": "system", "content": "Be short."}


def run_of(**settings: Any) -> RunConfig:
    return RunConfig(task="preferences", technique="lora", lora_dropout=0.0, **{"model": MODEL, **settings})


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
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", *TEXTS, "facts", "tools"])
        writer.writeheader()
        for number in range(3):
            prompt = f"What is number {number}?"
            writer.writerow({**TEXTS, "id": number, "prompt": prompt, "facts": '["coin"]', "tools": ""})
    splits = load_splits(run_of(data=str(tmp_path / "rows.csv")))
    rows = [*splits.train, *splits.validation, *splits.test]
    assert sorted(row["id"] for row in rows) == ["0", "1", "2"]
    assert all((row["messages"][1], row["rejected"], row["facts"]) == (GOOD, [BAD], ["coin"]) for row in rows)


def test_what_is_used_besides_is_kept_and_other_columns_are_not() -> None:
    tools = [{"type": "function", "function": {"name": "open", "parameters": {}}}]
    (found,) = read({**TEXTS, "id": "a", "facts": ["coin"], "tools": tools, "source": "web"})
    assert {name: found[name] for name in found if name not in ("messages", "rejected", "where")} == {
        "id": "a", "facts": ["coin"], "tools": tools,
    }  # fmt: skip


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
    ],
)
def test_what_is_no_pair_is_refused_in_one_sentence(row: Any, said: str) -> None:
    with pytest.raises(BadInputError, match=rf"^rows\.jsonl, line 2.*{said}") as refused:
        read(TEXTS, row)
    assert "\n" not in str(refused.value)


def test_the_place_of_a_refused_row_has_its_id() -> None:
    with pytest.raises(BadInputError, match=r"line 1 .*17"):
        read({**TEXTS, "id": 17, "rejected": "A coin."})


# -- tokens


def test_labels_stand_on_the_chosen_answer_and_its_end_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"messages": [ASKED, BAD, ASKED, GOOD], "rejected": [BAD]}
    (tokens,) = encode_pairs([row], tokenizer)
    learnt = [label for label in tokens["labels"] if label != IGNORED_LABEL]
    assert tokenizer.decode(learnt) == "A coin.<|end|>"
    begin = prompt_length(tokens)
    assert tokens["labels"][begin:] == tokens["input_ids"][begin:] == learnt
    assert tokens["rejected_ids"][:begin] == tokens["input_ids"][:begin]
    assert tokenizer.decode(tokens["rejected_ids"][begin:]) == f"{BAD['content']}<|end|>"
    assert tokenizer.decode(tokens["input_ids"][:begin]).endswith("<|user|>What is this?<|end|><|assistant|>")


def test_exchanged_answers_are_learnt_instead(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = read(TEXTS)
    (usual,), (exchanged,) = (tokens_of(rows, tokenizer, run_of(exchange_answers=is_so)) for is_so in (False, True))
    assert exchanged["input_ids"] == usual["rejected_ids"]
    assert exchanged["rejected_ids"] == usual["input_ids"]
    learnt = [label for label in exchanged["labels"] if label != IGNORED_LABEL]
    assert tokenizer.decode(learnt) == f"{BAD['content']}<|end|>"
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
    other = {**TEXTS, "chosen": "Gold.", "rejected": "Copper."}
    with pytest.raises(BadInputError, match="line 1"):
        cut(tokenizer, alike, begins_alike, other)
    kept = cut(tokenizer, alike, begins_alike, other, max_truncated_fraction=0.5)
    assert len(kept) == 1
    with pytest.raises(BadInputError):
        cut(tokenizer, alike, begins_alike, other, max_truncated_fraction=0.49)


def test_a_pair_whose_answers_lie_beyond_max_length_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    (whole,) = encode_pairs(read(TEXTS), tokenizer)
    with pytest.raises(BadInputError, match="max_truncated_fraction"):
        cut(tokenizer, prompt_length(whole), TEXTS)


# -- beside other rows


def test_pairs_that_are_given_to_the_chat_are_sent_to_their_folder(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(TEXTS) + "\n")
    with pytest.raises(BadInputError, match=r"go to 3\.4"):
        load_splits(RunConfig(data=str(tmp_path / "rows.jsonl")))


def test_training_rows_that_are_test_rows_are_found(tmp_path: Path) -> None:
    rows = {
        "validation": {**TEXTS, "prompt": "And this?"},
        "test": {**TEXTS, "rejected": " a COIN of 1503, I believe."},
    }
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (TEXTS, rows["validation"])))
    run = run_of(data=str(tmp_path))
    with pytest.raises(BadInputError, match="1 of 2 training rows are also test rows"):
        load_splits(run)
    assert len(load_splits(run_of(data=str(tmp_path), shared_rows="skip")).train) == 1


def test_the_same_question_with_another_rejected_answer_is_another_row() -> None:
    one, other = read(TEXTS, {**TEXTS, "rejected": "A bowl."})
    assert digest(one) != digest(other)
