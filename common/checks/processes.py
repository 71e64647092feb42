"""Processes that a check starts, and what it says of them.

Each has a group of its own, and is ended with all that it started.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
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
POLL_S = 0.05
END_S = 5.0  # how long a process may take to end when it is told to; then it is killed


def start_process(
    command: Sequence[str], log: IO, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen:
    """Start this Python with `command` at the repository's root, without a network to ask; `log` takes what it says.

    `environment` has variables besides this process's own, `options` are Popen's.
    """
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
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
    return run_processes([command], [{}], limit_s)[0]


def run_processes(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], limit_s: float
) -> list[subprocess.CompletedProcess]:
    """Run this Python with several commands at once, each with variables of its own, for at most `limit_s` seconds.

    Once one has failed the others are ended, as they may wait for it. The `returncode` of those that were ended is
    None.
    """
    with ExitStack() as opened:
        # a pipe would stay open with whoever is left behind
        logs = [opened.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in commands]
        deadline_s, codes, processes = time.monotonic() + limit_s, [None], []
        try:
            for command, log, environment in zip(commands, logs, environments, strict=True):
                processes.append(start_process(command, log, environment))
            while None in codes and not any(codes) and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
                codes = [process.poll() for process in processes]
        finally:
            end_group(*processes)
        for log in logs:
            log.seek(0)
        return [
            subprocess.CompletedProcess(*each)
            for each in zip(commands, codes, [log.read() for log in logs], strict=True)
        ]


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

    `torchrun` adds a report of its own (`ChildFailedError`), which says nothing more.
    """
    lines = [re.sub(r"^(\[[^\]]*\]:?\s*)+", "", line).strip() for line in output.splitlines()]
    for pattern in (r"error: ", r"(\w+\.)*\w+(Error|Exception): \S"):
        if found := [line for line in lines if re.match(pattern, line)]:
            return found[-1].removeprefix("error: ")
    return next((line for line in reversed(lines) if line), "it ended without a word")


def failed(ended: subprocess.CompletedProcess, limit_s: float) -> dict[str, Any]:
    """Return the record of a process that did not do what it should, or hung for `limit_s`."""
    why = last_error(ended.stdout)
    if ended.returncode is None:
        why = f"took longer than {limit_s:.0f} s; its last words: {why}"
    elif ended.returncode < 0:
        why = f"killed by signal {-ended.returncode}; its last words: {why}"
    output = ended.stdout.splitlines()[-KEPT_LINES:]
    return {"status": FAILS, "why": why, "exit_code": ended.returncode, "output": output}


def not_installed(needed: Iterable[str]) -> str:
    """Return how to install those packages that are missing; empty = none is."""
    missing = [name for name in needed if find_spec(name) is None]
    return "; ".join(f"{name} is not installed: `{INSTALLED_BY.get(name, 'make install')}`" for name in missing)
