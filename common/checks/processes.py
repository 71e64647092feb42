"""Processes that a check starts: each has a group of its own, and is ended with all that it started."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

from common.base.paths import REPOSITORY
from common.runtime.watch import die_with_parent

END_S = 5.0  # how long a process may take to end when it is told to; then it is killed


def start_process(command: Sequence[str], log: IO, **options: Any) -> subprocess.Popen:
    """Start this Python with `command` at the repository's root, without a network to ask; `log` takes what it says."""
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent,
        **options,
    )


def run_process(command: Sequence[str], limit_s: float) -> subprocess.CompletedProcess:
    """Run this Python with `command` for at most `limit_s` seconds.

    Its `returncode` is None where it was ended, as its time was over.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log:  # a pipe would stay open with whoever is left behind
        process = start_process(command, log)
        try:
            exit_code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            end_group(process)
        log.seek(0)
        return subprocess.CompletedProcess(command, exit_code, log.read())


def end_group(process: subprocess.Popen) -> None:
    """End a process and all that it started: with SIGINT, so that it may say what it found, then by force."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with suppress(ProcessLookupError):  # nobody of the group is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_error(output: str) -> str:
    """Return the line that says why a process ended: its `error: ...`, a traceback's last line, or its last line.

    `torchrun` adds a report of its own (`ChildFailedError`), which says nothing more.
    """
    lines = [re.sub(r"^(\[[^\]]*\]:?\s*)+", "", line).strip() for line in output.splitlines()]
    for pattern in (r"error: ", r"(\w+\.)*\w+(Error|Exception): \S"):
        if found := [line for line in lines if re.match(pattern, line)]:
            return found[-1].removeprefix("error: ")
    return next((line for line in reversed(lines) if line), "it ended without a word")
