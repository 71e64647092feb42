"""Rows of labelled texts: which labels there are, how uneven they are, and the texts turned into tokens."""

from collections import Counter
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.columns import SHOWN_ROWS, Column, check_long_texts, rows_of_columns
from common.data.rows import Row, RowKind, Splits, Tokens


def row_kind(run: RunConfig) -> RowKind:
    """Rows with the run's columns of texts and labels, read as `text` and `label`."""
    columns = (Column("text", "text_column", run.text_column), Column("label", "label_column", run.label_column))
    kind = rows_of_columns(columns, "give it at least one row per label", run, tokenize_texts)
    return replace(kind, finish=with_classes)


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
    check_long_texts(rows, tokenizer, run)
    tokenized = tokenizer([row["text"] for row in rows], truncation=True, max_length=run.max_length)["input_ids"]
    return [
        {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": row["class"]}
        for row, ids in zip(rows, tokenized, strict=True)
    ]
