"""A Transformers Trainer from a RunConfig, and what it proves about a run."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import EvalLoopOutput

from common.base.errors import BadInputError, RunStoppedError
from common.base.run_config import LAST, RunConfig
from common.data.batches import (
    EpochBatches,
    EpochLoader,
    PartitionedBatches,
    TrainingRows,
    longest_batch,
)
from common.data.row_checks import say_summary, summary_of
from common.data.rows import IGNORED_LABEL, Tokens
from common.models.loading import parameter_counts
from common.planning.job import BatchShape
from common.planning.plans import Plan, plan_run, why
from common.runtime.faults import fault_at
from common.runtime.recorder import RunLog
from common.runtime.watch import reached
from common.runtime.world import BACKENDS, Rank
from common.tasks.answers import ANSWERS, answer_results
from common.tasks.objectives import Objective, objective_of
from common.training.callbacks import FirstStepReport, ProgressReport, SkippedSteps, UpdateReport, WorkDone
from common.training.checkpointed_trainer import CheckpointedTrainer
from common.training.checkpoints import about_run


class CountingTrainer(CheckpointedTrainer):
    """A Trainer whose ranks see every row once per epoch, and count what they see.

    Losses are means over the answer tokens of the whole global batch (the Trainer counts them over ranks and
    micro-batches), so that one device and several compute the same step.
    """

    def __init__(self, *, batches: EpochBatches, work: WorkDone, objective: Objective, **kwargs: Any) -> None:
        """`batches` draws this rank's rows, `work` counts them; the rest goes to the Trainer."""
        super().__init__(compute_loss_func=objective.loss, **kwargs)
        # gradients in DDP's buckets, not beside them: the Trainer has no argument for it
        if self.accelerator.ddp_handler:
            self.accelerator.ddp_handler.gradient_as_bucket_view = True
        self.batches, self.work, self.objective = batches, work, objective
        self.updates, self.skips = UpdateReport(), SkippedSteps(self.accelerator)
        self.add_callback(self.updates)
        self.add_callback(self.skips)
        self.keeps_logits = keeps_logits(self.model)

    def get_train_dataloader(self) -> EpochLoader:
        """Batches drawn by `batches`: already this rank's share, so Accelerate must not divide them again."""
        return EpochLoader(
            self.train_dataset,
            batch_sampler=self.batches,
            collate_fn=self.data_collator,
            pin_memory=self.args.device.type == "cuda",
        )

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Count the mini-batch, then train on it."""
        self.reach("batch")
        self.work.count(inputs.pop("row"), inputs)
        batch = self.with_kept_logits(inputs) if self.keeps_logits else inputs
        return super().training_step(model, batch, *args, **kwargs)

    def with_kept_logits(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """See `with_head_on_answers`."""
        batch = with_head_on_answers(inputs)
        if self.is_model_parallel:  # the head's device may be another than the inputs'
            batch["logits_to_keep"] = batch["logits_to_keep"].tolist()
        return batch

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Time what is no training: logging, validation and checkpoints."""
        with self.reporting():
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], *_: Any, **__: Any
    ) -> tuple[None, torch.Tensor, torch.Tensor]:
        """What each row of a validation batch counts for (`Objective.results`), and its labels; no batch's loss."""
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            results = self.results_of(model, inputs)
        reached("validation", self.state.global_step)
        return None, results, inputs["labels"]

    @torch.no_grad()
    def results_of(self, model: Callable[..., Any], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """What each row counts for, shape (rows, k), by `model` with its dropout off.

        Logits are computed at answer positions alone: those of whole rows would be the run's highest peak where the
        vocabulary is large.
        """
        if self.keeps_logits:
            batch = self.with_kept_logits(inputs)
            names = ("input_ids", "attention_mask", "logits_to_keep")
            logits = model(**{name: batch[name] for name in names}, use_cache=False).logits
            return answer_results(logits, batch["labels"].to(logits.device))
        batch = {name: tensor for name, tensor in inputs.items() if name not in ("row", "labels")}
        return self.objective.results(model(**batch).logits, inputs["labels"])

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """What follows a step, and may take longer than one."""
        start_s = time.perf_counter()
        if self.control.should_log or self.control.should_evaluate or self.control.should_save:
            self.reach("validation")
        yield
        self.reach("load")
        self.work.reporting_s += time.perf_counter() - start_s

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor | float:
        """The norm over all ranks' gradients; a step that would spoil the weights is not taken."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.check_gradients(norm)
        self.reach("update")
        return norm

    def reach(self, point: str) -> None:
        """This rank has come to a point of the step that it works on."""
        step = self.state.global_step + 1
        fault_at(point, step, self.model)
        reached(point, step)

    def check_gradients(self, norm: torch.Tensor | float) -> None:
        """Refuse gradients that are not finite; with fp16 they may be, and the loss is scaled down.

        Raises:
            RunStoppedError: with the step, and where to resume from.
        """
        if not self.args.fp16 and not math.isfinite(norm):
            raise RunStoppedError(
                f"The gradients of step {self.state.global_step + 1} are not finite (norm {float(norm)}), and would "
                "spoil every weight: the step was not taken, and nothing was saved after step "
                f"{self.state.global_step}. Lower --learning_rate or look at the step's rows; --resume_from_checkpoint {LAST} "
                "resumes from the newest checkpoint."
            )

    def of_own_rows(self, of_ranks: list[Any]) -> list[Any]:
        """Of what each rank did, that of the ranks with rows of their own: with data parallel all of them."""
        return of_ranks

    def parameter_counts(self) -> tuple[int, int]:
        """Of the whole model: trained parameters, and all that multiply."""
        return parameter_counts(self.accelerator.unwrap_model(self.model))

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """None counted: the Trainer would look at every weight at every step; `training_flops` has the formula."""
        return 0


class SummaryTrainer(CountingTrainer, Seq2SeqTrainer):
    """The same on Transformers' trainer of encoder-decoders."""

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Every validation row once: Seq2SeqTrainer keeps those that a last batch was filled up with."""
        self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(*args, **kwargs)


def keeps_logits(model: torch.nn.Module) -> bool:
    """Whether the model can be told where to compute logits."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return "logits_to_keep" in signature(base.forward).parameters


def with_head_on_answers(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same batch, told to compute logits only where some row has an answer token to be predicted.

    The loss and its gradients stay the same: other positions have no label. `inputs` holds tensors of shape
    (rows, tokens); position t predicts token t + 1.
    """
    targets = inputs["labels"][:, 1:]
    positions = (targets != IGNORED_LABEL).any(0).nonzero().squeeze(1)
    targets = targets[:, positions]
    return {**inputs, "labels": targets, "shift_labels": targets, "logits_to_keep": positions}


def training_arguments(run: RunConfig, output_folder: Path) -> TrainingArguments:
    """The Trainer's settings, from the run's."""
    on_cpu = run.device == "cpu"
    kind = Seq2SeqTrainingArguments if run.goal.summarizes else TrainingArguments
    arguments = kind(
        output_dir=str(output_folder),
        per_device_train_batch_size=run.per_device_train_batch_size,
        per_device_eval_batch_size=run.per_device_eval_batch_size,
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        num_train_epochs=run.num_train_epochs,
        max_steps=run.max_steps,
        learning_rate=run.peak_learning_rate,
        lr_scheduler_type=run.lr_scheduler_type,
        warmup_steps=run.warmup_steps,
        optim=run.optim,
        weight_decay=run.weight_decay,
        max_grad_norm=run.max_grad_norm,
        gradient_checkpointing=run.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": run.use_reentrant} if run.gradient_checkpointing else None,
        bf16=run.precision.startswith("bf16"),
        fp16=run.precision == "fp16-mixed",
        use_cpu=on_cpu,
        ddp_backend=BACKENDS[run.device] if run.world_size > 1 else None,
        ddp_find_unused_parameters=False,
        eval_strategy="steps",
        eval_steps=run.eval_steps,
        logging_strategy="steps",
        logging_steps=run.eval_steps,
        save_strategy="steps",
        save_steps=run.eval_steps,
        save_total_limit=None,  # `rotate` removes, and only after the next checkpoint is there
        restore_callback_states_from_checkpoint=True,  # how long an early stop has waited
        load_best_model_at_end=True,
        metric_for_best_model=objective_of(run).best_metric,
        greater_is_better=objective_of(run).higher_is_better,
        logging_nan_inf_filter=False,  # a NaN loss is to be seen, not averaged away
        remove_unused_columns=False,
        report_to=run.report_to.split(","),
        disable_tqdm=True,
        seed=run.seed,
    )
    # the Trainer takes every GPU that it sees into `DataParallel`, or multiplies the loss by their number; reading
    # `n_gpu` makes it look for them, so that the number is not written over later
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def make_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: list[Tokens],
    validation: list[Tokens],
    log: RunLog,
    plan: Plan | None = None,
    trainer_class: Callable[..., CountingTrainer] = CountingTrainer,
) -> CountingTrainer:
    """The trainer of this rank, with its reports; nothing runs yet.

    `plan`: where layers were placed by one; else the run is planned now.
    """
    run, rank = log.run, log.rank
    log.data = summary_of(train, validation, run)
    if rank.is_main:
        print(say_summary(log.data, run))
    log.training_starts(plan or plan_training(log, longest_batch(train, run.rows_per_rank)))
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(log.folder / "tensorboard")  # Transformers takes it from here only
    arguments = training_arguments(run, log.folder / "checkpoints")
    arguments.run_name = log.run_name
    ranks = rank if run.data_parallel_ranks > 1 else replace(rank, rank=0, world_size=1)
    callbacks: list[TrainerCallback] = [ProgressReport(rank, run.log_format)]
    if run.early_stopping_patience:
        callbacks.append(EarlyStoppingCallback(run.early_stopping_patience))
    objective = objective_of(run)
    drawn = partial(PartitionedBatches, parts=run.partition_count) if run.goal.summarizes else EpochBatches
    trainer = trainer_of_rows(
        model, tokenizer, train, validation, arguments, ranks, callbacks, trainer_class, objective, drawn
    )
    trainer.add_callback(FirstStepReport(rank, trainer.work, tokenizer))
    check_precision(trainer, run)
    log.step = lambda: trainer.state.global_step
    trainer.about = about_run(run, len(train))
    trainer.find_start(log)
    return trainer


def plan_training(log: RunLog, batch: BatchShape) -> Plan | None:
    """The plan of a run whose largest batch on a rank is `batch`; rank 0 says it.

    A model, optimizer or GPU that the closed form does not know is told, and leaves the run without a plan.
    """
    try:
        plan = plan_run(log.run, batch, log.gpu())
    except BadInputError as unknown:
        if log.rank.is_main:
            print(f"no plan: {unknown}")
        return None
    if log.rank.is_main:
        memory, gpu = plan.devices[plan.tightest], plan.cluster.gpus[plan.tightest]
        largest = f"{batch.rows} rows of {batch.length} tokens at most"
        print(f"planned: {memory.peak_gib:.2f} of {gpu.memory_gib:.1f} GiB per device ({largest}); {why(plan)}")
    return plan


def check_precision(trainer: CountingTrainer, run: RunConfig) -> None:
    """Refuse to compute in another precision than the run's: `accelerate launch` brings one from its file.

    Raises:
        BadInputError: with both precisions.
    """
    asked = {"fp32": "no", "fp16-mixed": "fp16"}.get(run.precision, "bf16")
    found = trainer.accelerator.mixed_precision
    if found != asked:
        raise BadInputError(
            f"The run's precision is {run.precision}, but Accelerate was told mixed_precision {found}: "
            "write 'no' into the file that `accelerate launch` reads."
        )


def trainer_of_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: list[Tokens],
    validation: list[Tokens],
    arguments: TrainingArguments,
    rank: Rank,
    callbacks: list[TrainerCallback],
    trainer_class: Callable[..., CountingTrainer] = CountingTrainer,
    objective: Objective = ANSWERS,
    batches_class: Callable[..., EpochBatches] = EpochBatches,
) -> CountingTrainer:
    """The trainer of this rank: rows drawn once per epoch, losses over what is to be predicted only.

    `rank` is the one among those with rows of their own; `batches_class` says how they are drawn.
    """
    lengths = [len(row["input_ids"]) for row in train]
    trainer = trainer_class(
        model=model,
        args=arguments,
        train_dataset=TrainingRows(train),
        eval_dataset=validation,
        data_collator=objective.collator(tokenizer, model),
        compute_metrics=lambda prediction: objective.metrics(prediction.predictions.sum(0)),
        objective=objective,
        batches=batches_class(
            lengths,
            arguments.per_device_train_batch_size,
            rank.world_size,
            rank.rank,
            arguments.seed,
            arguments.gradient_accumulation_steps,
        ),
        work=WorkDone(),
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)  # ProgressReport says it with the rank's prefix
    return trainer
