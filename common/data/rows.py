"""Rows, tokens and splits: what they are, and how a file of rows is read."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
    """The rows to train on, to choose by, and to report on.

    Attributes:
        held_out: Whether the test rows were taken from the training rows.
    """

    train: list[Row]
    validation: list[Row]
    test: list[Row]
    held_out: bool = False

    def map(self, change: Callable[[list[Row]], list[Row]]) -> "Splits":
        """Return each split changed in the same way."""
        return Splits(change(self.train), change(self.validation), change(self.test), self.held_out)


Found = Iterable[tuple[object, str]]
"""What stands for each row in a file or dataset, and where it stands."""


@dataclass(frozen=True)
class RowKind:
    """What the rows of a run are, and how they are read.

    Attributes:
        suffixes: Of the files that can be read.
        holds: What a file holds, and what an empty one is to be given: for the refusals of `read_rows`.
        parse: From the content and the name of a file.
        check: Return the rows, or refuse one; the second argument names the file or dataset.
        finish: What is done to all splits once they are read.
    """

    suffixes: tuple[str, ...]
    holds: str
    advice: str
    parse: Callable[[str, str], Found]
    check: Callable[[Found, str], list[Row]]
    tokenize: Callable[[list[Row], PreTrainedTokenizerBase, RunConfig], list[Tokens]]
    finish: Callable[[Splits], Splits] = lambda splits: splits


def read_rows(source: str, kind: RowKind) -> list[Row]:
    """Return the rows of one file, on this machine or behind any URL that fsspec reads (`s3://`, `https://`, ...).

    Raises:
        BadInputError: the file is missing or empty, or a row is malformed.
    """
    rows = kind.check(kind.parse(read_text(source, kind.holds), source), source)
    if not rows:
        raise BadInputError(f"The data file {source} is empty: give it at least one {kind.advice}.")
    return rows


def read_text(source: str, holds: str) -> str:
    """Return the content of a file on this machine or behind a URL; `holds` says what should stand in it.

    Raises:
        BadInputError: it is missing, cannot be read, or is not UTF-8.
    """
    try:
        with fsspec.open(source, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        raise BadInputError(f"The data file {source} does not exist: make it, {holds}.") from None
    except ImportError as error:
        raise BadInputError(f"The data file {source} needs one more package ({error}): install it.") from None
    except Exception as error:  # each of fsspec's file systems has classes of its own
        raise BadInputError(f"The data file {source} cannot be read ({error}): correct --data.") from None
    try:
        return content.decode("utf-8-sig")  # Excel's files begin with a byte order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadInputError(f"{source} is not UTF-8 (line {line}, byte {error.start}): save it as UTF-8.") from None


def parse_lines(content: str, source: str) -> Iterator[tuple[object, str]]:
    """Yield what each line of a JSONL file holds, and where it stands; empty lines are left out.

    Raises:
        BadInputError: a line is no JSON.
    """
    for number, line in enumerate(content.split("\n"), 1):  # splitlines would also split at U+2028 within a text
        where = f"{source}, line {number}"
        try:
            if line.strip():
                yield json.loads(line), where
        except json.JSONDecodeError as error:
            raise BadInputError(
                f"{where} is no JSON ({error.msg} at column {error.colno}): correct or remove it."
            ) from None


def texts_of(row: Row) -> list[str]:
    """Return the texts that a row holds."""
    if "messages" in row:
        return [message["content"] for message in row["messages"]]
    return [row[key] for key in ("text", "summary") if key in row]


def labels_in(row: Tokens) -> int:
    """Return how many predictions a row asks for: tokens, or with classification the one label."""
    if isinstance(row["labels"], int):
        return int(row["labels"] != IGNORED_LABEL)
    return sum(label != IGNORED_LABEL for label in row["labels"][1:])


def without_labels(row: Tokens) -> Tokens:
    """Return the row without labels: computed like any other, it adds nothing to a loss."""
    labels = row["labels"]
    ignored = IGNORED_LABEL if isinstance(labels, int) else [IGNORED_LABEL] * len(labels)
    return {**row, "labels": ignored, **({"row": NO_ROW} if "row" in row else {})}
