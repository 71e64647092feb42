"""The loop over optimizer steps where a step is not the Trainer's own: a pipeline's, FSDP's, DeepSpeed's.

Settings, optimizer, learning-rate schedule, reports and logs stay the Trainer's.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import get_total_norm
from transformers import TrainerState
from transformers.trainer_callback import ExportableState

from common.data.rows import Tokens, labels_in, without_labels
from common.models.shards import local_part
from common.runtime.watch import reached
from common.runtime.world import Rank
from common.training.checkpoints import STATE_FILE, verify_once
from common.training.trainer import CountingTrainer

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One optimizer step."""

    batches: list[Batch]
    """This rank's, one for each accumulation step."""
    labelled: int
    """Labels of all ranks' batches: what the losses are divided by."""

    def __iter__(self) -> Iterator[tuple[Batch, bool]]:
        """Each batch, and whether it is the step's last."""
        return ((batch, number == len(self.batches)) for number, batch in enumerate(self.batches, 1))


class StepLoop(CountingTrainer, ABC):
    """Optimizer steps to be taken one by one, with all that belongs to a step but its gradients and its update."""

    def __init__(self, *, rank: Rank, **kwargs: Any) -> None:
        """`rank` is this process's place among all, also where all work on the same rows."""
        super().__init__(**kwargs)
        self.rank = rank
        self.loss_sum = torch.zeros((), device=rank.device)
        """Of the optimizer steps since the last log, as far as this rank knows it."""
        self.logged_step = 0

    # -- what subclasses add

    def start_step_maker(self) -> None:
        """What must be ready before the first step, once optimizer and schedule are there."""

    @abstractmethod
    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """What all ranks together know of a loss, or of several sums, on every rank."""

    @abstractmethod
    def sums_of(self, batch: Batch) -> torch.Tensor:
        """The sums of a validation batch's results (`Objective.results`), as far as this rank knows them."""

    @abstractmethod
    def save_weights(self, folder: Path) -> None:
        """Keep weights and optimizer in a folder; called on every rank."""

    @abstractmethod
    def load_weights(self, folder: Path) -> None:
        """Take back the weights and the optimizer that `save_weights` kept."""

    # -- the loop

    def steps(self) -> Iterator[Step]:
        """Each optimizer step with this rank's batches; whoever asks for the next one has taken this one.

        The first is the one after `goes_on_from`, where that is a checkpoint. Schedule, log, validation and checkpoint
        of a step follow when the next one is asked for. At the end the model has the weights of the lowest validation
        loss, if that is asked.
        """
        self._begin()
        if self.goes_on_from:
            self._resume(self.goes_on_from)
        number = 0
        for epoch in range(self.state.num_train_epochs):
            self.batches.set_epoch(epoch)
            for rows in self.batches.steps():
                if self.state.global_step == self.state.max_steps or self.control.should_training_stop:
                    break
                number += 1
                if number > self.state.global_step:
                    self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
                    yield self._step_of(rows)
                    self._end_step()
        if self.args.load_best_model_at_end:
            best = Path(self.state.best_model_checkpoint)
            verify_once(best, self.rank.is_main)
            self.load_weights(best)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)

    def _step_of(self, rows: list[int]) -> Step:
        batches = self.batches_of(rows)
        for batch in batches:
            self.work.count(batch["row"], batch)
        return Step(batches, labelled=sum(self.labels_in(self.train_dataset[row]) for row in rows))

    def labels_in(self, row: Tokens) -> int:
        """What is to be predicted in a row."""
        return labels_in(row)

    def update(self) -> None:
        """The optimizer's step, if the gradients are finite; they go."""
        self.look_at_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def look_at_gradients(self) -> None:
        """Refuse to go on with what is not finite.

        Raises:
            RunStoppedError: see `check_gradients`.
        """
        gradients = [local_part(weight.grad) for weight in self.model.parameters() if weight.grad is not None]
        self.check_gradients(get_total_norm(gradients))
        self.reach("update")

    def _end_step(self) -> None:
        self.lr_scheduler.step()
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / self.steps_per_epoch
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        with self.reporting():
            self._log_and_validate()

    def _begin(self) -> None:
        steps_per_epoch = ceil(len(self.batches) / self.args.gradient_accumulation_steps)
        steps = self.args.max_steps if self.args.max_steps > 0 else ceil(self.args.num_train_epochs * steps_per_epoch)
        self.steps_per_epoch = steps_per_epoch
        self.create_optimizer_and_scheduler(steps)
        if self.args.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(self.args.gradient_checkpointing_kwargs)
        self.model.train()
        self.state.max_steps, self.state.num_train_epochs = steps, ceil(steps / steps_per_epoch)
        self.state.compute_steps(self.args, steps)
        self.start_step_maker()
        self.callback_handler.optimizer, self.callback_handler.lr_scheduler = self.optimizer, self.lr_scheduler
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)

    def _log_and_validate(self) -> None:
        if self.control.should_log:
            loss = self.sum_over_ranks(self.loss_sum).item() / (self.state.global_step - self.logged_step)
            self.loss_sum, self.logged_step = torch.zeros_like(self.loss_sum), self.state.global_step
            self.log({"loss": loss, "learning_rate": self.lr_scheduler.get_last_lr()[0]})
        if self.control.should_evaluate:
            self._determine_best_metric(self.evaluate(), trial=None)
        if self.control.should_save:
            self._save_checkpoint(self.model)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def evaluate(self, *_: object, **__: object) -> dict[str, float]:
        """The metrics of all validation rows, such as the mean loss."""
        sums = []
        for batch in self.validation_batches(list(self.eval_dataset)):
            sums.append(self.sums_of(batch))
            reached("validation", self.state.global_step)
        metrics = self.objective.metrics(self.sum_over_ranks(torch.stack(sums).sum(0)))
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # -- batches

    def batches_of(self, rows: list[int]) -> list[Batch]:
        """This rank's collated batches of one optimizer step, one for each accumulation step."""
        shares = map(self.batches.own, self.batches.micro_batches(rows))
        return [self.collated([self.train_dataset[row] for row in share]) for share in shares]

    def validation_batches(self, rows: list[Tokens]) -> list[Batch]:
        """This rank's share of the validation rows; every rank has the same number of batches."""
        ranks = self.batches.world_size
        size = self.args.per_device_eval_batch_size * ranks
        shares = [rows[start : start + size][self.batches.rank :: ranks] for start in range(0, len(rows), size)]
        return [self.collated(share or [without_labels(rows[0])]) for share in shares]

    def collated(self, rows: list[Tokens]) -> Batch:
        """Rows as one batch."""
        return self.data_collator(rows)

    # -- checkpoints

    def write_checkpoint(self, folder: Path) -> None:
        """Weights and optimizer, every rank's random numbers, and the history."""
        self.save_weights(folder)
        self._save_rng_state(str(folder))
        for each in self.callback_handler.callbacks:  # not `self.control`: what has stopped may be told to train longer
            if isinstance(each, ExportableState):
                self.state.stateful_callbacks[type(each).__name__] = each.state()
        if self.writes:
            self.state.save_to_json(str(folder / STATE_FILE))

    def _resume(self, folder: Path) -> None:
        """Go on after a checkpoint's step, with its weights, optimizer and history; the schedule is this run's own."""
        self.load_weights(folder)
        before = TrainerState.load_from_json(str(folder / STATE_FILE))
        kept = ("global_step", "epoch", "log_history", "best_metric", "best_global_step", "stateful_callbacks")
        for name in kept:
            setattr(self.state, name, getattr(before, name))
        self._load_callback_state()  # how long an early stop has waited
        self.take_best_along(folder)
        self.logged_step = self.state.global_step
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # it misses the steps that were taken then
            for _ in range(self.first_step):
                self.lr_scheduler.step()
        self._load_rng_state(str(folder))
        if self.rank.is_main:
            print(f"resumes after step {self.first_step} of {self.state.max_steps}, from {folder.name}")


class LoopTrainer(StepLoop):
    """A trainer with the loop written out; what a step does to its micro-batches is the subclass's."""

    # -- what subclasses add

    @abstractmethod
    def add_gradients(self, batch: Batch, labelled: int, is_last: bool) -> torch.Tensor:
        """Forward and backward pass of one of this rank's batches of a step; its share of the step's loss.

        The step's loss is a mean over its `labelled` tokens on all ranks; `is_last`: no other batch follows.
        """

    @abstractmethod
    def complete_gradients(self) -> None:
        """What follows the passes of a step: the gradients become those of the whole model, and are clipped."""

    # -- the loop

    def train(self) -> None:
        """All optimizer steps; at the end the model has the weights of the lowest validation loss, if that is asked."""
        for step in self.steps():
            for batch, is_last in step:
                self.reach("batch")
                self.loss_sum += self.add_gradients(batch, step.labelled, is_last)
            self.complete_gradients()
            self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
            self.update()
            self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
