"""Rows of plain text, for continued pre-training: every token is learnt, and long texts are divided, not cut."""

from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.control_tokens import AS_TEXT
from common.data.rows import Row, Tokens
from common.data.stored_rows import batches_of, stored

OPENING = 200
"""Characters of a test text, at most, that a model is given to continue; half of a text that is short."""


def is_plain(rows: Sequence[Row]) -> bool:
    """Return whether rows, all of one file and converted by their format, are plain texts."""
    return bool(rows) and "messages" not in rows[0]


def opening_of(text: str) -> str:
    """Return how a text begins: what a model is given to continue in an evaluation."""
    middle = min(max(1, len(text) // 2), OPENING)  # of a single character all: nothing cannot be continued
    at_word = text.rfind(" ", 1, middle + 1)  # -1 where no spaces divide words, as in Chinese
    return text[: at_word if at_word > 0 else middle]


def continuation_of(text: str) -> str:
    """Return what follows the opening, as long as it."""
    opening = opening_of(text)
    return text[len(opening) : 2 * len(opening)].strip()


def opening_ids(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the tokens of each text's opening."""
    return tokenizer([opening_of(row["text"]) for row in rows], **AS_TEXT)["input_ids"]


def tokenize_plain(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, run: RunConfig) -> Sequence[Tokens]:
    """Return every text with its end token, in pieces of at most `max_length` tokens, all of which are learnt.

    Raises:
        BadInputError: `train_on` asks for a part of a row, which plain text does not have.
    """
    if run.train_on not in ("assistant", "all"):
        raise BadInputError(
            f"train_on is {run.train_on!r}, but the rows are plain text, of which every token is learnt: leave "
            "--train_on out."
        )
    return stored(_learnt_pieces(rows, tokenizer, run))


def _learnt_pieces(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, run: RunConfig) -> Iterator[Tokens]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for batch in batches_of(rows, "tokenizing"):
        texts = tokenizer([row["text"] for row in batch], **AS_TEXT)["input_ids"]
        for text in texts:
            ids = [*text, *end]
            for start in range(0, len(ids), run.max_length):
                piece = ids[start : start + run.max_length]
                if len(piece) > 1:  # a single token predicts nothing
                    yield {"input_ids": piece, "attention_mask": [1] * len(piece), "labels": list(piece)}
