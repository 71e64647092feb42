"""Find a learning rate, and perhaps a rank, by short runs of a run folder; Optuna ends those that fall behind.

python -m common.sweep 2.1_lora_finetuning/run_0_cpu_x1 --learning_rate 2e-4 1e-3 5e-3 --lora_r 8 32 --data my_rows.csv

Asynchronous successive halving (Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning"): after a
quarter and after half of its steps a run continues only if it is among the better half of those that came so far.
The middle rates run first. An interrupted sweep continues where the same command is given again.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from queue import SimpleQueue
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from common.base.command_line import BAD_INPUT_EXIT_CODE, refused_in_one_sentence
from common.base.errors import BadInputError, RunStoppedError, check_installed
from common.base.parsing import OneSentenceParser
from common.base.paths import command_here
from common.base.run_config import RunConfig
from common.base.run_folders import folder_named, workflows_of
from common.checks.folder_runs import run_of_folder
from common.hardware.devices import gpus
from common.reporting.layout import fitted
from common.runtime.watch import die_with_parent
from common.tasks.objectives import VALIDATION_LOSS

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

PARTS = (4, 2, 1)  # all steps over those after which runs are compared
SWEPT = ("learning_rate", "lora_r")
OWN = ("max_steps", "eval_steps", "test_rows", "baseline", "log_format")  # settings that a sweep gives its runs
WEIGHTS = ("checkpoints", "adapter", "merged", "model")  # folders of a run's results, which a sweep does not keep
JOURNAL, PICTURE = "sweep.log", "sweep.png"


@dataclass(frozen=True)
class Sweep:
    """Runs of a folder that differ in the settings of a grid."""

    run: RunConfig
    folder: str
    overrides: list[str]
    steps: int
    grid: dict[str, list[float]]
    groups: SimpleQueue  # of each run that may go on at the same time, the GPUs that it sees; empty = all
    refusals: list[Exception] = field(default_factory=list)

    def study(self) -> "Study":
        """Return Optuna's study, begun or continued, with every combination waiting that has not ended.

        Raises:
            BadInputError: a sweep of this name had other settings.
        """
        from optuna import create_study, logging  # here: it is an extra
        from optuna.pruners import SuccessiveHalvingPruner
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
        from optuna.trial import TrialState

        logging.set_verbosity(logging.CRITICAL)  # runs, and why one ended, are told of below
        folder = self.run.results_folder(self.run.run_name)
        folder.mkdir(parents=True, exist_ok=True)
        study = create_study(
            study_name=self.run.run_name,
            storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL))),
            pruner=SuccessiveHalvingPruner(min_resource=self.steps // PARTS[0], reduction_factor=2),
            load_if_exists=True,
        )
        asked = {"folder": self.run.run_folder, "overrides": self.overrides, "steps": self.steps, "grid": self.grid}
        if study.user_attrs.setdefault("asked", asked) != asked:
            raise BadInputError(
                f"The sweep {self.run.run_name} had other settings ({study.user_attrs['asked']}): repeat them, or pass "
                "another --run_name."
            )
        study.set_user_attr("asked", asked)
        for trial in study.get_trials(states=[TrialState.RUNNING]):
            study.tell(trial.number, state=TrialState.FAIL)  # it was interrupted
        ended = [trial.params for trial in study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED])]
        ended += [trial.system_attrs["fixed_params"] for trial in study.get_trials(states=[TrialState.WAITING])]
        for settings in self.combinations():
            if settings not in ended:
                study.enqueue_trial(settings)
        return study

    def combinations(self) -> list[dict[str, float]]:
        """Return the settings of all runs, those in the middle of the first setting's values first."""
        first, *others = self.grid.values()
        middle = sorted(first, key=lambda value: abs(sorted(first).index(value) - (len(first) - 1) / 2))
        return [dict(zip(self.grid, each, strict=True)) for each in product(middle, *others)]

    def take(self, trial: "Trial") -> float:
        """Run one combination, and return its last validation loss.

        Raises:
            TrialPruned: it has fallen behind, or failed on the way.
            RunStoppedError: it ended before its first step.
            BadInputError: it was refused.
        """
        from optuna import TrialPruned

        settings = {name: trial.suggest_categorical(name, values) for name, values in self.grid.items()}
        name, group, last_line, loss = name_of(settings), self.groups.get(), "", None
        own = {"CUDA_VISIBLE_DEVICES": group} if group else {}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        command = [sys.executable, "-m", "common.launch", self.folder, *self.options_of(settings)]
        with subprocess.Popen(command, env=os.environ | own, preexec_fn=die_with_parent, **streams) as process:
            for line in process.stdout:
                last_line = line.strip() or last_line
                figures = _figures_in(line)
                if VALIDATION_LOSS not in figures:
                    continue
                step, loss = figures["step"], figures[VALIDATION_LOSS]
                print(f"{name}: step {step}/{self.steps}, validation loss {loss:.4f}", flush=True)
                trial.report(loss, step)
                has_fallen_behind = 0 < step < self.steps and trial.should_prune()
                if has_fallen_behind:
                    process.terminate()
                    break
            process.stdout.read()
        self.groups.put(group)
        for folder in WEIGHTS:
            shutil.rmtree(self.run.results_folder(f"{self.run.run_name}-{name}") / folder, ignore_errors=True)
        if process.returncode == BAD_INPUT_EXIT_CODE:
            raise self._refused(BadInputError(last_line.partition("error: ")[2] or last_line))
        if loss is None:
            raise self._refused(RunStoppedError(f"{name} ended before its first step: {last_line}"))
        if step < self.steps:
            print(f"{name}: ends early" if has_fallen_behind else f"{name} failed: {last_line}")
            raise TrialPruned
        return loss

    def _refused(self, error: Exception) -> Exception:
        """Keep an error, as Optuna does not raise those of the last runs where several go on at a time."""
        self.refusals.append(error)
        return error

    def options_of(self, settings: dict[str, float]) -> list[str]:
        """Return the settings of one run, as its command has them."""
        whole = {"max_steps": self.steps, "eval_steps": self.steps // PARTS[0], "test_rows": 1, "log_format": "json"}
        without_baseline = {} if self.run.goal.compares else {"baseline": "none"}
        named = {"run_name": f"{self.run.run_name}-{name_of(settings)}"}
        asked = {**settings, **whole, **without_baseline, **named}
        return [*self.overrides, *(part for name, value in asked.items() for part in (f"--{name}", str(value)))]


def _figures_in(line: str) -> dict[str, float]:
    with suppress(ValueError):
        found = json.loads(line)
        return found if isinstance(found, dict) else {}
    return {}


def name_of(settings: dict[str, float]) -> str:
    """Return what a combination is called: `learning_rate-0.001-lora_r-8`."""
    return "-".join(f"{name}-{value:g}" for name, value in settings.items())


def table(study: "Study") -> str:
    """Return the losses of all runs, those that came further first, and of these the best."""
    steps = [study.user_attrs["asked"]["steps"] // part for part in PARTS]
    trials = sorted(study.trials, key=lambda trial: (-len(trial.intermediate_values), _last_loss(trial)))
    rows = [
        [*(f"{value:g}" for value in trial.params.values()), *(_said(trial, step) for step in steps),
         trial.state.name.lower()]
        for trial in trials if trial.params
    ]  # fmt: skip
    before = next(trial.intermediate_values[0] for trial in trials)
    heads = [*study.user_attrs["asked"]["grid"], *(f"step {step}" for step in steps), "ended"]
    return f"validation loss, {before:.4f} before training\n\n{fitted(heads, rows)}"


def _last_loss(trial: "FrozenTrial") -> float:
    return trial.intermediate_values[max(trial.intermediate_values)] if trial.intermediate_values else float("inf")


def _said(trial: "FrozenTrial", step: int) -> str:
    return f"{trial.intermediate_values[step]:.4f}" if step in trial.intermediate_values else ""


def picture(study: "Study") -> Figure:
    """Plot the losses over the learning rate: a colour for each other setting, a panel for each comparison."""
    figure, panels = plt.subplots(1, len(PARTS), figsize=(11, 3.5), sharey=True, layout="constrained")
    others = sorted({tuple(trial.params.items())[1:] for trial in study.trials})
    for axes, part in zip(panels, PARTS, strict=True):
        step = study.user_attrs["asked"]["steps"] // part
        for own in others:
            points = sorted(
                (trial.params["learning_rate"], trial.intermediate_values[step])
                for trial in study.trials
                if tuple(trial.params.items())[1:] == own and step in trial.intermediate_values
            )
            label = ", ".join(f"{name} {value:g}" for name, value in own)
            axes.plot(*zip(*points, strict=True) if points else ((), ()), marker="o", label=label)
        axes.set(xscale="log", xlabel="learning rate", title=f"step {step}")
    panels[0].set_ylabel("validation loss")
    if any(others):
        panels[0].legend()
    return figure


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
    sweep = Sweep(run, options.run_folder, overrides, options.steps, grid, groups)
    if len(sweep.combinations()) < 2:
        raise BadInputError("There is one run, and nothing to choose from: pass two or more values to --learning_rate.")
    for settings in sweep.combinations():
        run_of_folder(folder, sweep.options_of(settings))
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
    check_installed("optuna", "common.sweep", "`pip install -e '.[sweep]'` in the repository's folder")
    study = sweep.study()
    if waiting := sum(not trial.state.is_finished() for trial in study.trials):
        study.optimize(sweep.take, n_trials=waiting, n_jobs=sweep.groups.qsize())
    if sweep.refusals:
        raise sweep.refusals[0]
    place = sweep.run.results_folder(sweep.run.run_name) / PICTURE
    picture(study).savefig(place)
    print(f"\n{table(study)}\n\npicture: {place}")
    if all(trial.state.name != "COMPLETE" for trial in study.trials):
        raise RunStoppedError("No run reached its last step: pass lower values to --learning_rate.")
    chosen = {**study.best_params, "run_name": f"{sweep.run.run_name}-best"}
    options = [part for name, value in chosen.items() for part in (f"--{name}", str(value))]
    print(f"best: {command_here('launch')} {shlex.join([sweep.folder, *sweep.overrides, *options])}")


if __name__ == "__main__":
    main()
