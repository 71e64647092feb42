"""Rows that may be more than memory holds: a list while they are few, else a file on disk that `datasets` maps."""

import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from common.base.errors import BadInputError
from common.data.rows import texts_of
from common.runtime.world import is_main_process

if TYPE_CHECKING:
    from datasets import Dataset

IN_MEMORY = 256 * 2**20  # bytes of rows, about
ROW_BYTES, TOKEN_BYTES = 1_000, 48  # of a row's dictionaries and lists, and of a token and its place in three lists
BATCH_ROWS = 1_000  # read or turned into tokens at once


def stored(rows: Iterable[dict[str, Any]], title: str = "") -> Sequence[dict[str, Any]]:
    """Return all `rows` as a list, or on disk where they would fill memory; `title`: of the progress that is shown."""
    following = iter(_progress(rows, title, unit=" rows") if title else rows)
    held, taken = [], 0
    for row in following:
        held.append(row)
        taken += _bytes_of(row)
        if taken > IN_MEMORY:
            return _on_disk(chain(held, following))
    return held


def _bytes_of(row: dict[str, Any]) -> int:
    others = len(str(row.get("tools", ""))) + len(row.get("picture", ""))
    return ROW_BYTES + TOKEN_BYTES * len(row.get("input_ids", ())) + sum(map(len, texts_of(row))) + others


def _on_disk(rows: Iterable[dict[str, Any]]) -> "RowsOnDisk":
    from datasets import Dataset, Features, Json, config  # here: it takes two seconds to import
    from datasets.arrow_writer import ArrowWriter

    cache, features = Path(config.HF_DATASETS_CACHE), Features({"row": Json()})  # rows of one file may have other keys
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # deleted once mapped, it goes with this process; open files cannot be removed on some network file systems
        with tempfile.TemporaryDirectory(prefix="rows-", dir=cache, ignore_cleanup_errors=True) as folder:
            with ArrowWriter(path=f"{folder}/rows.arrow", features=features) as writer:
                for row in rows:
                    writer.write(features.encode_example({"row": row}))
                writer.finalize()
            return RowsOnDisk(Dataset.from_file(f"{folder}/rows.arrow"))
    except OSError as error:
        raise BadInputError(
            f"The rows fill memory, and cannot be written into the cache {cache} ({error}): set HF_DATASETS_CACHE."
        ) from None


def _progress(items: Iterable[Any], title: str, **settings: object) -> Iterable[Any]:
    return tqdm(items, title, delay=2, mininterval=2, disable=not is_main_process(), file=sys.stdout, **settings)


class RowsOnDisk(Sequence[dict[str, Any]]):
    """Rows in one column `row`, read from disk when asked for; processes started by `spawn` cannot take them."""

    def __init__(self, mapped: "Dataset") -> None:
        self.mapped = mapped

    def __len__(self) -> int:
        return len(self.mapped)

    def __getitem__(self, place: int | slice) -> "dict[str, Any] | RowsOnDisk":
        return take(self, range(len(self))[place]) if isinstance(place, slice) else self.mapped[place]["row"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self), BATCH_ROWS):
            yield from self.mapped[start : start + BATCH_ROWS]["row"]


def take(rows: Sequence[dict[str, Any]], numbers: Sequence[int]) -> Sequence[dict[str, Any]]:
    """Return the rows of these numbers, in this order: in memory if `rows` are, else on disk."""
    return RowsOnDisk(rows.mapped.select(numbers)) if isinstance(rows, RowsOnDisk) else [rows[n] for n in numbers]


def batches_of(rows: Sequence[dict[str, Any]], title: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows in lists of `BATCH_ROWS`; rank 0 shows how far it is once that takes more than two seconds."""
    starts = range(0, len(rows), BATCH_ROWS)
    for start in _progress(starts, f"{title} {len(rows):,} rows", unit=f" x {BATCH_ROWS:,} rows"):
        yield list(rows[start : start + BATCH_ROWS])
