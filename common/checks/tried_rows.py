"""The rows that are tried before a run: the longest of its own, or rows of a length that is asked for."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from PIL import Image
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.base.paths import is_embedded
from common.base.run_config import RunConfig
from common.base.specs import TASKS
from common.data.batches import longest_batch
from common.data.pictures import picture_ids, reference_to
from common.data.rows import IGNORED_LABEL, Tokens, first_tokens, tokens_in
from common.data.splits import label_names_of, load_splits, tokens_of
from common.models.loading import any_shape_config, load_tokenizer, longest_readable
from common.models.real_models import MINILM
from common.planning.job import BatchShape, with_tiles


@dataclass(frozen=True)
class Rows:
    """The longest training and validation batch of one rank."""

    train: Sequence[Tokens]
    validation: Sequence[Tokens]
    count: int | None  # of the run's training rows, where it is known
    source: str  # of the rows, in words
    tiles: int = 0  # that a row's picture is cut into, at most; 0 = rows have no pictures


def batch_of_run(run: RunConfig) -> tuple[BatchShape, str]:
    """Return the largest batch of the run's own rows (without its tokenizer: of `max_length`), and its source."""
    rows = load_splits(run).train
    try:
        tokenizer = load_tokenizer(run)
    except BadInputError:
        source = f"rows of max_length {run.max_length}, as the model's tokenizer is not here"
        return batch_of_length(run, run.max_length), source
    tokens = tokens_of(rows, tokenizer, run)
    batch = longest_batch(tokens, run.per_device_train_batch_size, run)
    source = f"the longest {batch.rows} of the run's {len(rows):,} rows"
    return replace(batch, tiles=most_tiles(tokens, tokenizer, run)), source


def rows_of_run(run: RunConfig) -> Rows:
    """Return the longest of the run's own rows, as the tokenizer for random weights cuts them."""
    splits, tokenizer = load_splits(run), load_tokenizer(run)
    tokenizer_is_own = run.model == MINILM or is_embedded(run.model)
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
        longest_rows(train, run.rows_drawn, run.task),
        longest_rows(validation, run.rows_evaluated_at_once, run.task),
        len(train),
        f"the longest of {len(train):,}" + ("" if tokenizer_is_own else ", in tokens of the embedded tokenizer"),
        most_tiles(train, tokenizer, run),
    )


def most_tiles(rows: Sequence[Tokens], tokenizer: PreTrainedTokenizerBase, run: RunConfig) -> int:
    """Return how many squares the picture of a row has at most; 0 = the run's rows have none."""
    if not run.goal.sees:
        return 0
    processor = tokenizer.processor
    return max(row["input_ids"].count(processor.image_token_id) for row in rows) // processor.image_seq_len


def longest_rows(rows: Sequence[Tokens], count: int, task: str) -> list[Tokens]:
    """Return the `count` rows with the most tokens, longest first; summaries are the longest, too, whoever's."""
    longest = heapq.nlargest(count, rows, key=tokens_in)
    if not TASKS[task].summarizes:
        return longest
    summaries = heapq.nlargest(count, (row["labels"] for row in rows), key=len)
    return [{**row, "labels": summary} for row, summary in zip(longest, summaries, strict=False)]


def batch_of_length(run: RunConfig, tokens: int) -> BatchShape:
    """Return the shape of a batch of rows of exactly `tokens` tokens, without a tokenizer.

    All of a row is learnt: one label, a summary of `max_target_length`, or every token.
    """
    if tokens < 2:
        raise BadInputError(f"--seq-len is {tokens}, but must be at least 2: the first token is not predicted.")
    readable = longest_readable(any_shape_config(run.model, run.model_revision))
    if readable and tokens > readable:
        raise BadInputError(f"--seq-len is {tokens}, but {run.model} reads {readable}: pass --seq-len {readable}.")
    classes = len(label_names_of(run)) if run.goal.classifies else 0
    summary = run.max_target_length if run.goal.summarizes else 0
    answer = run.max_new_tokens if run.goal.rewards else 0
    if tokens <= answer:
        raise BadInputError(f"--seq-len is {tokens}, but an answer may take {answer}: pass {answer + 1} or more.")
    labelled = 1 if classes else summary or answer or tokens - 1
    return with_tiles(run, BatchShape(
        run.per_device_train_batch_size, tokens, labelled, classes=classes, target_length=summary, task=run.task
    ))  # fmt: skip


def rows_of_length(run: RunConfig, tokens: int) -> Rows:
    """Return rows as `batch_of_length` describes, for a run whose data are not here yet."""
    batch, tokenizer = batch_of_length(run, tokens), load_tokenizer(run)
    # no special ones: padding's embedding is zero, and a norm of zeros makes gradients explode
    ordinary = sorted(set(range(tokenizer.vocab_size)) - set(tokenizer.all_special_ids))
    ids = list(islice(cycle(ordinary), tokens))
    labels: int | list[int] = ids
    if batch.classes:
        labels = batch.classes - 1
    elif batch.target_length:
        labels = list(islice(cycle(ordinary), batch.target_length))
    row = {"input_ids": ids, "attention_mask": [1] * tokens, "labels": labels}
    if run.goal.rewards:  # the prompt alone, with the columns of a real one
        prompt = first_tokens(row, tokens - run.max_new_tokens)
        row = {**prompt, "asked": load_splits(run).train[0]}
    if run.goal.compares:  # both answers are learnt whole, but for a first token, which is their prompt
        rejected = [*ids[:1], *islice(cycle(ordinary), 2, tokens + 1)]
        row |= {"labels": [IGNORED_LABEL, *ids[1:]], "rejected_ids": rejected}
    if run.goal.sees:
        row = with_square_picture(row, tokenizer, any_shape_config(run.model, run.model_revision))
    return Rows(
        [row] * run.rows_drawn,
        [row] * run.rows_evaluated_at_once,
        run.train_rows if run.train_rows > 0 else None,
        "by --seq-len, all of it learnt" + " but a picture's tokens" * run.goal.sees,
        most_tiles([row], tokenizer, run),
    )


def with_square_picture(row: Tokens, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> Tokens:
    """Return the row with a white square, as large as the model's, whose tokens take the place of its first ones."""
    side = config.vision_config.image_size
    picture = reference_to(Image.new("RGB", (side, side), "white"), None, "a white square")
    seen, tokens = picture_ids({"picture": picture}, tokenizer), len(row["input_ids"])
    if len(seen) >= tokens:
        raise BadInputError(
            f"--seq-len is {tokens}, but a picture takes {len(seen)} tokens: pass --seq-len {len(seen) + 64}."
        )
    learnt = [IGNORED_LABEL] * len(seen) + row["labels"][len(seen) :]
    return {**row, "input_ids": [*seen, *row["input_ids"][len(seen) :]], "labels": learnt, "picture": picture}


def batch_of(run: RunConfig, rows: Rows) -> BatchShape:
    """Return the shape of the longest batch; the longest rows alone need not have every label."""
    batch = replace(longest_batch(rows.train, run.per_device_train_batch_size, run), tiles=rows.tiles)
    return replace(batch, classes=len(label_names_of(run))) if batch.classes else batch
