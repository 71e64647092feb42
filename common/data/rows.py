"""What rows, tokens and splits are, and how files of rows are read."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from transformers import PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.base.run_config import RunConfig

IGNORED_LABEL = -100
"""Tokens with this label add nothing to the loss (PyTorch's cross-entropy)."""
NO_ROW = -1
"""The row number that stands for "no row left for this rank"."""
SPLIT_NAMES = ("train", "validation", "test")

Row = dict[str, Any]
"""One line of a data file: `id`, `messages`, and for questions with known facts `facts`; or `text` and `label`, or
`text` and `summary`."""

Tokens = dict[str, Any]
"""`input_ids`, `attention_mask` and `labels` of one row, without padding: lists of numbers; with classification
`labels` is one number, that of the row's class; with summarization they are the tokens of the summary."""


@dataclass(frozen=True)
class Splits:
    """The rows to train on, to choose by, and to report on."""

    train: list[Row]
    validation: list[Row]
    test: list[Row]
    held_out: bool = False
    """Whether the test rows were taken from the training rows."""

    def map(self, change: Callable[[list[Row]], list[Row]]) -> "Splits":
        """Each split changed in the same way."""
        return Splits(change(self.train), change(self.validation), change(self.test), self.held_out)


@dataclass(frozen=True)
class RowKind:
    """What the rows of a run are, and how they are read."""

    suffixes: tuple[str, ...]
    """Of the files that can be read."""
    read: Callable[[str], list[Row]]
    """The rows of one file."""
    check: Callable[[object, str], Row]
    """A row as it is, or refused; the second argument says where it stands."""
    tokenize: Callable[[list[Row], PreTrainedTokenizerBase, RunConfig], list[Tokens]]
    """Every row as tokens."""
    finish: Callable[[Splits], Splits] = lambda splits: splits
    """What is done to all splits once they are read."""


def read_text(source: str | Path, holds: str) -> str:
    """A file on this machine or behind any URL that fsspec reads; `holds` is what should stand in it.

    Raises:
        BadInputError: it is missing, cannot be read, or is not UTF-8.
    """
    try:
        with fsspec.open(str(source), "rb") as file:
            content = file.read()
    except FileNotFoundError:
        raise BadInputError(f"The data file {source} does not exist: make it, {holds}.") from None
    except ImportError as error:
        raise BadInputError(f"The data file {source} needs one more package ({error}): install it.") from None
    except Exception as error:  # each of fsspec's file systems has classes of its own
        raise BadInputError(f"The data file {source} cannot be read ({error}): mend --data.") from None
    try:
        return content.decode("utf-8-sig")  # Excel's files begin with a byte order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadInputError(f"{source} is not UTF-8 (line {line}, byte {error.start}): save it as UTF-8.") from None


def parse_lines(lines: list[str], source: str | Path) -> Iterator[tuple[object, str]]:
    """What each line of a JSONL file holds, and where it stands; empty lines are left out.

    Raises:
        BadInputError: a line is no JSON.
    """
    for number, line in enumerate(lines, 1):
        where = f"{source}, line {number}"
        if not line.strip():
            continue
        try:
            yield json.loads(line), where
        except json.JSONDecodeError as error:
            raise BadInputError(
                f"{where} is no JSON ({error.msg} at column {error.colno}): mend or remove it."
            ) from None


def texts_of(row: Row) -> list[str]:
    """What a row has to read."""
    if "messages" in row:
        return [message["content"] for message in row["messages"]]
    return [row[key] for key in ("text", "summary") if key in row]


def labels_in(row: Tokens) -> int:
    """What is to be predicted in a row: tokens, or with classification the one label."""
    if isinstance(row["labels"], int):
        return int(row["labels"] != IGNORED_LABEL)
    return sum(label != IGNORED_LABEL for label in row["labels"][1:])


def without_labels(row: Tokens) -> Tokens:
    """The row, computed like any other, that adds nothing to a loss."""
    labels = row["labels"]
    ignored = IGNORED_LABEL if isinstance(labels, int) else [IGNORED_LABEL] * len(labels)
    return {**row, "labels": ignored, **({"row": NO_ROW} if "row" in row else {})}
