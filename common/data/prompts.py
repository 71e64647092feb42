"""Rows of prompts that the model itself answers, with whatever other columns the reward of an answer reads."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from transformers import PreTrainedTokenizerBase as Tokenizer

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.files import TABLES
from common.data.formats import KEPT, QUESTIONS, filled_columns, refuse_pictures, system_of
from common.data.messages import check_conversation, tokens_to_learn
from common.data.pairs import as_messages
from common.data.rows import Found, Row, RowKind, Tokens, listed, padded_shape, placed
from common.data.templates import labelled, prompt_ids
from common.planning.job import BatchShape

NO_ANSWER = {"role": "assistant", "content": ""}  # a prompt is what comes before a row's last message


def row_kind(run: RunConfig) -> RowKind:
    """Return what rows of prompts are."""
    return RowKind(
        suffixes=TABLES,
        holds="one JSON object with a `prompt` per line",
        check=partial(check_prompts, run=run),
        tokenize=tokenize_prompts,
        shape=partial(shape_of_answers_to, run),
    )


def check_prompts(found: Found, source: str, run: RunConfig) -> Iterator[Row]:
    """Yield the rows of `source`: a conversation without its last answer, and as `columns` all else that a row has."""
    for row, place in found:
        filled, where = filled_columns(row, place, "a column `prompt`")
        columns = {str(name).lower(): value for name, value in filled.items()}
        refuse_pictures(columns, where)
        name = run.prompt_column.lower() or next(filter(columns.__contains__, QUESTIONS), "")
        if name not in columns:
            wanted = name or f"one of {', '.join(QUESTIONS)}"
            raise BadInputError(
                f"{where} has no prompt: its columns are {listed(row)}, but {wanted} was looked for; pass another "
                "--prompt_column."
            )
        asked = [*system_of(columns), *as_messages(columns.pop(name), "user", where)]
        kept = {each: columns[each] for each in ("id", *KEPT) if each in columns}
        answered = [*asked, {**NO_ANSWER, "content": "an answer"}]
        checked = check_conversation({**kept, "messages": answered}, where, train_on="completion")
        checked["messages"][-1] = NO_ANSWER
        checked["columns"] = columns | {each: checked[each] for each in kept if each in checked}
        yield placed(checked, place)


def tokenize_prompts(rows: Sequence[Row], tokenizer: Tokenizer, run: RunConfig) -> Sequence[Tokens]:
    """Return every prompt within `max_length` as tokens, with its row; the last token has a label, as answers begin."""

    def encoded(batch: list[Row]) -> list[Tokens]:
        pairs = zip(batch, prompt_ids(batch, tokenizer), strict=True)
        return [{**labelled(ids, [*[False] * (len(ids) - 1), True]), "asked": row} for row, ids in pairs]

    return tokens_to_learn(rows, tokenizer, run, encoded, lacking="end of its prompt")


def shape_of_answers_to(run: RunConfig, longest: Sequence[Tokens], _: Sequence[Tokens]) -> BatchShape:
    """Return the shape of a batch of answers to the longest prompts, as long as they may be."""
    rows, answer, prompts = run.per_device_train_batch_size, run.max_new_tokens, padded_shape(longest)
    return replace(prompts, rows=rows, length=prompts.length + answer, labelled=answer, padded=True)
