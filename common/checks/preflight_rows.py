"""The rows that a preflight tries: the longest of the run's, or some of a length that is asked for."""

from dataclasses import dataclass, replace
from itertools import cycle, islice

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.specs import TASKS
from common.data.batches import longest_batch
from common.data.rows import Tokens
from common.data.splits import label_names_of, load_splits, tokens_of
from common.models.loading import (
    EMBEDDED_BASE,
    EMBEDDED_SUMMARIZER,
    any_shape_config,
    load_tokenizer,
    longest_readable,
)
from common.models.minilm import MINILM
from common.planning.job import BatchShape

# -- what is tried


@dataclass(frozen=True)
class Rows:
    """The longest batches of a run, each of one rank."""

    train: list[Tokens]
    validation: list[Tokens]
    count: int | None
    """Training rows of the whole run; None = not known."""
    source: str
    """Where the rows come from, in words."""


def longest_rows(rows: list[Tokens], count: int, task: str) -> list[Tokens]:
    """The `count` rows with the most tokens, longest first.

    With summarization the longest texts each have one of the longest summaries: no batch can be larger.
    """
    longest = sorted(rows, key=lambda row: -len(row["input_ids"]))[:count]
    if not TASKS[task].summarizes:
        return longest
    summaries = sorted((row["labels"] for row in rows), key=len, reverse=True)
    return [{**row, "labels": summary} for row, summary in zip(longest, summaries, strict=False)]


def rows_of_run(run: RunConfig) -> Rows:
    """The longest of the run's own rows, as the tokenizer for random weights cuts them.

    Raises:
        BadInputError: rows are missing or malformed, or have no answer within `max_length`.
    """
    splits, tokenizer = load_splits(run), load_tokenizer(run)
    tokenizer_is_own = run.model == MINILM or (REPOSITORY / run.model).resolve() in (EMBEDDED_BASE, EMBEDDED_SUMMARIZER)
    try:
        train, validation = (tokens_of(rows, tokenizer, run) for rows in (splits.train, splits.validation))
    except BadInputError as cut:
        if tokenizer_is_own:
            raise
        raise BadInputError(
            f"{str(cut).rstrip('.')}, or, as these are tokens of the embedded tokenizer and the model's own may make "
            f"fewer, pass --seq-len {run.max_length}."
        ) from None
    return Rows(
        longest_rows(train, run.per_device_train_batch_size, run.task),
        longest_rows(validation, run.per_device_eval_batch_size, run.task),
        len(train),
        f"the longest of {len(train):,}" + ("" if tokenizer_is_own else ", in tokens of the embedded tokenizer"),
    )


def rows_of_length(run: RunConfig, tokens: int) -> Rows:
    """Rows of exactly so many tokens, all of them learnt, for a run whose data are not here yet.

    Raises:
        BadInputError: a row of that length has nothing to predict.
    """
    if tokens < 2:
        raise BadInputError(f"--seq-len is {tokens}, but must be at least 2: the first token is not predicted.")
    tokenizer = load_tokenizer(run)
    # no special ones: padding's embedding is zero, and a norm of zeros makes gradients explode
    ordinary = sorted(set(range(tokenizer.vocab_size)) - set(tokenizer.all_special_ids))
    ids = list(islice(cycle(ordinary), tokens))
    labels: int | list[int] = ids
    if run.goal.classifies:
        labels = len(label_names_of(run)) - 1
    elif run.goal.summarizes:
        labels = list(islice(cycle(ordinary), run.max_target_length))
    row = {"input_ids": ids, "attention_mask": [1] * tokens, "labels": labels}
    count = run.train_rows if run.train_rows > 0 else None
    return Rows(
        [row] * run.per_device_train_batch_size,
        [row] * run.per_device_eval_batch_size,
        count,
        "by --seq-len, all of it learnt",
    )


def with_rows_at_hand(run: RunConfig) -> RunConfig:
    """The run on embedded rows, where its own are not needed: with classification they say which labels there are."""
    if run.goal.classifies:
        return run
    if run.goal.summarizes:
        return replace(run, data="assets/chat_summaries", text_column="dialogue", summary_column="summary")
    return replace(run, data=RunConfig().data)


def check_length(run: RunConfig, rows: Rows, option: str) -> None:
    """Refuse rows that are longer than the model reads.

    Raises:
        BadInputError: with both lengths; `option` is what the user can lower.
    """
    longest = max(len(row["input_ids"]) for row in (*rows.train, *rows.validation))
    readable = longest_readable(any_shape_config(run.model))
    if readable and longest > readable:
        raise BadInputError(
            f"The longest row has {longest} tokens, but {run.model} reads {readable}: pass {option} {readable}."
        )


def batch_of(run: RunConfig, rows: Rows) -> BatchShape:
    """The shape of the longest batch; the longest rows alone need not have every label."""
    batch = longest_batch(rows.train, run.per_device_train_batch_size)
    return replace(batch, classes=len(label_names_of(run))) if batch.classes else batch
