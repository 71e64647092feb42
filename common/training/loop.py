"""The loop over optimizer steps, written out, for every strategy whose steps the Trainer does not take.

Settings, optimizer, learning-rate schedule, reports and logs stay the Trainer's.
"""

import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import get_total_norm
from transformers import TrainerState
from transformers.trainer_callback import ExportableState
from typing_extensions import override

from common.data.rows import Tokens, without_labels
from common.runtime.watch import reached
from common.training.checkpoints import STATE_FILE, verify_once
from common.training.saves import CopiedCheckpoint
from common.training.strategy import Batch
from common.training.trainer import AuditedTrainer


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes:
        batches: This rank's, one or more for each accumulation step.
        num_items_in_batch: Labels of all ranks' batches: what the losses are divided by.
    """

    batches: list[Batch]
    num_items_in_batch: int

    def __iter__(self) -> Iterator[tuple[Batch, bool]]:
        """Yield each batch, and whether it is the step's last."""
        return ((batch, number == len(self.batches)) for number, batch in enumerate(self.batches, 1))


class LoopTrainer(AuditedTrainer):
    """A Trainer with the loop written out; what the ranks do differently from one device is the `strategy`'s.

    Callbacks hear of each optimizer step, not of epochs and of the micro-batches of a step.

    Attributes:
        loss_sum: Sum of the losses since the last log, as far as this rank knows it.
    """

    is_written_out = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rank = self.strategy.rank
        self.loss_sum = torch.zeros((), device=self.rank.device)
        self.logged_step = 0
        if self.strategy.measures_usage:
            self.add_callback(self.strategy.usage)

    # -- the loop

    def train(self) -> None:
        """Take all optimizer steps; at the end the model has the best checkpoint's weights, if that is asked for."""
        for step in self.steps():
            for batch, is_last in step:
                self.reach("batch")
                self.loss_sum += self.strategy.backward(batch, step.num_items_in_batch, is_last)
            self.strategy.finish_gradients()
            self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
            self.update()
            self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)

    def steps(self) -> Iterator[Step]:
        """Yield each optimizer step with this rank's batches, the first after `resume_checkpoint` if there is one.

        The caller takes the step before it asks for the next one; then schedule, log, validation and checkpoint follow.
        At the end the model has the weights of the best checkpoint, if that is asked for.
        """
        self._begin()
        for epoch in range(self.state.num_train_epochs):
            self.batches.set_epoch(epoch)
            for number, rows in enumerate(self.batches.steps(), epoch * self.steps_per_epoch + 1):
                if self.state.global_step == self.state.max_steps or self.control.should_training_stop:
                    break
                if number > self.state.global_step:  # else it was taken before the checkpoint
                    self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
                    yield self._step_of(rows)
                    self._end_step()
        with self.saves.holding_up():
            self.finish_save()
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            best = Path(self.state.best_model_checkpoint)
            verify_once(best, self.rank.is_main)
            self.strategy.load_weights(best)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)

    def update(self) -> None:
        """Take the optimizer's step, if the gradients are finite, and forget them."""
        self.look_at_gradients()
        self.strategy.update()

    def look_at_gradients(self) -> None:
        """Refuse to take a step by gradients that are not finite.

        Raises:
            RunStoppedError: see `check_gradients`.
        """
        self.check_gradients(get_total_norm(self.strategy.gradients()))
        self.reach("update")

    def _begin(self) -> None:
        """Make optimizer and schedule, prepare both and the model, and load the checkpoint to resume from."""
        self.steps_per_epoch = steps_per_epoch = ceil(len(self.batches) / self.args.gradient_accumulation_steps)
        steps = self.args.max_steps if self.args.max_steps > 0 else ceil(self.args.num_train_epochs * steps_per_epoch)
        self.create_optimizer_and_scheduler(steps)
        if self.args.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(self.args.gradient_checkpointing_kwargs)
        self.model.train()
        self.state.max_steps, self.state.num_train_epochs = steps, ceil(steps / steps_per_epoch)
        self.state.compute_steps(self.args, steps)
        self.optimizer = self.strategy.prepare(self.optimizer, self.accelerator)
        self.model = self.strategy.model
        self.callback_handler.optimizer, self.callback_handler.lr_scheduler = self.optimizer, self.lr_scheduler
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        if self.resume_checkpoint:
            self._resume(self.resume_checkpoint)

    def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
        """Make the Trainer's optimizer, with the parameter groups that the strategy needs."""
        optimizer = super().create_optimizer(*args)
        self.strategy.group_weights(optimizer)
        return optimizer

    def _end_step(self) -> None:
        self.lr_scheduler.step()
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / self.steps_per_epoch
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        with self.reporting():
            self.look_at_save()
            if self.control.should_log:
                loss = self.strategy.sum_over_ranks(self.loss_sum).item() / (self.state.global_step - self.logged_step)
                self.loss_sum, self.logged_step = torch.zeros_like(self.loss_sum), self.state.global_step
                self.log({"loss": loss, "learning_rate": self.lr_scheduler.get_last_lr()[0]})
            if self.control.should_evaluate:
                self.control.should_save = self._determine_best_metric(self.evaluate(), trial=None)
            if self.control.should_save:
                self._save_checkpoint(self.model)
                self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def evaluate(self, *_: object, **__: object) -> dict[str, float]:
        """Return the metrics of all validation rows, such as the mean loss."""
        sums = []
        with self.memory.phase("validation"):
            for batch in self.validation_batches():
                sums.append(self.strategy.sums(batch))
                reached("validation", self.state.global_step)
        metrics = self.strategy.objective.metrics(self.strategy.sum_over_ranks(torch.stack(sums).sum(0)))
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @override
    def back_propagate(self, rows: list[Tokens]) -> None:
        batches = self.at_once(rows)
        labels = sum(map(self.strategy.labels_in, rows)) * self.batches.world_size
        for batch, is_last in Step(batches, labels):
            self.strategy.backward(batch, labels, is_last)
        self.strategy.finish_gradients()

    @override
    def kept_buffers(self) -> list[torch.Tensor]:
        return self.strategy.kept_buffers()

    @override
    def forget_gradients(self) -> None:
        self.strategy.forget_gradients()

    @override
    def validate(self, rows: list[Tokens]) -> None:
        self.strategy.sums(self.collated(rows))

    # -- batches

    def _step_of(self, rows: list[int]) -> Step:
        batches = self.batches_of(rows)
        for batch in batches:
            self.work.count(batch["row"], batch)
        return Step(batches, num_items_in_batch=sum(self.strategy.labels_in(self.train_dataset[row]) for row in rows))

    def batches_of(self, rows: list[int]) -> list[Batch]:
        """Return this rank's collated batches of one optimizer step; every rank has as many."""
        at_once = self.batches.micro_batches(rows)
        own = [batch for rows in at_once for batch in self.batches.own_within_budget(rows)]
        return [self.batch_of([self.train_dataset[row] for row in batch]) for batch in own]

    def validation_batches(self) -> list[Batch]:
        """Return this rank's share of the validation rows; every rank has the same number of batches."""
        rows, ranks = self.eval_dataset, self.batches.world_size
        size = self.args.per_device_eval_batch_size * ranks
        shares = [rows[start : start + size][self.batches.rank :: ranks] for start in range(0, len(rows), size)]
        return [self.collated(list(share) or [without_labels(rows[0])]) for share in shares]  # they may be on disk

    # -- checkpoints

    def copied_parts(self, is_full: bool) -> dict[str, Any]:
        """Return a copy of what this rank writes, in the host's memory; called on every rank."""
        return self.strategy.copied(is_full)

    def write_checkpoint(self, folder: Path, checkpoint: CopiedCheckpoint) -> Future[Any] | None:
        """Write weights and optimizer, every rank's random numbers, and the history; or weights and history alone."""
        background = None
        if checkpoint.parts is not None:
            background = self.strategy.write_in_background(folder, checkpoint.parts)
        elif checkpoint.is_full:
            self.strategy.save(folder)
        else:
            self.strategy.save_weights(folder)
        if checkpoint.is_full:
            self._save_rng_state(str(folder))
            self.exchange_random_numbers(folder)
        for each in self.callback_handler.callbacks:  # not `self.control`: what has stopped may be told to train longer
            if isinstance(each, ExportableState):
                checkpoint.state.stateful_callbacks[type(each).__name__] = each.state()
        if self.writes:
            checkpoint.state.save_to_json(str(folder / STATE_FILE))
        return background

    def _resume(self, folder: Path) -> None:
        """Resume after a checkpoint's step, with its weights, optimizer and history; the schedule is this run's own."""
        self.strategy.load(folder)
        before = TrainerState.load_from_json(str(folder / STATE_FILE))
        for name in ("global_step", "epoch", "log_history", "best_metric", "best_global_step", "stateful_callbacks"):
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

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Leave the model where its strategy has put it."""
