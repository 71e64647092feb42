"""Seconds that a tool spends on training, with looks at the validation loss that do not count."""

import math
import sys
import time
from dataclasses import dataclass, field

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from bench.recipe import CHECKS_PER_EPOCH, MOST_EPOCHS, TARGET_LOSSES, Material, Trial, validation_loss


@dataclass(frozen=True)
class Check:
    """A look at the validation loss; `seconds` are of training, since the first batch was asked for."""

    step: int
    seconds: float
    loss: float


@dataclass
class Clock(TrainerCallback):
    """Counts a trial's seconds, checks the loss at the same steps for every tool, and says when to end."""

    trial: Trial
    material: Material
    checks: list[Check] = field(default_factory=list)
    step: int = 0
    start_s: float = 0.0
    checking_s: float = 0.0
    steps_per_epoch: int = 0

    def __post_init__(self) -> None:
        self.steps_per_epoch = -(-len(self.material.train) // self.trial.run.per_device_train_batch_size)

    def start(self) -> None:
        """Start: the first batch is asked for now."""
        self.start_s = time.perf_counter()

    def step_done(self, model: torch.nn.Module) -> bool:
        """Count one optimizer step; return whether the trial is over: target reached, or the loss is no number."""
        self.step += 1
        done, before = (step * CHECKS_PER_EPOCH // self.steps_per_epoch for step in (self.step, self.step - 1))
        if done == before:
            return False
        now_s = time.perf_counter()
        check = Check(self.step, now_s - self.start_s - self.checking_s, validation_loss(model, self.material))
        self.checks.append(check)
        print(f"{self.trial.tool}, {check}", file=sys.stderr, flush=True)
        self.checking_s += time.perf_counter() - now_s
        return check.loss <= self.target_loss or not math.isfinite(check.loss)

    @property
    def target_loss(self) -> float:
        """The loss at which the trial ends; 0 where only its speed is asked for."""
        return TARGET_LOSSES.get((self.trial.data, self.trial.technique), 0.0)

    @property
    def seconds_to_loss(self) -> float | None:
        """When the loss first fell to the target, on the line of the log loss between two checks; None: never."""
        for before, after in zip([None, *self.checks], self.checks, strict=False):
            if after.loss <= self.target_loss:
                if before is None:
                    return after.seconds
                share = math.log(before.loss / self.target_loss) / math.log(before.loss / after.loss)
                return before.seconds + share * (after.seconds - before.seconds)
        return None

    @property
    def tokens_per_s(self) -> float | None:
        """Non-padding tokens per second over the whole epochs that were trained, or None where there was none."""
        ends = [check for check in self.checks if check.step % self.steps_per_epoch == 0]
        if not ends:
            return None
        return ends[-1].step // self.steps_per_epoch * self.material.train_tokens / ends[-1].seconds

    # -- as the callback of a tool that is a Trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Start, with the steps of a tool that packs rows."""
        self.steps_per_epoch = state.max_steps // MOST_EPOCHS
        self.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: torch.nn.Module, **_: object
    ) -> None:
        """End the training where the trial is over."""
        if self.step_done(model):
            control.should_training_stop = True
