"""Files of rows as people have them: written for a test, and what a run reads of them or says against them."""

import csv
import gzip
import io
import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import pytest
from datasets import Dataset, DatasetDict

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.files import checked, splits_of_file
from common.data.rows import Row, Splits
from common.data.splits import load_splits, row_kind


def write(path: Path | str, content: Sequence[Any] | str | bytes) -> str:
    """Write rows as the file's name says, or its whole content; return the path, which may be a URL."""
    name = str(path).removesuffix(".gz")
    if name.endswith(".parquet") and not isinstance(content, bytes):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            Dataset.from_list(content).to_parquet(file)
        return str(path)
    text = content if isinstance(content, str | bytes) else text_of(content, name.rpartition(".")[2])
    content = text if isinstance(text, bytes) else text.encode()
    if isinstance(path, Path) and path.suffix not in (".bz2", ".xz"):  # whatever is in its name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        return str(path)
    with fsspec.open(path, "wb", compression="infer", auto_mkdir=True) as file:
        file.write(content)
    return str(path)


def text_of(rows: Sequence[Any], kind: str, delimiter: str = ",") -> str:
    """Return rows as the text of a file: JSON, JSONL, or a table."""
    if kind == "json":
        return json.dumps(rows, ensure_ascii=False)
    if kind == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    table = io.StringIO(newline="")
    csv.writer(table, delimiter=delimiter).writerows([rows[0], *(row.values() for row in rows)])
    return table.getvalue()


def rows_of_file(path: str, run: RunConfig) -> Sequence[Row]:
    """Return the rows of a file, checked, without dividing them into splits."""
    kind = row_kind(run)
    return checked(chain.from_iterable(splits_of_file(path).values()), path, kind)


def put_on_hub(monkeypatch: pytest.MonkeyPatch, **splits: Dataset | list[Row]) -> None:
    """Let every dataset of the Hub have these splits."""
    found = {name: Dataset.from_list(rows) if isinstance(rows, list) else rows for name, rows in splits.items()}
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: DatasetDict(found))


def rows_in(splits: Splits) -> list[Row]:
    return [*splits.train, *splits.validation, *splits.test]


def sizes(splits: Splits) -> tuple[int, ...]:
    return len(splits.train), len(splits.validation), len(splits.test)


def refusal_of(run: RunConfig) -> str:
    """Return the sentence that refuses a run's rows."""
    with pytest.raises(BadInputError) as refused:
        load_splits(run)
    return str(refused.value)
