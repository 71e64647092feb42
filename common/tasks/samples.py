"""A few answers before and after tuning, beside what was expected: numbers alone do not show what a model says."""

from functools import partial
from pathlib import Path
from textwrap import shorten

import pandas as pd

from common.base.inert import csv_text, printable

# by the column of a predictions file with what was expected: the columns with what the model read and wrote
PREDICTED = {
    "reference": ("question", "answer"),
    "chosen": ("question", "answer"),
    "summary": ("text", "written"),
    "label": ("text", "found"),
    "reward": ("question", "answer"),  # of the answer after tuning: none was expected
}
SAMPLES, CHARACTERS = 3, 100


def before_and_after(folder: Path, rows: int = 5) -> pd.DataFrame:
    """Return a run's first predictions: question (or text), `expected` or `reward`, `before` if any, and `after`."""
    tables = {when: table.head(rows) for when, table in predictions(folder).items()}
    after = tables["after"]
    expected = next(name for name in PREDICTED if name in after)
    asked, predicted = PREDICTED[expected]
    said = {when: table[predicted] for when, table in tables.items()}
    title = "reward" if expected == "reward" else "expected"
    return pd.DataFrame({asked: after[asked], title: after[expected], **said})


def samples(folder: Path, asked: str = "question") -> str:
    """Return the first rows of `before_and_after`, shortened, each column on a line; the first is called `asked`."""
    table = before_and_after(folder, SAMPLES)
    names = [asked, *table.columns[1:]]
    lines = zip(names * len(table), table.to_numpy().flatten(), strict=True)
    short = partial(shorten, width=CHARACTERS, placeholder=" ...")
    return "\n".join(f"{name:>8}: {short(printable(text)) or '(nothing)'}" for name, text in lines)


def predictions(folder: Path) -> dict[str, pd.DataFrame]:
    """Return what a run predicted, as text: `before` training, which a run without a baseline has not, and `after`."""
    files = {when: folder / f"predictions_{when}.csv" for when in ("before", "after")}
    return {
        when: pd.read_csv(file, dtype=str, keep_default_na=False).map(csv_text)
        for when, file in files.items()
        if when == "after" or file.exists()
    }
