"""Rows of labelled texts: read from CSV, JSONL or a dataset of the Hub, checked by row, turned into tokens."""

import csv
import io
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache, partial
from urllib.parse import urlsplit

from transformers import PreTrainedTokenizerBase

from common.data import Row, RowKind, Splits, Tokens, load_splits, parse_lines, read_text
from common.run_config import BadInputError, RunConfig

SHOWN_ROWS = 5
"""Of the rows that a sentence complains about."""


def labelled_texts(run: RunConfig) -> RowKind:
    """Rows with the run's columns of texts and labels."""
    columns = (run.text_column, run.label_column)
    return RowKind(
        (".csv", ".jsonl", ".json"),
        partial(read_labelled, columns=columns),
        partial(check_labelled, columns=columns),
    )


def read_labelled(source: str, columns: tuple[str, str]) -> list[Row]:
    """The rows of one CSV or JSONL file: `text`, `label` and where each stands.

    Raises:
        BadInputError: the file is missing or empty, lacks a column, or has empty texts or labels.
    """
    content = read_text(source, f"with the columns {columns[0]!r} and {columns[1]!r}")
    if urlsplit(source).path.endswith(".csv"):
        found = _parse_csv(content, source)
    else:
        found = parse_lines(content.split("\n"), source)
    named = [(_columns_of(row, where, columns), where) for row, where in found]
    if not named:
        raise BadInputError(f"The data file {source} is empty: give it at least one row per label.")
    for place, what in enumerate(columns):
        empty = [where for values, where in named if not values[place].strip()]
        if empty:
            raise BadInputError(f"{what!r} is empty in {_rows(source, empty)}: fill or remove these rows.")
    return [{"text": text, "label": label} for (text, label), _ in named]


def _parse_csv(content: str, source: str) -> Iterator[tuple[dict[str, str], str]]:
    """What each row of a CSV file holds, and where it stands; the line with the columns is not counted.

    Raises:
        BadInputError: quotes are not closed, or a text with commas has none, so that rows are not what they seem.
    """
    rows, number = csv.DictReader(io.StringIO(content, newline=""), strict=True), 0
    try:
        for number, row in enumerate(rows, 1):
            where = f"{source}, row {number}"
            if None in row:
                columns = ", ".join(rows.fieldnames or ())
                raise BadInputError(
                    f"{where} has more fields than columns ({columns}): put texts with commas in quotes."
                )
            yield row, where
    except csv.Error as error:
        raise BadInputError(
            f"{source}, row {number + 1} is no CSV ({error}): mend its quotes, or pass the rows as .jsonl."
        ) from None


def check_labelled(row: object, where: str, columns: tuple[str, str]) -> Row:
    """A row of a dataset, as `text` and `label`.

    Raises:
        BadInputError: it lacks a column, or one is empty; names `where` it stands.
    """
    text, label = _columns_of(row, where, columns)
    for what, value in zip(columns, (text, label), strict=True):
        if not value.strip():
            raise BadInputError(f"{what!r} is empty in {where}: fill or remove it.")
    return {"text": text, "label": label}


def _columns_of(row: object, where: str, columns: tuple[str, str]) -> tuple[str, str]:
    if not isinstance(row, dict):
        raise BadInputError(f"{where} is {str(row)[:40]!r}, but should have the columns {', '.join(columns)}: mend it.")
    for option, column in zip(("text_column", "label_column"), columns, strict=True):
        if column not in row:
            there = ", ".join(map(str, row)) or "none"
            raise BadInputError(
                f"{where} has no column {column!r} (there are: {there}): mend it, or pass --{option} with another name."
            )
    text, label = (row[column] for column in columns)
    return "" if text is None else str(text), "" if label is None else str(label)


def _rows(source: str, where: list[str]) -> str:
    """`train.csv, row 3, row 17 and 4 more`."""
    shown = ", ".join(place.removeprefix(f"{source}, ") for place in where[:SHOWN_ROWS])
    more = len(where) - SHOWN_ROWS
    return f"{source}, {shown}" + (f" and {more} more" if more > 0 else "")


