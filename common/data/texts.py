"""Rows of texts, each with a label or a summary: read from CSV, JSONL, JSON or the Hub, and turned into tokens."""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from common.base.errors import BadInputError, begin_of
from common.base.run_config import RunConfig
from common.data.control_tokens import AS_TEXT
from common.data.files import TABLES
from common.data.formats import columns_of
from common.data.row_checks import say_once
from common.data.rows import Found, Row, RowKind, Splits, Tokens, listed, padded_shape, placed, places_of, shown
from common.data.stored_rows import batches_of, stored, take
from common.planning.job import BatchShape

LIMITS = {"text": "max_length", "summary": "max_target_length"}  # settings of tokens that are read or learnt
MOST_LABELS, MOST_LABELS_SAID = 100, 20  # of the commonest, in a record and in a line


def labelled_rows(run: RunConfig) -> RowKind:
    """Return what rows of texts and labels are, with the run's columns as `text` and `label`."""
    return _row_kind(run, ("text", "label"), finish=with_classes, shape=shape_of_labels)


def summary_rows(run: RunConfig) -> RowKind:
    """Return what rows of texts and summaries are, with the run's columns as `text` and `summary`."""
    return _row_kind(run, ("text", "summary"), shape=shape_of_summaries)


def _row_kind(run: RunConfig, keys: tuple[str, ...], **more: Any) -> RowKind:
    columns = {key: getattr(run, f"{key}_column") for key in keys}
    return RowKind(
        suffixes=TABLES,
        holds=f"with the columns {' and '.join(map(repr, columns.values()))}",
        check=partial(check_columns, columns=columns, may_be_empty=run.empty_rows == "skip"),
        tokenize=tokenize_texts,
        **more,
    )


def shape_of_labels(longest: Sequence[Tokens], rows: Sequence[Tokens]) -> BatchShape:
    """Return the shape of a batch of texts with one label each."""
    return replace(padded_shape(longest), labelled=1, classes=max(row["labels"] for row in rows) + 1)


def shape_of_summaries(longest: Sequence[Tokens], rows: Sequence[Tokens]) -> BatchShape:
    """Return the shape of a batch of texts with summaries, of which the longest may be anywhere."""
    summary = max(len(row["labels"]) for row in rows)
    return replace(padded_shape(longest), labelled=summary, target_length=summary)


def check_columns(found: Found, source: str, columns: dict[str, str], may_be_empty: bool) -> Iterator[Row]:
    """Yield the rows with their `columns` by key, and refuse those with an empty one, or say how many are left out."""
    empty: dict[str, list[str]] = {key: [] for key in columns}
    count = left_out = 0
    for row, where in found:
        by_key = _columns_of(row, where, columns)
        lacking = [key for key, value in by_key.items() if not value.strip()]
        for key in lacking:
            empty[key].append(where.removeprefix(f"{source}, "))
        count, left_out = count + 1, left_out + bool(lacking)
        if not lacking:
            yield placed(by_key, where)
    for key, name in columns.items():
        if empty[key] and not may_be_empty:
            raise BadInputError(f"{name!r} is empty in {source}, {shown(empty[key])}: fill or remove these rows.")
    if left_out:
        say_once(f"{left_out:,} of {count:,} rows have an empty column, and are left out")


def _columns_of(row: object, where: str, columns: dict[str, str]) -> Row:
    row = columns_of(row, where, f"the columns {', '.join(columns.values())}")
    for key, name in columns.items():
        if name not in row:
            raise BadInputError(
                f"{where} has no column {name!r} (there are: {listed(row)}): correct it, or pass --{key}_column with "
                "another name."
            )
        if isinstance(row[name], list | dict):
            found = begin_of(row[name], 40)
            raise BadInputError(f"{where} has {found!r} as {name!r}, but should have a text: correct it.")
    return {key: "" if row[name] is None else str(row[name]) for key, name in columns.items()}


def with_classes(splits: Splits) -> Splits:
    """Return the rows with the number of their class: labels of the training rows, in their natural order."""
    classes = {label: number for number, label in enumerate(label_names(splits))}
    if len(classes) < 2:
        raise BadInputError(
            f"All {len(splits.train)} training rows have the label {next(iter(classes))!r}: there must be two to "
            "choose from; look at --data and --label_column."
        )
    if near := near_labels(classes):
        say_once(f"WARNING: labels that differ in their form alone are classes of their own: {near}")
    for name, rows in (("validation", splits.validation), ("test", splits.test)):
        if unknown := [row for row in rows if row["label"] not in classes]:
            labels = sorted({row["label"] for row in unknown})
            near = near_labels([*classes, *labels])
            raise BadInputError(
                f"{len(unknown)} of {len(rows)} {name} rows ({places_of(unknown)}) have labels that no training row "
                f"has ({shown(labels)}), but training knows {shown(classes)}: correct them, or add such rows to train"
                f"{f' (some differ in their form alone: {near})' if near else ''}."
            )
    return splits.map(lambda rows: stored({**row, "class": classes[row["label"]]} for row in rows))


