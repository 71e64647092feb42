"""A few answers before and after tuning, beside what was expected: numbers alone do not show what a model says."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

import pandas as pd

SAMPLES, COLUMNS = 3, 100


def samples(before: Path, after: Sequence[dict[str, object]], asked: str = "question") -> str:
    """Return the first questions with the answers of both models, each on a line; `asked` is what a question is called.

    `before`: the predictions' file of the base; `after`: the tuned model's scored answers, in the same order.
    """
    said_before = pd.read_csv(before, dtype=str, keep_default_na=False)["answer"]
    blocks = [
        {asked: row["question"], "expected": row["reference"], "before": earlier, "after": row["answer"]}
        for earlier, row in zip(said_before[:SAMPLES], after, strict=False)
    ]
    return "\n".join(f"{name:>8}: {_short(text)}" for block in blocks for name, text in block.items())


def _short(text: object) -> str:
    return shorten(str(text), COLUMNS, placeholder=" ...") or "(nothing)"
