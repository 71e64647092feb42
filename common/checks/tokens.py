"""What a model can read, its positions and its embeddings, against the tokens that a run's rows give it."""

import heapq
import re
from collections.abc import Sequence
from itertools import chain

from transformers import PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.pairs import encode_pairs
from common.data.row_checks import say_once
from common.data.rows import Row, Splits, place_of, shown, texts_of, tokens_in
from common.data.templates import prompt_ids
from common.models.loading import any_shape_config, longest_readable

USED = ("pad_token", "bos_token", "eos_token", "unk_token", "sep_token", "cls_token")  # written, whatever texts have
UNKNOWN = "\U0010ffff"  # a character that no vocabulary has
TEMPLATE_TOKENS = 1_000  # more than a chat template writes around a row's texts
PICTURED_ROWS = 128  # rows whose pictures are looked at: those with the longest texts


def check_rows_readable(run: RunConfig, splits: Splits, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise BadInputError unless the model has embeddings for all tokens of the rows, and positions for its answers."""
    if beyond := tokens_without_embedding(run, tokenizer):
        any_of_them = re.compile("|".join(map(re.escape, beyond)))
        for row in chain(splits.train, splits.validation, splits.test):
            found = next(filter(None, map(any_of_them.search, texts_of(row))), None)
            if found:
                raise BadInputError(
                    f"{place_of(row)} has the token {found[0]!r} in a text, for which {run.model} has no embedding: "
                    "remove it there, or from the tokenizer's added tokens."
                )
        say_once(f"{run.model}: it has no embedding for {shown(beyond)} of its tokenizer, which no row has")
    if run.goal.converses:
        _check_positions(run, splits.test, tokenizer)


def tokens_without_embedding(run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return tokens of texts that the model has no embedding for, as Gemma 3 of 1B for its larger siblings' pictures.

    Raises:
        BadInputError: one is written in any case, or the tokenizer is another model's.
    """
    count = any_shape_config(run.model, run.model_revision).get_text_config().vocab_size
    added, roles = tokenizer.added_tokens_decoder, {getattr(tokenizer, role): role for role in USED}
    if tokenizer.unk_token_id not in tokenizer(UNKNOWN)["input_ids"]:
        roles.pop(tokenizer.unk_token, None)  # texts are written in bytes, and nothing is unknown
    beyond = {token: number for token, number in tokenizer.get_vocab().items() if number >= count}
    for token, number in beyond.items():
        role = roles.get(token) or ("part of its vocabulary" if number not in added else "")
        if not role and token in str(tokenizer.chat_template):
            role = "in its chat template"
        if role:
            raise BadInputError(
                f"The tokenizer of {run.model} has the token {token!r} as number {number} ({role}), but the model has "
                f"embeddings for {count:,} tokens: take the tokenizer that it was published with, or add embeddings "
                "(`resize_token_embeddings`, then `save_pretrained`)."
            )
    return list(beyond)


def _check_positions(run: RunConfig, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> None:
    positions = longest_readable(any_shape_config(run.model, run.model_revision))
    if positions is None:
        return
    room = positions - run.max_new_tokens
    long = [row for row in rows if 4 * _characters(row) + TEMPLATE_TOKENS > room]  # a character has 4 bytes at most
    if run.goal.sees:
        long = heapq.nlargest(PICTURED_ROWS, rows, key=_characters)
    needed = [len(ids) + run.max_new_tokens for ids in prompt_ids(long, tokenizer)] if long else [0]
    if run.goal.compares and long:
        needed = list(map(max, needed, map(tokens_in, encode_pairs(long, tokenizer))))
    most = max(needed)
    if most > positions:
        fewer = run.max_new_tokens - (most - positions)
        instead = f"pass --max_new_tokens {fewer} or less, or " if fewer > 0 else ""
        raise BadInputError(
            f"{place_of(long[needed.index(most)])}, of the test rows, takes {most:,} tokens with its answer "
            f"(max_new_tokens is {run.max_new_tokens}), but {run.model} has positions for {positions:,}: {instead}"
            "shorten such rows."
        )


def _characters(row: Row) -> int:
    return sum(map(len, texts_of(row))) + len(str(row.get("tools", "")))
