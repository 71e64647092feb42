"""Rows, tokens and splits: what they are, and what a task says about its rows."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from common.base.errors import begin_of
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.planning.job import BatchShape

IGNORED_LABEL = -100  # adds nothing to the loss (PyTorch's cross-entropy)
NO_ROW = -1  # the number of "no row left for this rank"
SPLIT_WORDS = {  # in names of files, folders and datasets, as `datasets` has it; the first word comes first
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SPLIT_NAMES = tuple(SPLIT_WORDS)

OPENING = 200  # characters of a test text, at most, that a model is given to continue

Row = dict[str, Any]
"""One line of a data file: `id`, `messages`, and for questions with known facts `facts`; or `text` and `label`, or
`text` and `summary`. With `rejected`, a worse answer, the last of the `messages` is a better one; with `picture` they
are about it. `where` is its place, such as `rows.csv, row 3`."""
Tokens = dict[str, Any]
"""`input_ids`, `attention_mask` and `labels` of one row, without padding: lists of numbers. In classification `labels`
is the number of the row's class; in summarization they are the summary's tokens. Pictured rows have their `picture`,
too. Of two answers `input_ids` are the prompt with the chosen one, `rejected_ids` that with the other."""
Found = Iterable[tuple[object, str]]  # what stands for each row, and where it stands


@dataclass(frozen=True)
class Splits:
    """The rows to train on, to choose by, and to report on; `held_out`: the last were taken from the training rows."""

    train: Sequence[Row]
    validation: Sequence[Row]
    test: Sequence[Row]
    held_out: bool = False

    def map(self, change: Callable[[Sequence[Row]], Sequence[Row]]) -> "Splits":
        """Return each split changed in the same way."""
        return Splits(change(self.train), change(self.validation), change(self.test), self.held_out)


def shape_of_answers(longest: Sequence[Tokens], rows: Sequence[Tokens]) -> BatchShape:
    """Return the shape of a batch of rows whose labels are as many as their tokens."""
    learnt = {place for row in longest for place, label in enumerate(row["labels"]) if place and label != IGNORED_LABEL}
    return replace(padded_shape(longest), labelled=len(learnt))


def padded_shape(longest: Sequence[Tokens]) -> BatchShape:
    """Return the shape of a batch that is padded to its longest row, without a label."""
    lengths = [len(row["input_ids"]) for row in longest]
    return BatchShape(len(longest), max(lengths), labelled=0, padded=min(lengths) < max(lengths))


@dataclass(frozen=True)
class RowKind:
    """What the rows of a run are, and how they are read."""

    suffixes: tuple[str, ...]  # of the files that can be read
    holds: str  # what a file holds, for the refusal of one that is missing or empty
    check: Callable[[Found, str], Iterable[Row]]  # yields rows, or refuses one; the text names the file or dataset
    tokenize: Callable[[Sequence[Row], Tokenizer, RunConfig], Sequence[Tokens]]
    finish: Callable[[Splits], Splits] = lambda splits: splits  # done once all splits are read
    belongs_to: Callable[[Row], str] | None = None  # what is alike in rows that must come into one split: their picture
    shape: Callable[[Sequence[Tokens], Sequence[Tokens]], BatchShape] = shape_of_answers  # of the longest, and of all


def placed(row: Row, where: str) -> Row:
    """Return the row with where it stands; a file of the repository by its path from there."""
    return {**row, "where": where.removeprefix(f"{REPOSITORY}/")}


def place_of(row: Row) -> str:
    """Return where a row stands, with its id if it has one; "a row" if it was not read from anywhere."""
    return row.get("where", "a row") + (f" (id {begin_of(row['id'], 40)!r})" if "id" in row else "")


def places_of(rows: Iterable[Row]) -> str:
    """Return where rows stand, with at most five of each file: `rows.csv, row 3, 9, 12`."""
    numbers: dict[str, list[int]] = {}
    for row in rows:
        place, _, number = row["where"].rpartition(" ")
        numbers.setdefault(place, []).append(int(number))
    return "; ".join(f"{place} {shown(sorted(found))}" for place, found in islice(numbers.items(), 5))


def split_named(name: str) -> str:
    """Return the split that a word in a name stands for, as in `my-dev_2.csv`; empty = none."""
    words = set(re.split(r"[\W_\d]+", name.lower()))
    return next((split for split, its in SPLIT_WORDS.items() if words & set(its)), "")


def shown(names: Iterable[object]) -> str:
    """Return the first five names, for a sentence that complains about them."""
    first = list(map(str, islice(names, 6)))
    return ", ".join([*first[:5], "..."] if len(first) > 5 else first)


def listed(columns: Iterable[object]) -> str:
    """Return all columns, for a sentence that complains about them."""
    return ", ".join(map(str, columns)) or "none"


def texts_of(row: Row) -> list[str]:
    """Return the texts that a row holds; calls of tools are texts, too."""
    if "messages" in row:
        return [said_in(message) for message in [*row["messages"], *row.get("rejected", [])]]
    return [row[key] for key in ("text", "summary") if key in row]


def said_in(message: dict[str, Any]) -> str:
    """Return what a message says: its content, and each call of a tool as JSON on a line of its own."""
    if "tool_calls" not in message:
        return message["content"]
    calls = [call.get("function") or call for call in message["tool_calls"]]
    called = [{key: call[key] for key in ("name", "arguments")} for call in calls]
    said = [json.dumps(each, ensure_ascii=False, default=str) for each in called]  # Arrow has more types than JSON
    return "\n".join([message["content"], *said] if message["content"] else said)


def is_plain(rows: Sequence[Row]) -> bool:
    """Return whether rows, all of one file and converted by their format, are plain texts."""
    return bool(rows) and "messages" not in rows[0]


def opening_of(text: str) -> str:
    """Return how a text begins: what a model is given to continue in an evaluation."""
    middle = min(max(1, len(text) // 2), OPENING)  # of a single character all: nothing cannot be continued
    at_word = text.rfind(" ", 1, middle + 1)  # -1 where no spaces divide words, as in Chinese
    return text[: at_word if at_word > 0 else middle]


def question_of(row: Row) -> str:
    """Return the text of the last question, or how a plain text begins."""
    return opening_of(row["text"]) if is_plain([row]) else row["messages"][-2]["content"]


def answer_of(row: Row) -> str:
    """Return the last answer's text, with what it calls, or how a plain text goes on, as long as its opening."""
    if not is_plain([row]):
        return said_in(row["messages"][-1])
    length = len(opening_of(row["text"]))
    return row["text"][length : 2 * length].strip()


def tokens_in(row: Tokens) -> int:
    """Return how long a row is: of one with two answers, the prompt with the longer one."""
    return max(len(row["input_ids"]), len(row.get("rejected_ids", ())))


def first_tokens(row: Tokens, count: int) -> Tokens:
    """Return a row's first tokens, with their labels, and what is no list of tokens whole: say its picture."""
    return {name: values[:count] if isinstance(values, list) else values for name, values in row.items()}


def labels_in(row: Tokens) -> int:
    """Return how many predictions a row asks for: tokens, or with classification the one label."""
    if isinstance(row["labels"], int):
        return int(row["labels"] != IGNORED_LABEL)
    predicted = row["labels"][1:]
    return len(predicted) - predicted.count(IGNORED_LABEL)


def without_labels(row: Tokens) -> Tokens:
    """Return the row without labels: computed like any other, it adds nothing to a loss."""
    labels = row["labels"]
    ignored = IGNORED_LABEL if isinstance(labels, int) else [IGNORED_LABEL] * len(labels)
    return {**row, "labels": ignored, **({"row": NO_ROW} if "row" in row else {})}
