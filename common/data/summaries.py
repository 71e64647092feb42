"""Rows of texts and summaries, such as SAMSum's: which columns they have, and how they are turned into tokens."""

from transformers import PreTrainedTokenizerBase

from common.base.run_config import RunConfig
from common.data.columns import Column, check_long_texts, rows_of_columns
from common.data.rows import Row, RowKind, Tokens


def row_kind(run: RunConfig) -> RowKind:
    """Rows with the run's columns of texts and summaries, read as `text` and `summary`."""
    columns = (
        Column("text", "text_column", run.text_column),
        Column("summary", "summary_column", run.summary_column),
    )
    return rows_of_columns(columns, "give it at least one text with its summary", run, tokenize_summaries)


def tokenize_summaries(rows: list[Row], tokenizer: PreTrainedTokenizerBase, run: RunConfig) -> list[Tokens]:
    """Every text as tokens, with the tokens of its summary as labels; both end with the tokenizer's end token.

    Raises:
        BadInputError: texts are longer than `max_length`, and must not be cut.
    """
    check_long_texts(rows, tokenizer, run)
    texts = tokenizer([row["text"] for row in rows], truncation=True, max_length=run.max_length)["input_ids"]
    summaries = tokenizer(
        text_target=[row["summary"] for row in rows], truncation=True, max_length=run.max_target_length
    )["input_ids"]
    return [
        {"input_ids": text, "attention_mask": [1] * len(text), "labels": summary}
        for text, summary in zip(texts, summaries, strict=True)
    ]
