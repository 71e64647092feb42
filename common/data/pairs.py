"""Rows of preferences, in TRL's formats: a prompt with two answers, or two conversations with another last message."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase as Tokenizer

from common.base.errors import BadInputError, begin_of
from common.base.run_config import RunConfig
from common.data.files import TABLES
from common.data.formats import KEPT, Message, filled_columns, normalised, refuse_pictures, system_of
from common.data.messages import check_conversation, tokens_to_learn
from common.data.rows import IGNORED_LABEL, Found, Row, RowKind, Tokens, listed, padded_shape, place_of, placed, said_in
from common.data.templates import encode
from common.planning.job import BatchShape

ANSWERS = ("chosen", "rejected")
COLUMNS = "prompt, chosen and rejected"


def row_kind(run: RunConfig) -> RowKind:
    """Return what rows of pairs are."""
    return RowKind(
        suffixes=TABLES,
        holds="one JSON object with `prompt`, `chosen` and `rejected` per line",
        check=check_pairs,
        tokenize=tokenize_pairs,
        shape=shape_of_pairs,
    )


def check_pairs(found: Found, source: str) -> Iterator[Row]:
    """Yield the rows of `source`: conversations that end with the chosen answer, with the rejected one beside them."""
    for row, place in found:
        filled, where = filled_columns(row, place, f"the columns {COLUMNS}")
        row = {str(name).lower(): value for name, value in filled.items()}
        refuse_pictures(row, where)
        prompt, chosen, rejected = _three_parts(row, where)
        kept = {name: row[name] for name in ("id", *KEPT) if name in row}
        checked, other = (
            check_conversation({**kept, "messages": [*prompt, answer]}, where, train_on="completion")
            for answer in (chosen, rejected)
        )
        said, said_otherwise = (said_in(each["messages"][-1]).strip() for each in (checked, other))
        if said == said_otherwise:
            raise BadInputError(f"{where} has the same chosen and rejected answer, {begin_of(said, 60)!r}: remove it.")
        yield placed({**checked, "rejected": other["messages"][-1:]}, place)


def _three_parts(row: Row, where: str) -> tuple[list[Message], Message, Message]:
    if missing := [name for name in ANSWERS if name not in row]:
        raise BadInputError(
            f"{where} has no {missing[0]!r} (its columns: {listed(row)}): pairs have {COLUMNS}; add it."
        )
    chosen, rejected = (as_messages(row[name], "assistant", where) for name in ANSWERS)
    if len(chosen) == len(rejected) == 1:
        if "prompt" not in row:
            raise BadInputError(f"{where} has two answers, but no prompt: add the column, or give whole conversations.")
        return [*system_of(row), *as_messages(row["prompt"], "user", where)], chosen[0], rejected[0]
    if chosen[:-1] != rejected[:-1]:  # whole conversations, whatever the column `prompt` says
        raise BadInputError(f"{where} has conversations that differ before their last answers: correct it.")
    return chosen[:-1], chosen[-1], rejected[-1]


def as_messages(value: object, role: str, where: str) -> list[Message]:
    """Return a text as a message of this role, or messages with the roles that chat templates know."""
    return normalised([{"role": role, "content": value}] if isinstance(value, str) else value, where)


def tokenize_pairs(rows: Sequence[Row], tokenizer: Tokenizer, run: RunConfig) -> Sequence[Tokens]:
    """Return every pair that differs within `max_length` as tokens; `exchange_answers` learns the rejected answers."""

    def encoded(batch: list[Row]) -> list[Tokens]:
        return encode_pairs([exchanged(row) for row in batch] if run.exchange_answers else batch, tokenizer)

    return tokens_to_learn(rows, tokenizer, run, encoded, _differ, lacking="difference between its two answers")


def exchanged(row: Row) -> Row:
    """Return a row whose chosen answer is the rejected one, and the other way round."""
    *prompt, chosen = row["messages"]
    return {**row, "messages": [*prompt, *row["rejected"]], "rejected": [chosen]}


def encode_pairs(rows: list[Row], tokenizer: Tokenizer) -> list[Tokens]:
    """Return pairs as tokens: the prompt with each answer, and labels on the chosen one and its end token."""
    chosen, rejected = (encode(each, tokenizer, "completion") for each in (rows, list(map(exchanged, rows))))
    for row, one, other in zip(rows, chosen, rejected, strict=True):
        prompt = prompt_length(one)
        if one["input_ids"][:prompt] != other["input_ids"][:prompt]:
            raise BadInputError(
                f"The chat template writes the prompt of {place_of(row)} otherwise before its rejected answer: drop it."
            )
        one["rejected_ids"] = other["input_ids"]
    return chosen


def prompt_length(row: Tokens) -> int:
    """Return the tokens before a row's answers."""
    answer = (place for place, label in enumerate(row["labels"]) if label != IGNORED_LABEL)
    return next(answer, len(row["labels"]))


def _differ(row: Tokens) -> bool:
    """Return whether a pair that was cut still has two answers, which differ."""
    has_both = prompt_length(row) < min(len(row["input_ids"]), len(row["rejected_ids"]))
    return has_both and row["input_ids"] != row["rejected_ids"]


def shape_of_pairs(longest: Sequence[Tokens], rows: Sequence[Tokens]) -> BatchShape:
    """Return the shape of a batch of pairs; labels are the mean of both answers' tokens."""
    both = [{"input_ids": ids} for row in longest for ids in (row["input_ids"], row["rejected_ids"])]
    learnt = sum(len(row["input_ids"]) + len(row["rejected_ids"]) - 2 * prompt_length(row) for row in longest)
    return replace(padded_shape(both), rows=len(longest), labelled=-(-learnt // len(both)))
