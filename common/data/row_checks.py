"""Rows across splits: doubles, and test rows that would be learnt, are found before a model loads; sums of them."""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256

from common.base.errors import BadInputError
from common.base.inert import printable
from common.base.paths import is_embedded
from common.base.run_config import RunConfig
from common.base.secrets import without_secrets
from common.data.rows import Row, Splits, Tokens, places_of, texts_of, tokens_in
from common.data.stored_rows import take

ENOUGH_STEPS = 100  # below, a new user's rows have probably not been learnt yet


def check_rows_apart(splits: Splits, run: RunConfig) -> Splits:
    """Return the rows without training rows that are test rows, if asked for; else refuse these, or warn of them."""
    kept = {digest(row) for row in splits.test}
    shared = {number for number, row in enumerate(splits.train) if digest(row) in kept}
    if not shared:
        return splits
    share, places = f"{len(shared):,} of {len(splits.train):,}", places_of(take(splits.train, sorted(shared)))
    found = f"{share} training rows are also test rows, if case and spacing are ignored ({places})"
    if run.shared_rows == "skip":
        say_once(f"{found}: they are left out")
        others = [number for number in range(len(splits.train)) if number not in shared]
        return replace(splits, train=take(splits.train, others))
    # public datasets of texts with labels or summaries have some twice
    if run.shared_rows == "refuse" or (run.goal.converses and not splits.held_out):
        raise BadInputError(f"{found}: remove them from one of the two, or pass --shared_rows skip.")
    say_once(f"WARNING: {found}: the test looks better than it is; --shared_rows skip leaves them out of training")
    return splits


def check_ids(rows: Sequence[Row]) -> None:
    """Refuse ids that stand twice, in a split or in the file that splits are taken from."""
    first: dict[str, int] = {}
    for number, row in enumerate(rows):
        if "id" in row and first.setdefault(str(row["id"]), number) != number:
            twice = places_of([rows[first[str(row["id"])]], row])
            raise BadInputError(f"The id {row['id']!r} stands twice ({twice}): remove one, or give each its own.")


def digest(row: Row) -> bytes:
    """Return a digest of a row's texts, its label and its picture, whatever the texts' case and spacing."""
    texts = [*texts_of(row), str(row.get("label", "")), row.get("picture_digest", "")]
    return sha256("\0".join(re.sub(r"\s+", " ", text).strip().casefold() for text in texts).encode()).digest()


@cache
def say_once(line: str) -> None:
    """Print a line once, however often the data are read, by one rank of a machine; an empty one not at all."""
    if line and os.environ.get("LOCAL_RANK", "0") == "0":
        print(printable(without_secrets(line)))


def summary_of(train: Sequence[Tokens], validation: Sequence[Tokens], run: RunConfig) -> dict[str, int]:
    """Return what was read to train on and to choose by: rows, tokens, the longest row, and those at the limit."""
    lengths = list(map(tokens_in, train))
    return {
        "training_rows": len(train),
        "training_tokens": sum(lengths),
        "longest_tokens": max(lengths),
        "rows_at_max_length": sum(length >= run.max_length for length in lengths),
        "validation_rows": len(validation),
    }


def say_summary(read: dict[str, int], run: RunConfig) -> str:
    """Return one line of what `summary_of` counted."""
    full = read["rows_at_max_length"]
    limit = f"{full:,} fill max_length, {run.max_length}, and may be cut" if full else f"none fills {run.max_length}"
    return (
        f"data: {read['training_rows']:,} training rows of {read['training_tokens']:,} tokens, the longest has "
        f"{read['longest_tokens']:,}, {limit}; {read['validation_rows']:,} validation rows"
    )


def say_few_steps(read: dict[str, int], run: RunConfig) -> str:
    """Return one line that says how to take more steps, for a run whose last was its best and that took few."""
    steps = run.total_steps(read["training_rows"])
    if run.max_steps > 0 or steps >= ENOUGH_STEPS or is_embedded(run.data):
        return ""
    epochs = -(-ENOUGH_STEPS * run.num_train_epochs // steps)
    fell = f"validation was best after the last of {steps} steps, so more may help"
    return f"{fell}: --num_train_epochs {epochs} makes about {ENOUGH_STEPS}"
