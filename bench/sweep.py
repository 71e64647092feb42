"""Find a learning rate, and perhaps a rank, by short runs of a run folder; the worse half of them ends early, twice.

python -m common.sweep 2.1_lora_finetuning/run_0_cpu_x1 --learning_rate 2e-4 1e-3 5e-3 --lora_r 8 32 --data my_rows.csv

Successive halving (Jamieson and Talwalkar 2016, "Non-stochastic Best Arm Identification and Hyperparameter
Optimization"): every run takes a quarter of its steps, the better half of them continues to half of the steps, and the
better half of these to the end. A run that waits is a checkpoint (`pause_at_step`), and resumes from it. An interrupted
sweep continues where the same command is given again.
"""

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from queue import SimpleQueue
from threading import Lock
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from common.base.command_line import BAD_INPUT_EXIT_CODE, refused_in_one_sentence
from common.base.errors import BadInputError, RunStoppedError
from common.base.parsing import OneSentenceParser
from common.base.paths import command_here
from common.base.run_config import LAST, RunConfig
from common.base.run_folders import folder_named, workflows_of
from common.checks.folder_runs import run_of_folder
from common.hardware.devices import gpus
from common.records.store import write_json
from common.reporting.layout import fitted
from common.runtime.watch import die_with_parent
from common.tasks.objectives import VALIDATION_LOSS

PARTS = (4, 2, 1)  # all steps over those after which runs are compared
SWEPT = ("learning_rate", "lora_r")
# settings that a sweep gives its runs
OWN = ("max_steps", "eval_steps", "test_rows", "baseline", "log_format", "pause_at_step", "resume_from_checkpoint",
       "early_stopping_patience")  # fmt: skip
WEIGHTS = ("checkpoints", "adapter", "merged", "model")  # folders of a run's results, which a sweep does not keep
STATE, PICTURE = "sweep.json", "sweep.png"


@dataclass
class Trial:
    """One combination of the settings of a grid, and the validation losses of its run so far."""

    settings: dict[str, float]
    losses: dict[int, float] = field(default_factory=dict)
    """By step; step 0 is before training, and infinite where the run failed."""

    @property
    def name(self) -> str:
        """How the combination is called: `learning_rate-0.001-lora_r-8`."""
        return "-".join(f"{name}-{value:g}" for name, value in self.settings.items())

    def loss_at(self, step: int) -> float:
        """Return the loss after a step; infinite where the run did not come so far."""
        return self.losses.get(step, math.inf)