def label_names(splits: Splits) -> list[str]:
    """Return the training rows' labels in the order of their numbers: by size, or by letters and numbers in them."""
    labels = sorted({row["label"] for row in splits.train})
    try:
        sizes = {label: float(label) for label in labels}
    except ValueError:
        return sorted(labels, key=_words_and_numbers)
    return sorted(labels, key=sizes.__getitem__) if all(map(math.isfinite, sizes.values())) else labels


def _words_and_numbers(label: str) -> list[str | tuple[int, str]]:
    """Return the parts of a label; numbers by length, then digits, as `int` reads no thousands of them."""
    parts = [part.lstrip("0") if part.isdecimal() else part for part in re.split(r"(\d+)", label)]
    return [(len(part), part) if place % 2 else part for place, part in enumerate(parts)]


def near_labels(labels: Iterable[str]) -> str:
    """Return which labels differ only in case, spaces, or the form of characters or numbers; empty where none do."""
    groups: dict[str, list[str]] = {}
    for label in labels:
        groups.setdefault(_folded(label), []).append(label)
    return shown(" and ".join(map(repr, group)) for group in groups.values() if len(group) > 1)


def _folded(label: str) -> str:
    text = " ".join(unicodedata.normalize("NFKC", label).casefold().split())
    try:
        return str(float(text))
    except ValueError:
        return text


def say_balance(splits: Splits) -> str:
    """Return one line that says how many rows there are, with which labels, and how uneven these are."""
    counts = Counter(row["label"] for row in splits.train).most_common()
    largest, smallest = counts[0][1], counts[-1][1]
    said = [f"{begin_of(label, 40)} {count / len(splits.train):.0%}" for label, count in counts[:MOST_LABELS_SAID]]
    listed = ", ".join(said + [f"and {len(counts) - len(said):,} labels more"] * (len(said) < len(counts)))
    sizes = f"{len(splits.train):,} training, {len(splits.validation):,} validation and {len(splits.test):,} test rows"
    return f"{sizes}; {listed}: the largest class has {largest / smallest:.1f} times the rows of the smallest"


def tokenize_texts(rows: Sequence[Row], tokenizer: Tokenizer, run: RunConfig) -> Sequence[Tokens]:
    """Return every text as tokens with special ones, and its class or summary; a cut summary has no end token."""
    for key, setting in LIMITS.items() if run.long_texts == "refuse" else ():
        if long := _too_long(rows, key, tokenizer, run):
            what = "texts" if key == "text" else "summaries"
            raise BadInputError(
                f"{len(long)} of {len(rows)} {what} have more than {getattr(run, setting)} tokens "
                f"({places_of(take(rows, long))}): raise --{setting}, or pass --long_texts cut."
            )

    def encoded() -> Iterator[Tokens]:
        limit = {"truncation": True, "max_length": run.max_length}
        for batch in batches_of(rows, "tokenizing"):
            texts = tokenizer([row["text"] for row in batch], **limit, **AS_TEXT)["input_ids"]
            if "summary" in batch[0]:
                summaries = tokenizer(text_target=[row["summary"] for row in batch], **AS_TEXT)["input_ids"]
                labels = [ids[: run.max_target_length] for ids in summaries]
            else:
                labels = [row["class"] for row in batch]
            for text, label in zip(texts, labels, strict=True):
                yield {"input_ids": text, "attention_mask": [1] * len(text), "labels": label}

    return stored(encoded())


def say_long_texts(rows: Sequence[Row], tokenizer: Tokenizer, run: RunConfig) -> str:
    """Return one line that says how many training texts, and summaries, have more tokens than are read or learnt."""
    long, cut = (len(_too_long(rows, key, tokenizer, run)) for key in LIMITS)
    texts = f"{long:,} of {len(rows):,} training texts have" if long else "no training text has"
    said = f"{texts} more than {run.max_length} tokens{', and are cut' if long else ''}"
    limit = f"more than max_target_length, {run.max_target_length}, tokens and are learnt without their end"
    return f"{said}; {cut:,} of {len(rows):,} summaries have {limit}" if cut else said


def _too_long(rows: Sequence[Row], key: str, tokenizer: Tokenizer, run: RunConfig) -> list[int]:
    """Return the numbers of the rows whose `key`, if they have it, has more tokens than its limit."""
    argument, limit = "text" if key == "text" else "text_target", getattr(run, LIMITS[key])
    lengths: list[int] = []
    for batch in batches_of(rows, "measuring") if rows and key in rows[0] else ():
        lengths += map(len, tokenizer(**{argument: [row[key] for row in batch]}, **AS_TEXT)["input_ids"])
    return [number for number, length in enumerate(lengths) if length > limit]
