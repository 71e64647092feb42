"""Find a learning rate, and perhaps a rank, by short runs of a run folder; the worse half of them ends early, twice.

python -m common.sweep 2.1_lora_finetuning/run_0_cpu_x1 --learning_rate 2e-4 1e-3 5e-3 --lora_r 8 32 --data my_rows.csv

Successive halving (Jamieson and Talwalkar 2016, "Non-stochastic Best Arm Identification and Hyperparameter
Optimization"): all runs take a quarter of the steps, the better half of them goes on to a half, and the better half of
these to the end. So a sweep takes about half the steps of a whole grid. A run that waits is a checkpoint, and keeps the
schedule of its whole length. An interrupted sweep goes on where the same command is given again.
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
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from common.base.command_line import BAD_INPUT_EXIT_CODE, refused_in_one_sentence
from common.base.errors import BadInputError
from common.base.parsing import OneSentenceParser
from common.base.paths import command_here
from common.base.run_config import LAST, RunConfig
from common.base.run_folders import folder_named, workflows_of
from common.checks.folder_runs import run_of_folder
from common.reporting.layout import fitted
from common.runtime.watch import die_with_parent
from common.tasks.objectives import VALIDATION_LOSS

ROUNDS = (4, 2, 1)  # the steps of all runs over those of a round
SWEPT = ("learning_rate", "lora_r")
STATE, PICTURE = "sweep.json", "sweep.png"


@dataclass
class Trial:
    """One combination of the settings that are swept, and how far its run has come."""

    settings: dict[str, float]
    losses: dict[int, float] = field(default_factory=dict)
    """Validation loss by step; step 0 is before training, infinite where the run failed."""

    @property
    def name(self) -> str:
        """How the combination is called, in the run's name and where it is told of."""
        return "-".join(f"{name}-{value:g}" for name, value in self.settings.items())

    def loss_at(self, step: int) -> float:
        """Return the loss after a step; infinite where the run failed before."""
        return math.inf if math.inf in self.losses.values() else self.losses[step]