@dataclass(frozen=True)
class Sweep:
    """Runs of a folder that differ in the settings of a grid."""

    run: RunConfig
    folder: str
    overrides: list[str]
    steps: int
    trials: list[Trial]
    groups: SimpleQueue  # of each run that may go on at the same time, the GPUs that it sees; empty = all
    lock: Lock = field(default_factory=Lock)

    def rounds(self) -> Iterator[int]:
        """Yield the steps after which runs are compared."""
        return (self.steps // part for part in PARTS)

    def continue_from_state(self) -> None:
        """Read the losses that an earlier sweep of this name has found, if there was one.

        Raises:
            BadInputError: it had other settings.
        """
        file = self.run.results_folder(self.run.run_name) / STATE
        if not file.is_file():
            return
        state = json.loads(file.read_text(encoding="utf-8"))
        if state["asked"] != self._asked():
            raise BadInputError(
                f"The sweep {self.run.run_name} had other settings ({state['asked']}): repeat them, or pass another "
                "--run_name."
            )
        for trial in self.trials:
            trial.losses.update({int(step): loss for step, loss in state["losses"][trial.name].items()})

    def keep_state(self) -> None:
        """Write what was asked, and the losses that were found; a run that has failed is tried again."""
        folder = self.run.results_folder(self.run.run_name)
        folder.mkdir(parents=True, exist_ok=True)
        losses = {
            trial.name: {step: loss for step, loss in trial.losses.items() if math.isfinite(loss)}
            for trial in self.trials
        }
        write_json({"asked": self._asked(), "losses": losses}, folder / STATE)

    def _asked(self) -> dict[str, Any]:
        grid = [trial.settings for trial in self.trials]
        return {"folder": self.run.run_folder, "overrides": self.overrides, "steps": self.steps, "grid": grid}

    def take(self) -> Trial:
        """Take all rounds, and return the trial with the lowest loss at the end.

        Raises:
            RunStoppedError: no run reached its last step, or one ended before its first.
            BadInputError: a run was refused.
        """
        trials = self.trials
        for step in self.rounds():
            with ThreadPoolExecutor(self.groups.qsize()) as pool:
                advanced = pool.map if self.groups.qsize() > 1 else map
                list(advanced(lambda trial, step=step: self._advance(trial, step), trials))
            trials = sorted(trials, key=lambda trial: trial.loss_at(step))
            count = len(trials) if step == self.steps else max(1, len(trials) // 2)
            ended = [trial for trial in self.trials if trial not in trials[:count] or step == self.steps]
            for trial, folder in product(ended, WEIGHTS):
                shutil.rmtree(self.run.results_folder(self._run_name(trial)) / folder, ignore_errors=True)
            trials = trials[:count]
        if not math.isfinite(trials[0].loss_at(self.steps)):
            raise RunStoppedError("No run reached its last step: pass lower values to --learning_rate.")
        return trials[0]

    def _advance(self, trial: Trial, until: int) -> None:
        """Run one combination until a step, from where it waits, unless it has been there or has failed."""
        if until in trial.losses or math.inf in trial.losses.values():
            return
        group, last_line, error = self.groups.get(), "", ""
        own = {"CUDA_VISIBLE_DEVICES": group} if group else {}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        command = [sys.executable, "-m", "common.launch", self.folder, *self.options_of(trial, until)]
        try:
            with subprocess.Popen(command, env=os.environ | own, preexec_fn=die_with_parent, **streams) as process:
                for line in process.stdout:
                    last_line = line.strip() or last_line
                    error = line.partition("error: ")[2].strip() or error
                    figures = _figures_in(line)
                    if VALIDATION_LOSS in figures:
                        self._note(trial, figures["step"], figures[VALIDATION_LOSS])
        finally:
            self.groups.put(group)
        if process.returncode == BAD_INPUT_EXIT_CODE:
            raise BadInputError(error or last_line)
        if not trial.losses:
            raise RunStoppedError(f"{trial.name} ended before its first step: {error or last_line}")
        if until not in trial.losses:
            print(f"{trial.name} failed: {error or last_line}")
            trial.losses[until] = math.inf

    def _note(self, trial: Trial, step: int, loss: float) -> None:
        """Say and keep a validation loss, so that it is known should the sweep be interrupted."""
        print(f"{trial.name}: step {step}/{self.steps}, validation loss {loss:.4f}", flush=True)
        with self.lock:
            trial.losses[step] = loss
            self.keep_state()

    def _run_name(self, trial: Trial) -> str:
        return f"{self.run.run_name}-{trial.name}"

    def options_of(self, trial: Trial, until: int) -> list[str]:
        """Return the settings of one run that waits after a step, as its command has them."""
        whole = {"max_steps": self.steps, "eval_steps": self.steps // PARTS[0], "test_rows": 1, "log_format": "json"}
        without_baseline = {} if self.run.goal.compares else {"baseline": "none"}
        named = {"run_name": self._run_name(trial), "resume_from_checkpoint": LAST}
        waits = {"pause_at_step": until} if until < self.steps else {}
        asked = {**trial.settings, **whole, **without_baseline, **named, **waits}
        return [*self.overrides, *(part for name, value in asked.items() for part in (f"--{name}", str(value)))]

    def table(self) -> str:
        """Return the losses of all runs, those that came further first, and of these the best."""
        steps = list(self.rounds())
        trials = sorted(self.trials, key=lambda trial: [trial.loss_at(step) for step in reversed(steps)])
        rows = [
            [*(f"{value:g}" for value in trial.settings.values()), *(_said(trial.losses.get(step)) for step in steps)]
            for trial in trials
        ]
        table = fitted([*self.trials[0].settings, *(f"step {step}" for step in steps)], rows)
        return f"validation loss, {trials[0].losses[0]:.4f} before training\n\n{table}"

    def picture(self) -> Figure:
        """Plot the losses over the learning rate: a colour for each other setting, a panel for each comparison."""
        figure, panels = plt.subplots(1, len(PARTS), figsize=(11, 3.5), sharey=True, layout="constrained")
        others = sorted({tuple(trial.settings.items())[1:] for trial in self.trials})
        for (axes, step), own in product(zip(panels, self.rounds(), strict=True), others):
            points = sorted(
                (trial.settings["learning_rate"], trial.loss_at(step))
                for trial in self.trials
                if tuple(trial.settings.items())[1:] == own and math.isfinite(trial.loss_at(step))
            )
            label = ", ".join(f"{name} {value:g}" for name, value in own)
            axes.plot(*zip(*points, strict=True) if points else ((), ()), marker="o", label=label)
            axes.set(xscale="log", xlabel="learning rate", title=f"step {step}")
        panels[0].set_ylabel("validation loss")
        if any(others):
            panels[0].legend()
        return figure


def _figures_in(line: str) -> dict[str, float]:
    with suppress(ValueError):
        found = json.loads(line)
        return found if isinstance(found, dict) else {}
    return {}


def _said(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}" if math.isfinite(loss) else "failed"


def sweep_of(arguments: Sequence[str] | None = None) -> Sweep:
    """Return what a command line asks for; every run's settings are checked.

    Raises:
        BadInputError: there is nothing to choose from, or one of the runs cannot be.
    """
    parser = OneSentenceParser(
        prog="python -m common.sweep", description=__doc__.partition("\n\n")[0],
        epilog="Any setting of the folder's workflow can follow, such as --data my_rows.csv.",
    )  # fmt: skip
    parser.add_argument("run_folder", help="such as 2.1_lora_finetuning/run_0_cpu_x1")
    parser.add_argument("--learning_rate", "--learning-rate", type=float, nargs="+", required=True, help="two or more")
    parser.add_argument("--lora_r", "--lora-r", type=int, nargs="+", default=[], help="ranks of the adapters")
    parser.add_argument("--steps", type=int, default=40, help="of a whole run, a multiple of 4")
    parser.add_argument("--at_once", "--at-once", type=int, default=1, help="runs beside each other, on own devices")
    options, overrides = parser.parse_known_args(arguments)
    if options.steps < PARTS[0] or options.steps % PARTS[0]:
        raise BadInputError(f"steps is {options.steps}, but must be a multiple of {PARTS[0]}: pass --steps 40.")
    if options.at_once < 1:
        raise BadInputError(f"at_once is {options.at_once}, but must be at least 1: pass --at_once 1.")
    folder = folder_named(options.run_folder)
    if len(workflows := workflows_of(folder)) > 1:
        raise BadInputError(
            f"{options.run_folder} has {len(workflows)} workflows, but a sweep is of one: pass another."
        )
    passed = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in overrides if word.startswith("--")}
    if given := [name for name in OWN if name in passed]:
        raise BadInputError(f"{given[0]} is set by the sweep: leave it out; --steps says how long a whole run is.")
    run = run_of_folder(folder, overrides, [f"--{name}" for name in SWEPT])
    grid = {name: list(dict.fromkeys(getattr(options, name))) for name in SWEPT if getattr(options, name)}
    run = run.changed_to(run_name=run.run_name or "sweep")
    groups = SimpleQueue()
    for group in groups_of_gpus(run, options.at_once):
        groups.put(group)
    trials = [Trial(dict(zip(grid, each, strict=True))) for each in product(*grid.values())]
    sweep = Sweep(run, options.run_folder, overrides, options.steps, trials, groups)
    if len(trials) < 2:
        raise BadInputError("There is one run, and nothing to choose from: pass two or more values to --learning_rate.")
    for trial in trials:
        run_of_folder(folder, sweep.options_of(trial, sweep.steps))
    return sweep


def groups_of_gpus(run: RunConfig, count: int) -> list[str]:
    """Return the GPUs of each of so many runs, as `CUDA_VISIBLE_DEVICES` has them; empty: those that the sweep sees."""
    if count == 1 or run.device != "cuda":
        return [""] * count
    _, names = gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(len(names))))
    ids = visible.split(",") if visible else []
    if len(ids) < count * run.devices:
        raise BadInputError(
            f"at_once is {count}, of runs on {run.devices} GPU(s) each, but there are {len(ids)}: pass --at_once "
            f"{max(1, len(ids) // run.devices)}."
        )
    return [",".join(ids[first : first + run.devices]) for first in range(0, count * run.devices, run.devices)]


@refused_in_one_sentence()
def main() -> None:
    """Take a sweep; print its table and the best run's command, and draw its picture."""
    sweep = sweep_of()
    sweep.continue_from_state()
    sweep.keep_state()
    best = sweep.take()
    place = sweep.run.results_folder(sweep.run.run_name) / PICTURE
    sweep.picture().savefig(place)
    chosen = {**best.settings, "run_name": f"{sweep.run.run_name}-best"}
    options = [part for name, value in chosen.items() for part in (f"--{name}", str(value))]
    print(f"\n{sweep.table()}\n\npicture: {place}")
    print(f"best: {command_here('launch')} {shlex.join([sweep.folder, *sweep.overrides, *options])}")


if __name__ == "__main__":
    main()
