"""What a pipeline of two gloo ranks brings over naive model parallel, as a share of what formula and machine allow."""

import json
import os
import subprocess
from dataclasses import dataclass
from typing import Any

from bench.entries import Entry, measured
from bench.scaling import TWO_RANKS
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig

COMMAND = "python -m bench pipeline"
BAR = 0.85
"""Least share of the allowed speed-up."""


@dataclass(frozen=True)
class Trial:
    """A model and the rows of its step; every round takes `steps` of them each way."""

    model: str
    rows: int
    steps: int
    rounds: int

    @property
    def name(self) -> str:
        """What its entries begin with."""
        return f"pipeline, {self.model.rpartition('/')[2]}, {self.rows} rows"


LARGE = Trial("llama-27m", 64, steps=1, rounds=7)
SMALL = tuple(Trial(RunConfig().model, rows, steps=3, rounds=7) for rows in (64, 16))
QUICK = Trial(RunConfig().model, 64, steps=1, rounds=1)

SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B"}
FACTORS = {
    "small_micro_batches_factor": "time of all small passes over that of large ones",
    "unequal_stages_factor": "slowest stage over their mean",
    "sending_and_waiting_factor": "step over passes with the formula's bubble",
    "naive_factor": "naive step over its passes",
}
"""The share of the allowed speed-up is the last over the product of the others."""


def entries(quick: bool) -> list[Entry]:
    """The large model's figures with their bar, then the small one's; `quick`: a round of the small one's."""
    if quick:
        return speed_entries(QUICK, figures_of(QUICK))
    figures = figures_of(LARGE)
    found = [*speed_entries(LARGE, figures, BAR), *schedule_entries(LARGE, figures)]
    return found + [entry for trial in SMALL for entry in speed_entries(trial, figures_of(trial))]


def speed_entries(trial: Trial, figures: dict[str, Any], bar: float | None = None) -> list[Entry]:
    """1F1B's speed-up, its share of the allowed one, and where the rest goes."""
    name = f"{trial.name}, 1F1B"
    return [
        measured(f"{name}: speed-up over naive model parallel", figures["speedup"], "ratio", COMMAND),
        measured(f"{name}: share of the allowed speed-up", figures["share_of_allowed"], "ratio", COMMAND, at_least=bar),
        *(measured(f"{name}: {words}", figures[key], "ratio", COMMAND) for key, words in FACTORS.items()),
    ]


def schedule_entries(trial: Trial, figures: dict[str, Any]) -> list[Entry]:
    """What formula and machine allow, GPipe's speed-up, and each schedule's idle shares and memory."""
    name, idle, peaks_mib = trial.name, figures["idle_share"], figures["peak_activations_mib"]
    ratio = max(peaks_mib["gpipe"]) / max(peaks_mib["1f1b"])
    return [
        measured(f"{name}, GPipe: speed-up over naive model parallel", figures["speedup_gpipe"], "ratio", COMMAND),
        measured(f"{name}: speed-up by formula", figures["ideal_speedup"], "ratio", COMMAND),
        measured(f"{name}: the machine's ceiling", figures["machine_ceiling"], "ratio", COMMAND),
        measured(f"{name}: idle share by formula", figures["ideal_idle_share"], "share", COMMAND),
        *_by_stage(f"{name}, {{}}: idle share", idle, "share"),
        *_by_stage(f"{name}, {{}}: peak activations", peaks_mib, "MiB"),
        measured(f"{name}: GPipe's highest peak of activations over 1F1B's", ratio, "ratio", COMMAND),
    ]


def _by_stage(name: str, figures: dict[str, list[float]], unit: str) -> list[Entry]:
    return [
        measured(f"{name.format(words)} of stage {stage}", value, unit, COMMAND)
        for way, words in SCHEDULES.items()
        for stage, value in enumerate(figures[way])
    ]


def figures_of(trial: Trial) -> dict[str, Any]:
    """The figures of two ranks in processes of their own, which say their rounds on standard error.

    Raises:
        RuntimeError: they failed.
    """
    settings = map(str, (trial.rows, trial.steps, trial.rounds))
    command = [*TWO_RANKS, "-m", "bench.pipeline_trial", trial.model, *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: the reason is above.")
    return json.loads(done.stdout.splitlines()[-1])