def with_classes(splits: Splits) -> Splits:
    """The rows with the number of their class: labels of the training rows, in alphabetical order.

    Raises:
        BadInputError: there is one class only, or a label that no training row has.
    """
    classes = {label: number for number, label in enumerate(label_names(splits))}
    if len(classes) < 2:
        raise BadInputError(
            f"All {len(splits.train)} training rows have the label {next(iter(classes))!r}: there must be two to "
            "choose from; look at --data and --label_column."
        )
    for name, rows in (("validation", splits.validation), ("test", splits.test)):
        unknown = [(number, row["label"]) for number, row in enumerate(rows, 1) if row["label"] not in classes]
        if unknown:
            numbers = ", ".join(str(number) for number, _ in unknown[:SHOWN_ROWS])
            labels = ", ".join(sorted({label for _, label in unknown})[:SHOWN_ROWS])
            raise BadInputError(
                f"{len(unknown)} of {len(rows)} {name} rows ({'rows' if len(unknown) > 1 else 'row'} {numbers}"
                f"{', ...' if len(unknown) > SHOWN_ROWS else ''}) have labels that no training row has ({labels}), but "
                f"training knows {', '.join(classes)}: mend them, or add such rows to train."
            )
    return splits.map(lambda rows: [{**row, "class": classes[row["label"]]} for row in rows])


def label_names(splits: Splits) -> list[str]:
    """The labels of the training rows, in the order of their numbers."""
    return sorted({row["label"] for row in splits.train})


@lru_cache(maxsize=1)
def label_names_of(run: RunConfig) -> tuple[str, ...]:
    """The labels that a run's model chooses from."""
    return tuple(label_names(load_splits(run)))


def class_shares(rows: list[Row]) -> dict[str, float]:
    """The share of the rows that have each label, the largest first."""
    return {label: count / len(rows) for label, count in Counter(row["label"] for row in rows).most_common()}


def say_balance(splits: Splits) -> str:
    """One line: how many rows, which labels, and how uneven they are."""
    shares = class_shares(splits.train)
    largest, smallest = max(shares.values()), min(shares.values())
    listed = ", ".join(f"{label} {share:.0%}" for label, share in shares.items())
    sizes = f"{len(splits.train):,} training, {len(splits.validation):,} validation and {len(splits.test):,} test rows"
    return f"{sizes}; {listed}: the largest class has {largest / smallest:.1f} times the rows of the smallest"


def tokenize_texts(rows: list[Row], tokenizer: PreTrainedTokenizerBase, run: RunConfig) -> list[Tokens]:
    """Every text as tokens, with the tokenizer's own special ones, and the number of its class as its label.

    Raises:
        BadInputError: texts are longer than `max_length`, and must not be cut.
    """
    tokenized = tokenizer([row["text"] for row in rows], truncation=True, max_length=run.max_length)["input_ids"]
    if run.long_texts == "refuse":
        long = _too_long(rows, tokenizer, run)
        if long:
            raise BadInputError(
                f"{len(long)} of {len(rows)} texts have more than {run.max_length} tokens (rows "
                f"{', '.join(map(str, long[:SHOWN_ROWS]))}{', ...' if len(long) > SHOWN_ROWS else ''} of their split): "
                "raise --max_length, or pass --long_texts cut."
            )
    return [
        {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": row["class"]}
        for row, ids in zip(rows, tokenized, strict=True)
    ]


def say_long_texts(rows: list[Row], tokenizer: PreTrainedTokenizerBase, run: RunConfig) -> str:
    """One line: how many training texts have more than `max_length` tokens."""
    long = len(_too_long(rows, tokenizer, run))
    if not long:
        return f"no training text has more than {run.max_length} tokens"
    return f"{long:,} of {len(rows):,} training texts have more than {run.max_length} tokens, and are cut"


def _too_long(rows: list[Row], tokenizer: PreTrainedTokenizerBase, run: RunConfig) -> list[int]:
    """The numbers of the rows, from 1, whose texts are longer than `max_length` tokens."""
    whole = tokenizer([row["text"] for row in rows], verbose=False)["input_ids"]
    return [number for number, ids in enumerate(whole, 1) if len(ids) > run.max_length]
