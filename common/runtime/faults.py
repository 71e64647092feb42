"""Injected faults, for the tests: what goes wrong, on which rank, in which step and at which point.

FAULT="kill rank=1 step=7 point=batch" torchrun ... my_workflow_....py
"""

import errno
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from common.base.errors import BadInputError

VARIABLE = "FAULT"
HANG_S = 3600.0
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "ask": signal.SIGUSR1}
# beside the signals: a sleep; an exception; no memory; no space; a weight, and so the loss, that is not a number
KINDS = (*SIGNALS, "hang", "raise", "oom", "full", "nan")
# a rank's start; then in the order of a step; the last five are a checkpoint's
POINTS = ("start", "load", "batch", "update", "validation", "written", "flushed", "listed", "renamed", "rotated")
FIELDS = {"rank": int, "step": int, "times": int, "point": str, "once": str}


def asked_fault() -> tuple[str, dict[str, Any]]:
    """Return the kind of fault that the environment asks for, and where; a rank, step or point that is left out is any.

    `times` says at which arrival there it happens, from 1; `once` names a file that is made when it happens, and keeps
    it from happening again after a restart.
    """
    asked = os.environ[VARIABLE]
    kind, *pairs = asked.split()
    try:
        where = {name: FIELDS[name](value) for name, value in (pair.split("=", 1) for pair in pairs)}
    except (KeyError, ValueError):
        kind = ""
    if kind not in KINDS or where.get("point", POINTS[0]) not in POINTS:
        raise BadInputError(f"{VARIABLE} is {asked!r}: write it as 'kill rank=1 step=7 point=batch'.")
    return kind, where


_arrivals: Counter[str] = Counter()  # of this process, by what was asked for


def asked_at(point: str, step: int) -> str | None:
    """Return the kind of fault that is asked for here and now, if any."""
    kind, where = asked_fault()
    here, once = {"rank": int(os.environ.get("RANK", "0")), "step": step, "point": point}, where.get("once")
    if any(where.get(name, value) != value for name, value in here.items()) or (once and Path(once).exists()):
        return None
    _arrivals[os.environ[VARIABLE]] += 1
    if _arrivals[os.environ[VARIABLE]] != where.get("times", 1):
        return None
    if once:
        Path(once).touch()
    return kind


def fault_at(point: str, step: int, model: torch.nn.Module | None = None) -> None:
    """Let the fault happen that is asked for at this point of this step, on this rank; `nan` damages `model`."""
    if not os.environ.get(VARIABLE):
        return
    kind = asked_at(point, step)
    errors = {
        "raise": ValueError(f"a fault on purpose, in step {step}"),
        "oom": torch.OutOfMemoryError("a fault on purpose: out of memory"),
        "full": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    }
    if kind in errors:
        raise errors[kind]
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
    elif kind == "hang":
        time.sleep(HANG_S)
    elif kind == "nan" and model is not None:
        next(weight for weight in model.parameters() if weight.requires_grad).data.fill_(torch.nan)
