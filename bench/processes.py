"""Processes that a check starts, each ended with all that it started, and what is said of them."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import IO, Any

from common.base.paths import REPOSITORY
from common.runtime.watch import die_with_parent

WORKS, FAILS, LEFT_OUT = "works", "does not work", "left out"
KEPT_LINES = 40  # of the output of a part that does not work
# others come with `make install`
INSTALLED_BY = {
    "deepspeed": "make deepspeed",
    "liger_kernel": ".venv/bin/pip install liger-kernel",
    "pytest": ".venv/bin/pip install pytest",
}
END_S = 5.0  # how long a process may take to end when it is told to; then it is killed


def start_process(command: Sequence[str], log: IO, **options: Any) -> subprocess.Popen:
    """Start this Python with `command` at the repository's root, without a Hub to ask; `log` takes what it says."""
    options |= {"cwd": REPOSITORY, "env": os.environ | {"HF_HUB_OFFLINE": "1"}}
    options |= {"stdout": log, "stderr": subprocess.STDOUT}
    command = [sys.executable, *command]
    return subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent, **options)


def run_process(command: Sequence[str], limit_s: float) -> subprocess.CompletedProcess:
    """Run this Python with `command` for at most `limit_s` seconds; `returncode` is None where it was ended then."""
    code = None
    with tempfile.TemporaryFile("w+", errors="replace") as log:  # a pipe would stay open with whoever is left behind
        process = start_process(command, log)
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        finally:
            end_group(process)
        log.seek(0)
        return subprocess.CompletedProcess(command, code, log.read())


def end_group(*processes: subprocess.Popen) -> None:
    """End processes and all that they started: with SIGINT, so that they may say what they found, then by force."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    deadline_s = time.monotonic() + END_S
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline_s - time.monotonic()))
        with suppress(ProcessLookupError):  # nobody of the group is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_error(output: str) -> str:
    """Return the line that says why a process ended: its `error: ...`, a traceback's last line, or its last line.

    torchrun's own report (`ChildFailedError`) says nothing more.
    """
    lines = [re.sub(r"^(\[[^\]]*\]:?\s*)+", "", line).strip() for line in output.splitlines()]
    for pattern in (r"error: ", r"(\w+\.)*\w+(Error|Exception): \S"):
        if found := [line for line in lines if re.match(pattern, line)]:
            return found[-1].removeprefix("error: ")
    return next((line for line in reversed(lines) if line), "it ended without a word")


def why_ended(code: int | None, output: str, limit_s: float) -> str:
    """Return why a process did not end well; `code` is None where it was ended after `limit_s` seconds."""
    why = last_error(output)
    if code is None:
        return f"took longer than {limit_s:g} s; its last words: {why}"
    return f"killed by signal {-code}; its last words: {why}" if code < 0 else why


def not_installed(needed: Iterable[str]) -> str:
    """Return how to install those packages that are missing; empty = none is."""
    missing = [name for name in needed if find_spec(name) is None]
    return "; ".join(f"{name} is not installed: `{INSTALLED_BY.get(name, 'make install')}`" for name in missing)
