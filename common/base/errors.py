"""Errors: a user's mistake, what stops a run, and how an error of a library is classified and said in one line."""

import errno
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NCCL_LOST_RANK = ("ncclRemoteError", "ncclSystemError", "timeout", "Timeout", "timed out", "was aborted")
"""What NCCL, and PyTorch around it, say where another rank is gone (ncclResult_t in nccl.h; ProcessGroupNCCL.cpp)."""


class RunStoppedError(RuntimeError):
    """What ended a run that was asked for rightly, told in one sentence: what happened, and the next step."""


class LeftBehindError(Exception):
    """Work took too long, and may go on without end in a thread of its own."""


@contextmanager
def told_later() -> Iterator[None]:
    """A SIGTERM waits until this is left, such as one that comes while a failure is written down."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    if told:
        signal.raise_signal(signal.SIGTERM)


def is_of_the_network(error: BaseException) -> bool:
    """Whether an error comes from the exchange with other ranks, one of which is gone; gloo's have no class.

    NCCL has one class for all that it meets: its own out-of-memory, or two ranks on one GPU, are no lost rank.
    """
    from torch.distributed import DistBackendError, DistError  # here: reports need no torch

    if isinstance(error, DistBackendError):
        is_local = "shared memory" in str(error)  # a container's /dev/shm is small: docker's --shm-size
        return not is_local and any(words in str(error) for words in NCCL_LOST_RANK)
    return isinstance(error, (DistError, LeftBehindError)) or "gloo" in str(error).lower()


def is_full_disk(error: BaseException) -> bool:
    """Whether nothing more could be written; safetensors has a class of its own for it, with the system's number."""
    number = f"os error {errno.ENOSPC}"
    return getattr(error, "errno", None) == errno.ENOSPC or number in str(error)


def said_by(error: BaseException) -> str:
    """The first sentence of a library's error, without the place in its source."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    first_line = re.sub(r"^\[\S+\]\s*", "", lines[0])
    return first_line.partition(". ")[0][:200].rstrip(".")


def status_of(error: BaseException) -> str:
    """What a run that ended with `error` is called."""
    if isinstance(error, KeyboardInterrupt | SystemExit):  # the latter: told to end by SIGTERM
        return "interrupted"
    name = type(error).__name__
    is_of_nccls_buffers = name == "DistBackendError" and "out of memory" in str(error)
    if isinstance(error, MemoryError) or name == "OutOfMemoryError" or is_of_nccls_buffers:
        return "oom"
    return "failed"


class BadInputError(ValueError):
    """A user's mistake, told in one sentence: what was wrong, the actual value, the next step."""
