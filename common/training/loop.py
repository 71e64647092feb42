"""The loop over optimizer steps: it hands out their batches, and does what comes with each step.

    loop = TrainingLoop(model, tokenizer, data, log)
    for step in loop.steps():
        for batch, is_last in step:
            loop.loss(batch, step.label_count).backward()
        loop.update()

A loss is a sum over a batch's labels, over the labels of the step's batches on all ranks: whatever the ranks and
micro-batches that a step's rows are divided among, the sum of all losses is the same mean, and so is its gradient.
"""

import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.utils.data import DataLoader
from transformers import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    set_seed,
)
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, ExportableState

from common.base.errors import NotPlannedError, RunStoppedError
from common.base.run_config import LAST
from common.data.batches import (
    SORTED_STEPS,
    EpochBatches,
    PartitionedBatches,
    RepeatedBatch,
    TrainingRows,
    filler_like,
    lay_end_to_end,
    longest_batch,
)
from common.data.row_checks import say_summary, summary_of
from common.data.rows import Splits, Tokens, tokens_in
from common.data.splits import tokenized
from common.models.compiled_layers import as_written
from common.models.placement import evaluation_of_rows
from common.models.shards import free_model
from common.planning.job import BatchShape, EvaluationShape
from common.planning.plan_texts import why
from common.planning.plans import Plan, plan_run
from common.runtime.faults import fault_at
from common.runtime.recorder import RunRecorder
from common.runtime.watch import reached
from common.training.answer_logits import Batch
from common.training.callbacks import FirstStepReport, ProgressReport, UpdateReport, WorkDone
from common.training.optimizers import make_optimizer, make_schedule, training_arguments
from common.training.part import part_class
from common.training.saver import Saver


@dataclass(frozen=True)
class Step:
    """One optimizer step: this rank's batches, as they are needed, and the labels of all ranks' batches together."""

    batches: Iterator[Batch]
    batch_count: int
    label_count: int

    def __iter__(self) -> Iterator[tuple[Batch, bool]]:
        """Yield each batch, and whether it is the step's last."""
        for number in range(1, self.batch_count + 1):
            yield next(self.batches), number == self.batch_count


