"""Seconds that a tool spends on training, with looks at the validation loss that do not count."""

import math
import sys
import time
from dataclasses import dataclass, field

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from bench.recipe import CHECKS_PER_EPOCH, MOST_EPOCHS, Material, Trial, validation_loss


@dataclass(frozen=True)
class Check:
    """One look at the validation loss."""

    step: float
    seconds: float
    """Of training, since the first batch was asked for."""
    loss: float


@dataclass
class Clock:
    """Counts a trial's seconds, checks the loss at the same steps for every tool, and says when to end."""

    trial: Trial
    material: Material
    checks: list[Check] = field(default_factory=list)
    step: int = 0
    start_s: float = 0.0
    checking_s: float = 0.0
    steps_per_epoch: int = 0
    """Optimizer steps; those of batches of as many rows, unless a tool says otherwise."""

    def __post_init__(self) -> None:
        """Count on batches of the trial's size."""
        self.steps_per_epoch = -(-len(self.material.train) // self.trial.batch_size)

    def start(self) -> None:
        """The first batch is asked for now."""
        self.start_s = time.perf_counter()

    def step_begins(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer step's batch is there."""

    def step_done(self, model: torch.nn.Module) -> bool:
        """Count one optimizer step; whether the trial is over: target reached, given up, or the loss is no number."""
        self.step += 1
        given_up = self.step >= self.trial.most_steps
        if not self._is_check_due():
            return given_up
        now_s = time.perf_counter()
        check = Check(self.step, now_s - self.start_s - self.checking_s, validation_loss(model, self.material))
        self.checks.append(check)
        print(
            f"step {check.step}: {check.seconds:.1f} s, validation loss {check.loss:.4f}", file=sys.stderr, flush=True
        )
        self.checking_s += time.perf_counter() - now_s
        return given_up or check.loss <= self.trial.target_loss or not math.isfinite(check.loss)

    def _is_check_due(self) -> bool:
        """Whether a quarter of an epoch ends with this step."""
        done, before = (step * CHECKS_PER_EPOCH // self.steps_per_epoch for step in (self.step, self.step - 1))
        return done > before


def reached(checks: list[Check], target: float) -> Check | None:
    """When the loss first fell to `target`, on the line of the log loss between two checks; None where it never did."""
    for before, after in zip([None, *checks], checks, strict=False):
        if after.loss <= target:
            if before is None:
                return after
            share = math.log(before.loss / target) / math.log(before.loss / after.loss)
            step = before.step + share * (after.step - before.step)
            return Check(step, before.seconds + share * (after.seconds - before.seconds), target)
    return None


def tokens_per_s(checks: list[Check], tokens_per_epoch: int, steps_per_epoch: int) -> float | None:
    """Non-padding tokens per second over the whole epochs that were trained, or None where there was none."""
    ends = [check for check in checks if check.step % steps_per_epoch == 0]
    if not ends:
        return None
    return ends[-1].step // steps_per_epoch * tokens_per_epoch / ends[-1].seconds


class ClockCallback(TrainerCallback):
    """The clock of a tool that is a Trainer."""

    def __init__(self, clock: Clock) -> None:
        """`clock` is started where training begins."""
        self.clock = clock

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Start: the first batch is asked for right after this. A tool that packs rows has other steps."""
        self.clock.steps_per_epoch = state.max_steps // MOST_EPOCHS
        self.clock.start()

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        **kwargs: object,
    ) -> None:
        """Tell the clock."""
        self.clock.step_begins(model, optimizer)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module,
        **kwargs: object,
    ) -> None:
        """End the training where the trial is over."""
        if self.clock.step_done(model):
            control.should_training_stop = True
