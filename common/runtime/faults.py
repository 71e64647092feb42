"""Faults on purpose, for the tests: what goes wrong, on which rank, in which step and at which point.

    FAULT="kill rank=1 step=7 point=batch" torchrun ... my_workflow_....py

Nothing happens, and nothing is computed, where the variable is not set.
"""

import errno
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.base.errors import BadInputError

if TYPE_CHECKING:
    import torch

VARIABLE = "FAULT"
HANG_S = 3600.0
KINDS = ("kill", "stop", "hang", "raise", "oom", "full", "nan")
"""SIGKILL; SIGSTOP; a sleep; an exception; no memory; no space; a weight, and so the loss, that is no number."""
POINTS = ("start", "load", "batch", "update", "validation", "written", "flushed", "listed", "renamed", "rotated")
"""A rank's start; then in the order of a step; the last five are a checkpoint's."""


@dataclass(frozen=True)
class Fault:
    """What is asked for; a field of None stands for any."""

    kind: str
    rank: int | None = None
    step: int | None = None
    point: str | None = None
    times: int = 1
    """At which arrival there, from 1."""
    once: str = ""
    """A file that is made when it happens, and keeps it from happening again after a restart."""

    def matches(self, point: str, step: int) -> bool:
        """Whether this process has come to it."""
        here = {"rank": int(os.environ.get("RANK", "0")), "step": step, "point": point}
        return all(getattr(self, name) in (None, value) for name, value in here.items())


def asked_fault() -> Fault | None:
    """The fault that the environment asks for.

    Raises:
        BadInputError: it is not written as in this module's docstring.
    """
    words = os.environ.get(VARIABLE, "").split()
    if not words:
        return None
    kind, *pairs = words
    values = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    numbers = {name: int(value) for name, value in values.items() if name in ("rank", "step", "times")}
    texts = {name: value for name, value in values.items() if name in ("point", "once")}
    known = kind in KINDS and texts.get("point", POINTS[0]) in POINTS
    if not known or len(numbers) + len(texts) != len(pairs):
        raise BadInputError(f"{VARIABLE} is {' '.join(words)!r}: write it as 'kill rank=1 step=7 point=batch'.")
    return Fault(kind, **numbers, **texts)


_arrivals: Counter[str] = Counter()
"""How often this process has come to where a fault was asked for."""


def asked_at(point: str, step: int) -> str | None:
    """The kind of fault that is asked for here and now, if any."""
    fault = asked_fault()
    if fault is None or not fault.matches(point, step) or (fault.once and Path(fault.once).exists()):
        return None
    _arrivals[os.environ[VARIABLE]] += 1
    if _arrivals[os.environ[VARIABLE]] != fault.times:
        return None
    if fault.once:
        Path(fault.once).touch()
    return fault.kind


def fault_at(point: str, step: int, model: "torch.nn.Module | None" = None) -> None:
    """Have happen what is asked for at this point of this step, on this rank; `model` is what may be spoilt."""
    if VARIABLE not in os.environ:
        return
    import torch

    kind = asked_at(point, step)
    if kind in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    elif kind == "hang":
        time.sleep(HANG_S)
    elif kind == "raise":
        raise ValueError(f"a fault on purpose, in step {step}")
    elif kind == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif kind == "oom":
        raise torch.OutOfMemoryError("a fault on purpose: out of memory")
    elif kind == "nan" and model is not None:
        next(weight for weight in model.parameters() if weight.requires_grad).data.fill_(torch.nan)
