"""Errors: a user's mistake, what stops a run, and how a library's error is classified and told in one sentence."""

import errno
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

# how gloo's errors begin, which have no class of their own: with the place in its source
GLOO = re.compile(r"(Gloo connectFullMesh failed with )?\[(\S*/)?gloo/\S+\.(cc|h):\d+\]")
# What NCCL, and PyTorch around it, say where another rank is gone (ncclResult_t in nccl.h; ProcessGroupNCCL.cpp).
NCCL_LOST_RANK = ("ncclRemoteError", "ncclSystemError", "timeout", "Timeout", "timed out", "was aborted")
MOST_SAID = 4_000  # characters of an error


class BadInputError(ValueError):
    """A user's mistake, told in one sentence: what was wrong, the actual value, and the next step."""


class NotPlannedError(BadInputError):
    """The planner, or a dry run, has no formula for what is asked: a run goes on without it, a command cannot."""


class RunStoppedError(RuntimeError):
    """A failure that ends a correctly configured run, told in one sentence: what happened, and the next step."""


class AskedToEndError(RunStoppedError):
    """Raised on every rank when a run ends as its scheduler has asked, and all that it needs to resume is saved."""


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error means that another rank is gone."""
    from torch.distributed import DistBackendError, DistError  # here: reports need no torch

    if isinstance(error, DistBackendError):  # NCCL's class for everything, also for two ranks on one GPU
        is_local = "shared memory" in str(error)  # a container's /dev/shm is small: docker's --shm-size
        return not is_local and any(words in str(error) for words in NCCL_LOST_RANK)
    return isinstance(error, DistError) or GLOO.match(str(error)) is not None


def is_full_disk(error: BaseException) -> bool:
    """Return whether an error means a full disk; safetensors' own class has the system's number in its message."""
    return getattr(error, "errno", None) == errno.ENOSPC or f"os error {errno.ENOSPC}" in str(error)


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of a library's error, without the place in its source."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[\S+\]\s*", "", lines[0]).partition(". ")[0][:200].rstrip(".")


def status_of(error: BaseException) -> str:
    """Return the status of a run that ended with `error`: `interrupted`, `oom` or `failed`."""
    if isinstance(error, KeyboardInterrupt | SystemExit | AskedToEndError):  # SystemExit: told to end
        return "interrupted"
    name = type(error).__name__
    is_of_nccls_buffers = name == "DistBackendError" and "out of memory" in str(error)
    if isinstance(error, MemoryError) or name == "OutOfMemoryError" or is_of_nccls_buffers:
        return "oom"
    return "failed"


def shortened(said: str) -> str:
    """Return a sentence of at most `MOST_SAID` characters, without its middle: a user's values may be of any length."""
    return said if len(said) <= MOST_SAID else f"{said[: MOST_SAID // 2]} [...] {said[-MOST_SAID // 2 :]}"


def begin_of(value: object, length: int = 80) -> str:
    """Return a value as text of at most `length` characters, with an ellipsis where it goes on."""
    text = str(value)
    return text if len(text) <= length else f"{text[: length - 1]}…"


@contextmanager
def reading(what: str, next_step: str = "", done: str = "read") -> Iterator[None]:
    """Refuse, in one sentence that names it, something of a user's that a library cannot read or build.

    Wrap only the library's call, so that a fault of ours is not taken for the user's. A full disk, too little memory
    and a lost rank are nobody's mistake, and pass.

    Args:
        what: Its name with its place: "config.json of my_model".
        next_step: A sentence of what to do.
        done: What the library does with it: read, built.
    """
    try:
        yield
    except (BadInputError, RunStoppedError):
        raise
    except BaseException as error:
        is_of_rust = type(error).__name__ == "PanicException"  # of tokenizers and safetensors; no Exception to Python
        is_lost = "torch.distributed" in sys.modules and is_lost_peer(error)
        is_of_machine = is_full_disk(error) or status_of(error) == "oom" or is_lost
        if is_of_machine or not (is_of_rust or isinstance(error, Exception)):
            raise
        why = f"{type(error).__name__}: {first_sentence(error)}"
        raise BadInputError(f"{what} cannot be {done} ({why}). {next_step}".rstrip()) from error


def check_installed(package: str, asked_by: str, next_step: str) -> None:
    """Refuse what `asked_by` says where its package is missing, with the command that installs it."""
    if importlib.util.find_spec(package) is None:
        raise BadInputError(f"{asked_by}, but {package} is not installed: {next_step}.")


def closest(word: object, known: Iterable[object]) -> str:
    """Return the word of `known` that was probably meant; empty where none is close."""
    return next(iter(get_close_matches(str(word), [str(each) for each in known], n=1)), "")
