"""Rows that fill memory are kept on disk, and are the same rows; what is refused is refused as before."""

import errno
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from datasets import Dataset

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data import rows as kept_rows
from common.data.rows import RowsOnDisk, stored, take
from common.data.splits import load_splits, read_splits, tokens_of
from common.models.loading import load_tokenizer
from tests.row_files import refusal_of, rows_in, write

ROWS = [
    {"id": str(number), "messages": [
        {"role": "user", "content": f"What is {number}?"},
        {"role": "assistant", "content": f"It is {number}.", **({"score": number} if number % 2 else {})},
    ]}
    for number in range(60)
]  # fmt: skip


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder, with memory for a few rows alone."""
    read_splits.cache_clear()
    monkeypatch.setattr(kept_rows, "IN_MEMORY", 5 * kept_rows.ROW_BYTES)
    monkeypatch.setattr(kept_rows, "BATCH_ROWS", 7)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def test_rows_on_disk_are_those_that_were_stored(on_disk: Path) -> None:
    rows = stored(iter(ROWS))
    assert isinstance(rows, RowsOnDisk)
    assert (len(rows), list(rows), list(rows[50:])) == (60, ROWS, ROWS[50:])
    assert [rows[7], rows[-1], *take(rows, [5, 3, 59])] == [ROWS[place] for place in (7, -1, 5, 3, 59)]
    assert not list(on_disk.iterdir()), "the file goes with the process"


def test_few_rows_stay_in_memory() -> None:
    assert stored(iter(ROWS)) == ROWS
    assert take(ROWS, [2, 1]) == [ROWS[2], ROWS[1]]


def test_a_refused_row_is_refused_on_the_way_to_the_disk(on_disk: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield from ROWS
        raise BadInputError("rows.jsonl, line 61")

    with pytest.raises(BadInputError, match="line 61"):
        stored(rows())


def test_splits_and_tokens_are_the_same_on_disk_and_in_memory(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run = RunConfig(data=write(tmp_path / "rows.jsonl", ROWS), train_rows=40)
    tokenizer = load_tokenizer(run)

    def read() -> list[list[dict[str, Any]]]:
        splits = load_splits(run)
        return list(map(list, (splits.train, rows_in(splits), tokens_of(splits.train, tokenizer, run))))

    in_memory = read()
    request.getfixturevalue("on_disk")
    assert isinstance(load_splits(run).train, RowsOnDisk)
    assert read() == in_memory


def test_shared_rows_are_left_out_on_disk(tmp_path: Path, on_disk: Path) -> None:
    write(tmp_path / "train.jsonl", [*ROWS, {**ROWS[3], "id": "again"}])
    write(tmp_path / "test.jsonl", [{**ROWS[3], "id": "asked"}])
    kept = load_splits(RunConfig(data=str(tmp_path), shared_rows="skip"))
    assert isinstance(kept.train, RowsOnDisk)
    assert "What is 3?" not in {row["messages"][0]["content"] for row in (*kept.train, *kept.validation)}


@pytest.mark.parametrize("task", ["classification", "summarization"])
def test_texts_with_labels_or_summaries_are_the_same_on_disk(
    task: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rows = [{"text": f"Text {number}", "label": "ab"[number % 2], "summary": f"Sum {number}"} for number in range(60)]
    run = RunConfig(task=task, technique="full", data=write(tmp_path / "rows.jsonl", rows))
    in_memory = load_splits(run)
    request.getfixturevalue("on_disk")
    on_disk = load_splits(run).train
    assert isinstance(on_disk, RowsOnDisk)
    assert list(on_disk) == list(in_memory.train)


def test_columns_that_are_not_used_need_not_be_fit_for_the_disk(tmp_path: Path, on_disk: Path) -> None:
    made = {"made": datetime(2024, 1, 1), "score": float("nan"), "raw": b"\0"}
    Dataset.from_list([{**row, **made} for row in ROWS]).to_parquet(tmp_path / "rows.parquet")
    train = load_splits(RunConfig(data=str(tmp_path / "rows.parquet"))).train
    assert isinstance(train, RowsOnDisk)
    assert set(train[0]) == {"id", "messages", "where"}


def test_tools_count_towards_memory(on_disk: Path) -> None:
    tools = [{"type": "function", "function": {"name": "a" * 5 * kept_rows.ROW_BYTES}}]
    assert isinstance(stored(iter([ROWS[0]])), list)
    assert isinstance(stored(iter([{**ROWS[0], "tools": tools}])), RowsOnDisk)


@pytest.mark.parametrize("full", ["folder", "file"])
def test_a_cache_that_cannot_be_written_is_named_and_not_the_data(
    full: str, tmp_path: Path, on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunConfig(data=write(tmp_path / "rows.jsonl", ROWS))
    if full == "folder":
        on_disk.write_text("no folder")
    else:
        no_room = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        monkeypatch.setattr(kept_rows.tempfile, "TemporaryFile", Mock(return_value=Mock(write=no_room)))
    refused = refusal_of(run)
    assert f"cannot be written into the cache {on_disk} " in refused
    assert "HF_DATASETS_CACHE" in refused
    assert run.data not in refused
