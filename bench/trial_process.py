"""Starts a training trial in a process of its own, and reads what it ended with."""

import json
import os
import subprocess
import sys
import time
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


def peak_bytes_of(trial: Trial) -> int:
    """The most that all tensors take at once in a step of a trial's longest rows, counted in a process of its own.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    counted = replace(trial, longest_rows=True, most_steps=COUNTED_STEP)
    return json.loads(_last_line("bench.vocabulary_trial", counted))["peak_bytes"]


def run_trial_process(trial: Trial) -> Outcome:
    """A trial in a process of its own, with one thread.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    start_s = time.perf_counter()
    outcome = Outcome(**json.loads(_last_line("bench.trial", trial)))
    reached = "not reached" if outcome.seconds_to_loss is None else f"{outcome.seconds_to_loss:.1f} s"
    print(
        f"{trial.data} rows, {trial.technique} {trial.tool}, rate {trial.learning_rate:g}, seed {trial.seed}: "
        f"validation loss {trial.target_loss:g} {reached} ({time.perf_counter() - start_s:.0f} s in all)",
        file=sys.stderr,
        flush=True,
    )
    return outcome


def _last_line(module: str, trial: Trial) -> str:
    """What a trial's process says last."""
    done = subprocess.run(
        [str(python_of(trial.tool)), "-m", module, json.dumps(trial.to_dict())],
        cwd=REPOSITORY,
        env={**os.environ, **ONE_THREAD},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"The trial {trial} failed:\n{done.stderr[-3000:]}")
    return done.stdout.splitlines()[-1]
