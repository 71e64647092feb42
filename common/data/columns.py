"""Rows with named columns: read from CSV, JSONL, JSON or a dataset of the Hub, checked by row; and texts too long."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from transformers import PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.row_checks import say_once
from common.data.rows import Row, RowKind, Tokens, parse_lines, read_text

SHOWN_ROWS = 5
"""Of the rows that a sentence complains about."""


@dataclass(frozen=True)
class Column:
    """A column of texts that every row must have, and fill."""

    key: str
    """What a row calls it here."""
    option: str
    """The setting that names it."""
    name: str
    """What the data call it."""


Columns = Sequence[Column]


def rows_of_columns(columns: Columns, advice: str, run: RunConfig, tokenize: Callable[..., list[Tokens]]) -> RowKind:
    """Rows of such columns, and how they become tokens; `advice` is what to do with an empty file."""
    may_be_empty = run.empty_rows == "skip"
    return RowKind(
        (".csv", ".jsonl", ".json"),
        partial(read_columns, columns=columns, advice=advice, may_be_empty=may_be_empty),
        partial(check_columns, columns=columns, may_be_empty=may_be_empty),
        tokenize,
    )


def read_columns(source: str, columns: Columns, advice: str, may_be_empty: bool = False) -> list[Row]:
    """The rows of one CSV, JSONL or JSON file (a list of objects), with the columns by their keys.

    Raises:
        BadInputError: the file is missing or empty, lacks a column, or has empty texts.
    """
    content = read_text(source, f"with the columns {' and '.join(repr(column.name) for column in columns)}")
    suffix = Path(urlsplit(source).path).suffix
    if suffix == ".csv":
        found = _parse_csv(content, source)
    elif suffix == ".json" or content.lstrip().startswith("["):
        found = _parse_json(content, source)
    else:
        found = parse_lines(content.split("\n"), source)
    named = [(_columns_of(row, where, columns), where) for row, where in found]
    if not named:
        raise BadInputError(f"The data file {source} is empty: {advice}.")
    for column in columns:
        empty = [where for row, where in named if not row[column.key].strip()]
        if empty and not may_be_empty:
            raise BadInputError(f"{column.name!r} is empty in {_rows(source, empty)}: fill or remove these rows.")
    return [row for row, _ in named]


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


def _parse_json(content: str, source: str) -> Iterator[tuple[object, str]]:
    """What each item of a JSON list holds, or each line where there is one object on each, and where it stands.

    Raises:
        BadInputError: it is neither.
    """
    try:
        found = json.loads(content)
    except json.JSONDecodeError as error:
        if not content.lstrip().startswith("["):
            yield from parse_lines(content.split("\n"), source)
            return
        raise BadInputError(
            f"{source} is no JSON ({error.msg}, line {error.lineno}): mend it, or pass one object per line as .jsonl."
        ) from None
    for number, item in enumerate(found if isinstance(found, list) else [found], 1):
        yield item, f"{source}, row {number}"


def check_columns(row: object, where: str, columns: Columns, may_be_empty: bool = False) -> Row:
    """A row of a dataset, with the columns by their keys.

    Raises:
        BadInputError: it lacks a column, or one is empty; names `where` it stands.
    """
    found = _columns_of(row, where, columns)
    for column in columns:
        if not found[column.key].strip() and not may_be_empty:
            raise BadInputError(f"{column.name!r} is empty in {where}: fill or remove it.")
    return found


def without_empty(rows: list[Row]) -> list[Row]:
    """The rows whose columns are all filled; how many are left out is said, once."""
    filled = [row for row in rows if all(value.strip() for value in row.values())]
    if len(filled) < len(rows):
        say_once(f"{len(rows) - len(filled):,} of {len(rows):,} rows have an empty column, and are left out")
    return filled


def _columns_of(row: object, where: str, columns: Columns) -> Row:
    if not isinstance(row, dict):
        names = ", ".join(column.name for column in columns)
        raise BadInputError(f"{where} is {str(row)[:40]!r}, but should have the columns {names}: mend it.")
    for column in columns:
        if column.name not in row:
            there = ", ".join(map(str, row)) or "none"
            raise BadInputError(
                f"{where} has no column {column.name!r} (there are: {there}): mend it, or pass --{column.option} with "
                "another name."
            )
        if isinstance(row[column.name], list | dict):
            raise BadInputError(
                f"{where} has {str(row[column.name])[:40]!r} as {column.name!r}, but should have a text: mend it."
            )
    values = {column.key: row[column.name] for column in columns}
    return {key: "" if value is None else str(value) for key, value in values.items()}


def _rows(source: str, where: list[str]) -> str:
    """`train.csv, row 3, row 17 and 4 more`."""
    shown = ", ".join(place.removeprefix(f"{source}, ") for place in where[:SHOWN_ROWS])
    more = len(where) - SHOWN_ROWS
    return f"{source}, {shown}" + (f" and {more} more" if more > 0 else "")


# -- texts that are too long


def check_long_texts(rows: list[Row], tokenizer: PreTrainedTokenizerBase, run: RunConfig) -> None:
    """Refuse texts of more than `max_length` tokens where they must not be cut.

    Raises:
        BadInputError: with how many there are, and the first ones.
    """
    if run.long_texts == "cut":
        return
    long = _too_long(rows, tokenizer, run)
    if long:
        raise BadInputError(
            f"{len(long)} of {len(rows)} texts have more than {run.max_length} tokens (rows "
            f"{', '.join(map(str, long[:SHOWN_ROWS]))}{', ...' if len(long) > SHOWN_ROWS else ''} of their split): "
            "raise --max_length, or pass --long_texts cut."
        )


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
