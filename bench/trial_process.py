"""Starts a training trial in a process of its own, and reads what it ended with."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.recipe import Trial
from bench.vocabulary_trial import COUNTED_STEP
from common.base.paths import REPOSITORY

LLAMA_FACTORY_PYTHON = "BENCH_LLAMA_FACTORY_PYTHON"
"""Environment variable: the Python of an environment in which `pip install llamafactory` was done."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
"""What the environment of every tool's process has."""


@dataclass(frozen=True)
class Outcome:
    """What a trial ended with."""

    seconds_to_loss: float | None
    steps_to_loss: float | None
    tokens_per_s: float | None


def python_of(tool: str) -> str | None:
    """The Python that has `tool`, or None where nobody named one."""
    return os.environ.get(LLAMA_FACTORY_PYTHON) if tool == "llama-factory" else sys.executable


def peak_bytes_of(trials: Sequence[Trial]) -> list[int]:
    """The most that all tensors take at once in a step of each trial's longest rows.

    Each is counted in a process of its own, one per core at once, because nothing is timed.

    Raises:
        RuntimeError: a trial failed; with the end of what it said.
    """
    counted = [replace(trial, longest_rows=True, most_steps=COUNTED_STEP) for trial in trials]
    lines, cores = [], os.cpu_count() or 1
    for first in range(0, len(counted), cores):
        at_once = counted[first : first + cores]
        started = [_start("bench.vocabulary_trial", trial) for trial in at_once]
        lines += [_last_line(process, trial) for process, trial in zip(started, at_once, strict=True)]
    return [json.loads(line)["peak_bytes"] for line in lines]


def run_trial_process(trial: Trial) -> Outcome:
    """A trial in a process of its own, with one thread.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    start_s = time.perf_counter()
    outcome = Outcome(**json.loads(_last_line(_start("bench.trial", trial), trial)))
    reached = "not reached" if outcome.seconds_to_loss is None else f"{outcome.seconds_to_loss:.1f} s"
    print(
        f"{trial.data} rows, {trial.technique} {trial.tool}, rate {trial.learning_rate:g}, seed {trial.seed}: "
        f"validation loss {trial.target_loss:g} {reached} ({time.perf_counter() - start_s:.0f} s in all)",
        file=sys.stderr,
        flush=True,
    )
    return outcome


def _start(module: str, trial: Trial) -> subprocess.Popen[str]:
    """Start a trial's process."""
    return subprocess.Popen(
        [str(python_of(trial.tool)), "-m", module, json.dumps(trial.to_dict())],
        cwd=REPOSITORY,
        env={**os.environ, **ONE_THREAD},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _last_line(process: subprocess.Popen[str], trial: Trial) -> str:
    """What a trial's process says last."""
    out, errors = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"The trial {trial} failed:\n{errors[-3000:]}")
    return out.splitlines()[-1]