class TrainingLoop:
    """Rows, loss, optimizer, schedule, reports, validation and checkpoints of a training; `steps()` hands out the work.

    Attributes:
        part: What this rank holds of the model.
        model: What is trained, without what stands around it in training.
        args, state, control: What callbacks are told, as by Transformers' Trainer.
        loss_sum: Sum of the losses since the last log, as far as this rank knows it.
        skipped_steps: Steps that were not taken, as their fp16 gradients overflowed.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        data: Splits,
        log: RunRecorder,
        optimizer: torch.optim.Optimizer | None = None,
        plan: Plan | None = None,
    ) -> None:
        """Prepare to train `module`: a model, DDP, FSDP, DeepSpeed's engine, or a `Pipeline`; called on every rank.

        `data` are rows, or their tokens. Without an `optimizer` the run's is made, without a `plan` the run is planned.
        """
        self.log, self.run, self.rank, self.tokenizer = log, log.run, log.rank, tokenizer
        run = log.run
        set_seed(run.seed + log.rank.rank % run.sp_size)  # dropout differs along a row
        learnt = tokenized(data, tokenizer, run)
        self._tell_of_rows(learnt, plan)
        self.train_rows, self.validation_rows = TrainingRows(learnt.train), learnt.validation
        self.args = training_arguments(run, log.folder / "checkpoints", keeps=log.keeps, run_name=log.run_name)
        self.args.place_on(log.rank.device)
        self.part = part_class(run)(module, run, log.rank)
        self.model, self.objective = self.part.model, self.part.objective
        self.part.optimizer = self.optimizer = optimizer or make_optimizer(self.model, run)
        self.collate = self.objective.collator(tokenizer, self.model, run)
        self.batches = self._draw()
        self.steps_per_epoch = math.ceil(len(self.batches) / self.batches.accumulation_steps)
        steps = run.total_steps(len(self.train_rows))
        self.schedule = make_schedule(self.optimizer, run, steps)
        self.scaler = torch.amp.GradScaler(torch.device(log.rank.device).type, enabled=self.args.fp16)
        self.work, self.updates, self.skipped_steps = WorkDone(), UpdateReport(), 0
        self.loss_sum, self.logged_step = torch.zeros((), device=log.rank.device), 0
        self.grad_norm, self.learning_rate, self.noted = self.loss_sum, 0.0, Counter[str]()
        self.state = TrainerState(max_steps=steps, num_train_epochs=math.ceil(steps / self.steps_per_epoch))
        self.state.is_world_process_zero = self.state.is_local_process_zero = log.rank.is_main
        self.state.compute_steps(self.args, steps)
        self.control = TrainerControl()
        self.saver = Saver(self.part, log, len(self.train_rows)) if log.keeps else None
        self.handler = CallbackHandler(self._callbacks(), self.model, tokenizer, self.optimizer, self.schedule)
        log.step = lambda: self.state.global_step
        self._tell("on_init_end")

    def _tell_of_rows(self, learnt: Splits, plan: Plan | None) -> None:
        log, run = self.log, self.run
        log.data = summary_of(learnt.train, learnt.validation, run)
        if not log.keeps:
            return
        if log.rank.is_main:
            print(say_summary(log.data, run))
        evaluation = evaluation_of_rows(run, learnt.validation, learnt.test, self.tokenizer)
        if plan:
            plan = replace(plan, job=replace(plan.job, evaluation=evaluation))
        log.training_starts(plan or plan_training(log, longest_batch(learnt.train, run.rows_per_rank, run), evaluation))

    def _draw(self) -> EpochBatches:
        run, rank = self.run, self.rank
        drawn = partial(PartitionedBatches, parts=run.partition_count) if run.goal.summarizes else EpochBatches
        groups = run.data_parallel_ranks
        return (RepeatedBatch if self.log.repeats else drawn)(
            list(map(tokens_in, self.train_rows.rows)),
            run.rows_drawn,
            groups,
            rank.rank * groups // rank.world_size,
            run.seed,
            1 if run.goal.rewards else run.gradient_accumulation_steps,
            SORTED_STEPS if run.groups_by_length else 1,
        )

    def _callbacks(self) -> list[TrainerCallback]:
        run, rank = self.run, self.rank
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(self.log.folder / "tensorboard")  # Transformers takes it from here
        callbacks = [DefaultFlowCallback(), *self.log.callbacks]
        if not self.log.keeps:
            return callbacks
        callbacks += [each() for each in get_reporting_integration_callbacks(self.args.report_to)]
        callbacks += [ProgressReport(rank, run.log_format), self.updates]
        if run.early_stopping_patience:
            callbacks.append(EarlyStoppingCallback(run.early_stopping_patience))
        tells = rank.is_main or (run.data_parallel_ranks > 1 and rank.rank % run.sp_size == 0)
        callbacks.append(FirstStepReport(rank, self.work, self.tokenizer, tells))
        if self.part.usage:
            callbacks.append(self.part.usage)
        return [*callbacks, self.saver.schedule]  # after what counts how much ranks send

    def steps(self) -> Iterator[Step]:
        """Yield each optimizer step with this rank's batches, the first after the checkpoint where the run resumes.

        The caller back-propagates the losses of its batches and calls `update`; before the next one come schedule, log,
        validation and checkpoint. At the end the model has the weights of the best checkpoint.
        """
        start_s = time.perf_counter()
        if self.saver:
            self.saver.begin(self.state)
        if self.saver and self.saver.resumes_from:
            self._resume()
        self._tell("on_train_begin")
        if self.saver and not self.saver.resumes_from:
            self._validate_before()
        self.work.reporting_s += time.perf_counter() - start_s
        for epoch in range(self.state.global_step // self.steps_per_epoch, self.state.num_train_epochs):
            self.batches.set_epoch(epoch)
            first = self.state.global_step - epoch * self.steps_per_epoch  # of the epoch, after a checkpoint
            last = self.state.max_steps - epoch * self.steps_per_epoch
            self._tell("on_epoch_begin")
            yield from self._steps_of(list(self.batches.steps())[first:last])
            self._tell("on_epoch_end")
            if self.control.should_training_stop:
                break
        if self.saver:
            self.saver.load_best(self.state)
        as_written(self.model)
        self._tell("on_train_end")

    def _steps_of(self, rows_of_steps: list[list[int]]) -> Iterator[Step]:
        own = [self.own_batches(rows) for rows in rows_of_steps]
        loader = self._loader(self.train_rows, [each for batches in own for each in batches], self.batch_of)
        loaded = map(self._counted, loader)
        for rows, batches in zip(rows_of_steps, own, strict=True):
            self._tell("on_step_begin")
            label_count = sum(self.objective.labels_in(self.train_rows[row]) for row in rows)
            yield Step(loaded, len(batches), label_count)
            self._end_step()
            if self.control.should_training_stop or self.control.should_epoch_stop:
                return

    def own_batches(self, rows: list[int]) -> list[list[int]]:
        """Return this rank's share of a step's rows, batch by batch; every rank has as many."""
        return list(map(self.batches.own, self.batches.micro_batches(rows)))

    def _loader(
        self, rows: Sequence[Tokens] | TrainingRows, batches: list[list[int]], collate: Callable[[list[Tokens]], Batch]
    ) -> DataLoader:
        workers, own_numbers = self.args.dataloader_num_workers, torch.Generator()
        return DataLoader(rows, batch_sampler=batches, collate_fn=collate, num_workers=workers, generator=own_numbers)

    def _counted(self, batch: Batch) -> Batch:
        self.reach("batch")
        self.work.count(batch["row"], batch)  # before the batch moves: a GPU would be waited for
        return batch

    def batch_of(self, rows: list[Tokens]) -> Batch:
        """Return training rows as one batch, packed without padding or padded."""
        if self.run.is_padding_free:
            return self.part.inputs_for_loss(lay_end_to_end(rows))
        return self.collated(rows)

    def collated(self, rows: list[Tokens]) -> Batch:
        """Return rows as one batch, padded, and filled up as the part needs it."""
        return self.part.inputs_for_loss(self.collate(self.part.fill(rows)))

    def loss(self, batch: Batch, label_count: int) -> torch.Tensor:
        """Return the sum of a batch's losses over `label_count`, the labels of its step; with fp16 scaled up."""
        loss = self.part.loss(batch, label_count)
        self.add_loss(loss)
        return self.scaler.scale(loss)

    def add_loss(self, loss: torch.Tensor) -> None:
        """Count a loss that was computed elsewhere, as by a pipeline's schedule, for the next log."""
        self.loss_sum += loss.detach()

    def note(self, **sums: float) -> None:
        """Add sums of a step, and their `count`, the same ones on every rank: the next log has the means."""
        self.noted.update(sums)

    def update(self) -> None:
        """Clip the gradients, take the optimizer's step, and forget them; a RunStoppedError if they are not finite."""
        self.scaler.unscale_(self.optimizer)
        self.grad_norm = self.part.clip_gradients(self.args.max_grad_norm)
        self._check_finite(self.grad_norm)
        self.reach("update")
        self._tell("on_pre_optimizer_step")
        scale, self.learning_rate = self.scaler.get_scale(), self.optimizer.param_groups[0]["lr"]
        self.part.step(self.scaler)
        self.skipped_steps += self.scaler.get_scale() < scale
        self._tell("on_optimizer_step")
        self.part.forget_gradients()

    def _check_finite(self, norm: torch.Tensor) -> None:
        if not self.args.fp16 and not math.isfinite(norm):  # with fp16 the loss is scaled less from then on
            step = self.state.global_step
            raise RunStoppedError(
                f"The gradients of step {step + 1} are not finite (norm {float(norm)}), and would spoil every weight: "
                f"the step was not taken, and nothing was saved after step {step}. Lower --learning_rate or look at "
                f"the step's rows; --resume_from_checkpoint {LAST} resumes from the newest checkpoint."
            )

    def _end_step(self) -> None:
        taken = self.state.global_step + 1 - self.skipped_steps
        if taken > self.schedule.last_epoch:
            self.schedule.step()
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / self.steps_per_epoch
        self._tell("on_step_end")
        with self._reporting():
            if self.saver:
                self.saver.commit_if_written(self.control.should_evaluate, self.state.global_step)
            if self.control.should_log:
                self._log_steps()
            if self.control.should_evaluate:
                self._choose(self.evaluate())
            if self.control.should_save:
                self._save()

    def _log_steps(self) -> None:
        """Log the means since the last log, over all ranks."""
        steps, self.logged_step = self.state.global_step - self.logged_step, self.state.global_step
        sums = torch.stack([self.loss_sum, *map(self.loss_sum.new_tensor, self.noted.values())])
        loss, *totals = self.part.sum_over_ranks(sums).tolist()
        noted = dict(zip(self.noted, totals, strict=True))
        count = noted.pop("count", 1)
        means = {name: total / count for name, total in noted.items()}
        figures = {"loss": loss / steps, "grad_norm": float(self.grad_norm), "learning_rate": self.learning_rate}
        self.loss_sum, self.noted = torch.zeros_like(self.loss_sum), Counter()
        self._log(figures | means)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Time what follows a step, and may take longer than one."""
        start_s = time.perf_counter()
        if self.control.should_log or self.control.should_evaluate or self.control.should_save:
            self.reach("validation")
        yield
        self.reach("load")
        self.work.reporting_s += time.perf_counter() - start_s

    def _validate_before(self) -> None:
        """Log what training starts from; no checkpoint is chosen by it."""
        self.reach("validation")
        self._log(self.validate())
        self.part.forget_validation()
        self.reach("load")

    def evaluate(self) -> dict[str, float]:
        """Validate, tell callbacks of it, and return the metrics."""
        metrics = self.validate()
        self._log(metrics)
        self._tell("on_evaluate", metrics=metrics)
        return metrics

    def validate(self) -> dict[str, float]:
        """Return the metrics of all validation rows, such as the mean loss."""
        sums = []
        with self.log.memory.phase("validation"):
            for batch in self.validation_batches():
                sums.append(self.part.sums(batch))
                reached("validation", self.state.global_step)
        return self.objective.metrics(self.part.sum_over_ranks(torch.stack(sums).sum(0)))

    def validation_batches(self) -> Iterable[Batch]:
        """Yield this rank's share of the validation rows in batches, as many as other ranks."""
        rows, ranks = self.validation_rows, self.batches.world_size
        size, numbers = self.args.per_device_eval_batch_size * ranks, range(len(rows))
        shares = [list(numbers[start : start + size][self.batches.rank :: ranks]) for start in numbers[::size]]
        return self._loader(rows, shares, lambda share: self.validated(share or [filler_like(rows[0])]))

    def validated(self, rows: list[Tokens]) -> Batch:
        """Return validation rows as one batch: padded, or where ranks share the tokens of a row packed."""
        return (self.batch_of if self.run.sp_size > 1 else self.collated)(rows)

    def _choose(self, metrics: dict[str, float]) -> None:
        """Note whether the model is the best so far, and whether to save it, or a full state that is due."""
        value, best = metrics[self.args.metric_for_best_model], self.state.best_metric
        is_best = best is None or (value > best if self.args.greater_is_better else value < best)
        if is_best:
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step
        self.saver.schedule.meet(self.state)
        self.control.should_save = is_best or self.saver.schedule.is_due(self.state, self.control)

    def _save(self) -> None:
        stateful = [each for each in self.handler.callbacks if isinstance(each, ExportableState)]
        # not `self.control`: what has stopped may be told to train longer
        self.state.stateful_callbacks = {type(each).__name__: each.state() for each in stateful}
        with self.log.memory.phase("saving"):
            of_all = {"scaler": self.scaler.state_dict(), "skipped_steps": self.skipped_steps}
            self.saver.save(self.state, self.control, of_all)
        self._tell("on_save")

    def _resume(self) -> None:
        """Resume after a checkpoint's step, with its weights, optimizer and history; the schedule is this run's own."""
        before, of_all = self.saver.load()
        for name in ("global_step", "epoch", "log_history", "best_metric", "best_global_step", "best_model_checkpoint"):
            setattr(self.state, name, getattr(before, name))
        for each in self.handler.callbacks:  # how long an early stop has waited; how long it is to is this run's own
            saved = before.stateful_callbacks.get(type(each).__name__, {})
            vars(each).update(saved.get("attributes", {}))
        self.logged_step = self.state.global_step
        self.skipped_steps = of_all.get("skipped_steps", 0)
        self.schedule.last_epoch = self.state.global_step - self.skipped_steps - 1
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # it misses the steps of then
            self.schedule.step()
        self.scaler.load_state_dict(of_all["scaler"])
        if self.rank.is_main:
            print(f"resumes after step {self.state.global_step}, from {self.saver.resumes_from.name}")

    def _tell(self, event: str, **about: object) -> None:
        self.control = getattr(self.handler, event)(self.args, self.state, self.control, **about)

    def _log(self, figures: dict[str, float]) -> None:
        figures = {**figures, "epoch": self.state.epoch}
        self.state.log_history.append({**figures, "step": self.state.global_step})
        self._tell("on_log", logs=figures)

    def reach(self, point: str) -> None:
        """Report that this rank has reached a point of its step."""
        step = self.state.global_step + 1
        fault_at(point, step, self.model)
        reached(point, step)

    def free(self) -> None:
        """Free the memory of model, gradients and optimizer, also where a notebook still has names for them."""
        self.part.free()
        self.optimizer.state.clear()
        free_model(self.model)


def plan_training(log: RunRecorder, batch: BatchShape, evaluation: EvaluationShape) -> Plan | None:
    """Return the plan of a run whose largest batch on a rank is `batch`; rank 0 prints it, or why there is none."""
    batch = batch.padded_to(log.run.pad_to_multiple_of)
    try:
        plan = plan_run(log.run, batch, log.gpu(), evaluation)
        memory, gpu = plan.devices[plan.tightest], plan.cluster.gpus[plan.tightest]
        said = (
            f"planned: {memory.peak_gib:.2f} of {gpu.memory_gib:.1f} GiB per device ({batch.rows} rows of "
            f"{batch.length} tokens at most); {why(plan)}"
        )
    except NotPlannedError as unknown:
        plan, said = None, f"no plan: {unknown}"
    if log.rank.is_main:
        print(said)
    return plan
