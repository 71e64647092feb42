"""Rows that may be more than memory holds: a list while they are few, else lines of JSON in a file on disk.

The file has no name: it goes with the process that reads it, however that ends.
"""

import json
import os
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any, overload

from tqdm import tqdm

from common.base.errors import BadInputError
from common.data.rows import texts_of
from common.runtime.world import is_main_process

IN_MEMORY = 256 * 2**20
"""Bytes of rows, about, that are held in memory."""
ROW_BYTES, TOKEN_BYTES = 1_000, 48
"""What a row's dictionaries and lists take, and a token: its number, and its place in three lists."""
BATCH_ROWS = 1_000
"""Rows that are read or turned into tokens at once."""


def stored(rows: Iterable[dict[str, Any]], title: str = "") -> Sequence[dict[str, Any]]:
    """Return all `rows` in their order, as a list, or on disk where they would take more than `IN_MEMORY`.

    `title`: of the progress that rank 0 shows once it takes more than two seconds; empty = none.
    """
    following = iter(_progress(rows, title, unit=" rows") if title else rows)
    held, taken = [], 0
    for row in following:
        held.append(row)
        taken += _bytes_of(row)
        if taken > IN_MEMORY:
            return _on_disk(chain(held, following))
    return held


def _bytes_of(row: dict[str, Any]) -> int:
    tools = len(str(row["tools"])) if "tools" in row else 0
    others = tools + len(row.get("picture", ""))
    return ROW_BYTES + TOKEN_BYTES * len(row.get("input_ids", ())) + sum(map(len, texts_of(row))) + others


def _on_disk(rows: Iterable[dict[str, Any]]) -> "RowsOnDisk":
    """Write rows into the cache of `datasets`, and return them from there.

    Raises:
        BadInputError: the cache cannot be written, say because its disk is full.
    """
    from datasets import config  # here: it takes two seconds to import

    cache, begins = Path(config.HF_DATASETS_CACHE), array("Q", [0])
    try:
        cache.mkdir(parents=True, exist_ok=True)
        file = tempfile.TemporaryFile(prefix="rows-", dir=cache)  # noqa: SIM115 (as long as its rows)
        for row in rows:
            begins.append(begins[-1] + file.write(json.dumps(row, default=str).encode()))
        file.flush()
    except OSError as error:
        raise BadInputError(
            f"The rows take more than memory is meant to hold, and cannot be written into the cache {cache} "
            f"({error}): make room there, or set HF_DATASETS_CACHE to a folder with more."
        ) from None
    return RowsOnDisk(file, begins, range(len(begins) - 1))


def _progress(items: Iterable[Any], title: str, **settings: object) -> Iterable[Any]:
    return tqdm(items, title, delay=2, mininterval=2, disable=not is_main_process(), file=sys.stdout, **settings)


class RowsOnDisk(Sequence[dict[str, Any]]):
    """Rows that are read from disk when they are asked for.

    Processes that are started by `spawn` cannot take them, as their file has no name; those that are forked can.
    """

    def __init__(self, file: IO[bytes], begins: Sequence[int], numbers: Sequence[int]) -> None:
        """`begins`: where each row of the file begins, and where the last one ends; `numbers`: of these rows there."""
        self._file, self._begins, self._numbers = file, begins, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> "RowsOnDisk": ...
    def __getitem__(self, place: int | slice) -> "dict[str, Any] | RowsOnDisk":
        if isinstance(place, slice):
            return RowsOnDisk(self._file, self._begins, self._numbers[place])
        begin, end = (self._begins[self._numbers[place] + more] for more in (0, 1))
        return json.loads(os.pread(self._file.fileno(), end - begin, begin))

    def taken(self, numbers: Sequence[int]) -> "RowsOnDisk":
        """Return the rows of these numbers, in this order."""
        return RowsOnDisk(self._file, self._begins, [self._numbers[number] for number in numbers])


def take(rows: Sequence[dict[str, Any]], numbers: Sequence[int]) -> Sequence[dict[str, Any]]:
    """Return the rows of these numbers, in this order: in memory if `rows` are, else on disk."""
    return rows.taken(numbers) if isinstance(rows, RowsOnDisk) else [rows[number] for number in numbers]


def batches_of(rows: Sequence[dict[str, Any]], title: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows in lists of `BATCH_ROWS`; rank 0 shows how far it is once that takes more than two seconds."""
    starts = range(0, len(rows), BATCH_ROWS)
    for start in _progress(starts, f"{title} {len(rows):,} rows", unit=f" x {BATCH_ROWS:,} rows"):
        yield list(rows[start : start + BATCH_ROWS])
