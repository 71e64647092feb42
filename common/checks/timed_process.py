"""A part of the GPUs' check: a process with a time limit, and how it ended."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from common.base.paths import REPOSITORY
from common.runtime.watch import die_with_parent

WORKS, SLOWER, FAILS, LEFT_OUT = "works", "slower than planned", "does not work", "left out"
END_S = 5.0
"""How long a part may take to end when it is told to; then it is killed."""
KEPT_LINES = 40
"""Of the output of a part that does not work."""

ABSOLUTE = re.compile(r"(?<![\w./:~])~?/(?:[^/\s'\":,;()]+/)*(?=[^/\s'\":,;()])")
"""All of an absolute path but its last name."""

Record = dict[str, Any]
"""What is kept of a part: `part`, `status`, `why`, `seconds`, and its figures."""


# -- one part, in a process of its own


@dataclass(frozen=True)
class Ended:
    """A process that came to its end, or to its time's."""

    exit_code: int | None
    """None = it was ended after the time that it had."""
    output: str


def run_process(command: Sequence[str], limit_s: float) -> Ended:
    """Run this Python with `command` at the repository's root, for at most `limit_s` seconds.

    It has no network to ask, and a group of its own, which is ended as a whole.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as log:  # a pipe would stay open with whoever is left behind
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=REPOSITORY,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            exit_code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            end_group(process)
        log.seek(0)
        return Ended(exit_code, log.read())


def end_group(process: subprocess.Popen) -> None:
    """End a process and all that it started: it may say what it found so far (SIGINT), then by force."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with suppress(ProcessLookupError):  # nobody of the group is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_error(output: str) -> str:
    """What ended a process, by its output: its sentence `error: ...`, a traceback's last line, or its last line.

    `torchrun` adds a report of its own (`ChildFailedError`), which says nothing more.
    """
    lines = [re.sub(r"^(\[[^\]]*\]:?\s*)+", "", line).strip() for line in output.splitlines()]
    for pattern in (r"error: ", r"(\w+\.)*\w+(Error|Exception): \S"):
        if found := [line for line in lines if re.match(pattern, line)]:
            return found[-1].removeprefix("error: ")
    return next((line for line in reversed(lines) if line), "it ended without a word")


def failed(ended: Ended) -> Record:
    """The record of a process that did not do what it should."""
    why = last_error(ended.output)
    if ended.exit_code is not None and ended.exit_code < 0:
        why = f"killed by signal {-ended.exit_code}; its last words: {why}"
    return {
        "status": FAILS,
        "why": why,
        "exit_code": ended.exit_code,
        "output": ended.output.splitlines()[-KEPT_LINES:],
    }


def too_long(ended: Ended, limit_s: float, most_s: float) -> Record:
    """The record of a part that was ended: it hangs, or the budget was over before it could end."""
    if limit_s < most_s:
        why = f"the budget was over after {limit_s:.0f} s of it: pass a larger --budget_s, or --only this part"
        return {"status": LEFT_OUT, "why": why}
    return {**failed(ended), "why": f"took longer than {limit_s:.0f} s; its last words: {last_error(ended.output)}"}
