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
from common.data.rows import IGNORED_LABEL, Found, Row, RowKind, Tokens, listed, padded_shape, placed
from common.data.templates import prompt_ids
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
        whole = [*asked, {**NO_ANSWER, "content": "an answer"}]
        checked = check_conversation({**kept, "messages": whole}, where, train_on="completion")
        messages = [*checked["messages"][:-1], NO_ANSWER]
        yield placed(
            {**checked, "messages": messages, "columns": columns | {name: checked[name] for name in kept}}, place
        )


def tokenize_prompts(rows: Sequence[Row], tokenizer: Tokenizer, run: RunConfig) -> Sequence[Tokens]:
    """Return every prompt within `max_length` as tokens, with its row; the last token has a label, as answers begin."""

    def encoded(batch: list[Row]) -> list[Tokens]:
        return [
            {
                "input_ids": ids,
                "attention_mask": [1] * len(ids),
                "labels": [*[IGNORED_LABEL] * (len(ids) - 1), ids[-1]],
                "asked": row,
            }
            for row, ids in zip(batch, prompt_ids(batch, tokenizer), strict=True)
        ]

    return tokens_to_learn(rows, tokenizer, run, encoded, lacking="end of its prompt")


def shape_of_answers_to(run: RunConfig, longest: Sequence[Tokens], rows: Sequence[Tokens]) -> BatchShape:
    """Return the shape of a batch of answers to the longest prompts, as long as they may be."""
    prompts = padded_shape(longest)
    return replace(
        prompts,
        rows=run.per_device_train_batch_size,
        length=prompts.length + run.max_new_tokens,
        labelled=run.max_new_tokens,
        padded=True,
    )