@dataclass
class Sweep:
    """Runs of a folder that differ in the settings that are swept."""

    run: RunConfig
    folder: str
    overrides: list[str]
    steps: int
    trials: list[Trial]
    at_once: int = 1

    @property
    def results(self) -> Path:
        """Where the sweep's state and picture are; its runs are beside it."""
        return self.run.results_folder(self.run.run_name)

    def rounds(self) -> Iterator[int]:
        """Yield the step that each round goes to."""
        return (self.steps // part for part in ROUNDS)

    def results_of(self, trial: Trial) -> Path:
        """Return where a trial's run writes."""
        return self.run.results_folder(f"{self.run.run_name}-{trial.name}")

    def take(self) -> list[Trial]:
        """Take all rounds, and return the trials that went to the end, the best first."""
        going_on = self.trials
        for step in self.rounds():
            print(f"-- {len(going_on)} runs, to step {step} of {self.steps}", flush=True)
            self._advance(going_on, step)
            going_on = sorted(going_on, key=lambda trial: trial.loss_at(step))
            kept = going_on if step == self.steps else going_on[: math.ceil(len(going_on) / 2)]
            for trial in going_on[len(kept) :]:
                shutil.rmtree(self.results_of(trial) / "checkpoints", ignore_errors=True)
            going_on = kept
        return going_on

    def _advance(self, trials: Sequence[Trial], step: int) -> None:
        slots = SimpleQueue()
        for slot in range(self.at_once):
            slots.put(slot)

        def advance(trial: Trial) -> None:
            slot = slots.get()
            try:
                if step not in trial.losses and math.inf not in trial.losses.values():
                    self._run(trial, step, slot)
                print(f"   {trial.name}: validation loss {trial.loss_at(step):.4f}", flush=True)
                self.keep()
            finally:
                slots.put(slot)

        if self.at_once == 1:
            list(map(advance, trials))
            return
        with ThreadPoolExecutor(self.at_once) as pool:
            list(pool.map(advance, trials))

    def command_of(self, trial: Trial, step: int) -> list[str]:
        """Return the command that begins a trial's run, or resumes it, and lets it wait at a step."""
        settings = {
            **trial.settings,
            **{"max_steps": self.steps, "eval_steps": self.steps // ROUNDS[0]},
            **{"baseline": "none", "test_rows": 1, "log_format": "json"},
            **{"run_name": self.results_of(trial).name, "pause_at_step": step if step < self.steps else 0},
        }
        if trial.losses:
            settings["resume_from_checkpoint"] = LAST
        options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        return [sys.executable, "-m", "common.launch", self.folder, *self.overrides, *options]

    def _run(self, trial: Trial, step: int, slot: int) -> None:
        """Take a trial's run to a step, and note its losses.

        Raises:
            BadInputError: the run was refused.
        """
        devices = range(slot * self.run.devices, (slot + 1) * self.run.devices)
        own = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if self.run.device == "cuda" else {}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        found, last_line = dict(trial.losses), ""
        with subprocess.Popen(
            self.command_of(trial, step), env=os.environ | own, preexec_fn=die_with_parent, **streams
        ) as process:
            for line in process.stdout:
                figures = json.loads(line) if line.startswith("{") else {}
                if "step" in figures:
                    found[figures["step"]] = figures.get(VALIDATION_LOSS, math.inf)
                last_line = line.strip() or last_line
        if process.returncode == BAD_INPUT_EXIT_CODE:
            raise BadInputError(last_line.partition("error: ")[2] or last_line)
        if step not in found:
            print(f"   {trial.name} failed: {last_line}")
        trial.losses = {step: math.inf, **found}

    def keep(self) -> None:
        """Write how far all trials have come."""
        self.results.mkdir(parents=True, exist_ok=True)
        state = {"asked": self.asked(), "losses": {trial.name: trial.losses for trial in self.trials}}
        part = self.results / f"{STATE}.part"
        part.write_text(json.dumps(state, indent=1))
        part.replace(self.results / STATE)

    def asked(self) -> dict[str, Any]:
        """Return what a sweep that goes on must share."""
        return {"folder": self.run.run_folder, "overrides": self.overrides, "steps": self.steps}

    def go_on(self) -> None:
        """Take over what a sweep of this name has found, if there was one.

        Raises:
            BadInputError: it had other settings.
        """
        if not (self.results / STATE).is_file():
            return
        state = json.loads((self.results / STATE).read_text())
        if state["asked"] != self.asked():
            raise BadInputError(
                f"The sweep {self.run.run_name} had other settings ({state['asked']}): repeat them, or pass another "
                "--run_name."
            )
        for trial in self.trials:
            losses = state["losses"].get(trial.name, {})
            trial.losses = {int(step): loss for step, loss in losses.items()}

    def table(self) -> str:
        """Return the losses of all trials by step, the best first."""
        steps = list(self.rounds())
        rows = [
            [*(f"{value:g}" for value in trial.settings.values()), *(_said(trial.losses.get(step)) for step in steps)]
            for trial in sorted(self.trials, key=_place)
        ]
        before = next(trial.losses[0] for trial in self.trials if 0 in trial.losses)
        table = fitted([*self.trials[0].settings, *(f"step {step}" for step in steps)], rows)
        return f"validation loss, {before:.4f} before training\n\n{table}"

    def picture(self) -> Figure:
        """Plot the losses over the learning rate: a colour for each other setting, a panel for each round."""
        figure, panels = plt.subplots(1, len(ROUNDS), figsize=(11, 3.5), sharey=True, layout="constrained")
        others = sorted({tuple(trial.settings.items())[1:] for trial in self.trials})
        for axes, step in zip(panels, self.rounds(), strict=True):
            for own in others:
                points = sorted(
                    (trial.settings["learning_rate"], trial.losses[step])
                    for trial in self.trials
                    if tuple(trial.settings.items())[1:] == own and math.isfinite(trial.losses.get(step, math.inf))
                )
                label = ", ".join(f"{name} {value:g}" for name, value in own)
                axes.plot(*zip(*points, strict=True) if points else ((), ()), marker="o", label=label)
            axes.set(xscale="log", xlabel="learning rate", title=f"step {step}")
        panels[0].set_ylabel("validation loss")
        if any(others):
            panels[0].legend()
        return figure


def _place(trial: Trial) -> tuple[int, float]:
    """Sort those that came further before others, and these by their last loss."""
    last = max(trial.losses, default=0)
    return -last, trial.losses.get(last, math.inf)


def _said(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}" if math.isfinite(loss) else "failed"


def sweep_of(arguments: Sequence[str] | None = None) -> Sweep:
    """Return what a command line asks for; every run is checked.

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
    if options.steps < ROUNDS[0] or options.steps % ROUNDS[0]:
        raise BadInputError(f"steps is {options.steps}, but must be a multiple of {ROUNDS[0]}: pass --steps 40.")
    if options.at_once < 1:
        raise BadInputError(f"at_once is {options.at_once}, but must be at least 1: pass --at_once 1.")
    folder = folder_named(options.run_folder)
    workflows_of(folder)
    values = {name: dict.fromkeys(getattr(options, name)) for name in SWEPT if getattr(options, name)}
    trials = [Trial(dict(zip(values, each, strict=True))) for each in product(*values.values())]
    if len(trials) < 2:
        raise BadInputError("There is one run, and nothing to choose from: pass two or more values to --learning_rate.")
    run = run_of_folder(folder, overrides, [f"--{name}" for name in SWEPT])
    run = run.changed_to(run_name=run.run_name or "sweep")
    for trial in trials:
        run.changed_to(**trial.settings)
    return Sweep(run, options.run_folder, overrides, options.steps, trials, options.at_once)


@refused_in_one_sentence()
def main() -> None:
    """Take a sweep; print its table and the best run's command, and draw its picture."""
    sweep = sweep_of()
    sweep.go_on()
    best = sweep.take()[0]
    sweep.picture().savefig(sweep.results / PICTURE)
    chosen = [part for name, value in best.settings.items() for part in (f"--{name}", f"{value:g}")]
    command = shlex.join([sweep.folder, *sweep.overrides, *chosen])
    print(f"\n{sweep.table()}\n\npicture: {sweep.results / PICTURE}\nbest: {command_here('launch')} {command}")


if __name__ == "__main__":
    main()
