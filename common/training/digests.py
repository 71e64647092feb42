"""SHA-256 of a checkpoint's files without reading them from the disk again.

What PyTorch writes into an open file is hashed on its way (`hashing_stream`, and `HashingWriter` for shards). Libraries
that open their files themselves, as safetensors does, are told of when they are done (`begin_hashing`): a thread then
hashes the file, which the system still has in memory, and another has it written to the disk, while the next file is
being written. Small files are left to who lists the checkpoint.
"""

import io
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import file_digest, sha256
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem


class Digests:
    """Digests of the files that this rank has written into one checkpoint.

    Attributes:
        known: The digests of streams, by path.
    """

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(2, "checkpoint")  # one hashes while the other waits for the disk
        self.known: dict[Path, str] = {}
        self.hashing: dict[Path, Future[str]] = {}
        self.flushing: list[Future[None]] = []

    def begin(self, path: Path) -> None:
        """Hash and flush a file that is written whole, in the background."""
        self.hashing[path] = self.pool.submit(digest_of, path)
        self.flushing.append(self.pool.submit(flush_file, path))

    def collect(self, folder: Path) -> dict[str, str]:
        """Return all digests by the files' names in `folder`, when every file is hashed and flushed; called once."""
        with self.pool:
            for each in self.flushing:
                each.result()
            found = self.known | {path: each.result() for path, each in self.hashing.items()}
        return {path.relative_to(folder).as_posix(): digest for path, digest in found.items()}


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
    for path in paths if _current else ():
        _current.begin(path)


class _HashingStream(io.IOBase):
    """A file that is being written, and the digest of what was written so far."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.sha256 = file, sha256()

    def write(self, content: bytes | memoryview) -> int:
        self.sha256.update(content)
        return self.file.write(content)

    def tell(self) -> int:
        return self.file.tell()

    def fileno(self) -> int:
        return self.file.fileno()

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()


@contextmanager
def hashing_stream(path: Path, digests: Digests | None = None) -> Iterator[_HashingStream]:
    """Open a file to be written from its first byte to its last, and keep its digest: that of a checkpoint's file.

    `digests`: those of its checkpoint; without any, those of the one that is being written in this thread.
    """
    digests = digests or _current
    with path.open("wb") as file:
        stream = _HashingStream(file)
        yield stream
    if digests:
        digests.known[path] = stream.sha256.hexdigest()


class _HashingFiles(FileSystem):
    """DCP's files, each hashed on its way, also in a thread of DCP's own."""

    def __init__(self) -> None:
        self.digests = _current

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        assert mode == "wb", mode
        with hashing_stream(Path(path), self.digests) as stream:
            yield stream


class HashingWriter(FileSystemWriter):
    """DCP's writer of shards, whose files are hashed on their way."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the shards'."""
        super().__init__(folder)
        self.fs = _HashingFiles()


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
