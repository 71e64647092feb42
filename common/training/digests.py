"""SHA-256 of a checkpoint's files without reading them from the disk again.

Who has written a file tells of it (`begin_hashing`): a thread then hashes it, while the system still has it in memory,
and another has it written to the disk; meanwhile the next file is being written. To hash in the file object that
PyTorch writes to takes longer: it then writes through Python, and nothing is done at the same time. Small files are
left to who lists the checkpoint.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import file_digest
from pathlib import Path
from typing import Any

THREADS = 3  # one hashes, one waits for the disk, one writes while training goes on


class Digests:
    """Digests of the files that this rank has written into one checkpoint."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(THREADS, "checkpoint")
        self.hashing: dict[Path, Future[str]] = {}
        self.flushing: list[Future[None]] = []

    def begin(self, paths: Iterable[Path]) -> None:
        """Hash and flush files that are written whole, in the background."""
        for path in paths:
            self.hashing[path] = self.pool.submit(digest_of, path)
            self.flushing.append(self.pool.submit(flush_file, path))

    def are_done(self) -> bool:
        """Return whether what was begun is done."""
        return all(each.done() for each in (*self.hashing.values(), *self.flushing))

    def collect(self, folder: Path) -> dict[str, str]:
        """Return all digests by the files' names in `folder`, when every file is hashed and flushed; called once."""
        with self.pool:
            for each in self.flushing:
                each.result()
            return {path.relative_to(folder).as_posix(): each.result() for path, each in self.hashing.items()}


_current: Digests | None = None  # of the checkpoint that this process is writing; a model is saved outside of any, too


@contextmanager
def collecting_digests(digests: Digests) -> Iterator[None]:
    """Collect in `digests` those of what this process writes in this context, as parts of one checkpoint."""
    global _current
    _current = digests
    try:
        yield
    finally:
        _current = None


def begin_hashing(paths: Iterable[Path]) -> None:
    """Tell of files of a checkpoint that this rank has written whole, and nobody will write to again."""
    if _current:
        _current.begin(paths)


def begin_writing(write: Callable[[], Any], paths: Iterable[Path]) -> Future[None]:
    """Call `write` in the background, then hash `paths`: a generator looks for them when it has returned.

    Returns:
        What is done when all is written and being hashed.
    """
    digests = _current
    assert digests, "only a checkpoint is written in the background"

    def write_and_hash() -> None:
        write()
        digests.begin(paths)

    return digests.pool.submit(write_and_hash)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def flush_file(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the disk now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
