"""A Transformers Trainer from a RunConfig, and what it proves about a run."""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import gather_object, wait_for_everyone
from peft import PeftModel
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
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

from common.callbacks import (
    ACCURACY,
    VALIDATION_LOSS,
    FirstStepReport,
    ProgressReport,
    SkippedSteps,
    UpdateReport,
    WorkDone,
)
from common.checkpointed_trainer import CheckpointedTrainer
from common.checkpoints import about_run
from common.classification import CLASSES
from common.data import (
    IGNORED_LABEL,
    EpochBatches,
    EpochLoader,
    PartitionedBatches,
    Tokens,
    TrainingRows,
    longest_batch,
    make_collator,
)
from common.data_checks import say_summary, summary_of
from common.disks import send_folder
from common.failures import RunStoppedError
from common.faults import fault_at
from common.hardware import gpu_of_device, gpus
from common.launch import BACKENDS, Rank
from common.memory_plan import BatchShape
from common.models import check_equal_logits, load_base_model, next_token_logits, parameter_counts
from common.objectives import Objective, mean_loss
from common.planner import Plan, plan_run, why
from common.quantization import drop_quantized
from common.run_config import LAST, BadInputError, RunConfig
from common.run_record import RunLog
from common.summarization import SUMMARIES
from common.watch import reached


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
            RunStoppedError: with the step, and where to go on from.
        """
        if not self.args.fp16 and not math.isfinite(norm):
            raise RunStoppedError(
                f"The gradients of step {self.state.global_step + 1} are not finite (norm {float(norm)}), and would "
                "spoil every weight: the step was not taken, and nothing was saved after step "
                f"{self.state.global_step}. Lower --learning_rate or look at the step's rows; --resume_from {LAST} "
                "goes on from the newest checkpoint."
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


def answer_results(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of the losses, and number, of each row's answer tokens, shape (rows, 2).

    `logits` has shape (rows, positions, vocabulary), `targets`, what each position is to predict, (rows, positions).
    Row by row: fp32 copies of all rows' logits would take several times as much memory as the logits.
    """
    losses = [
        cross_entropy(row.float(), wanted, ignore_index=IGNORED_LABEL, reduction="sum")
        for row, wanted in zip(logits, targets, strict=True)
    ]
    return torch.stack([torch.stack(losses), (targets != IGNORED_LABEL).sum(1)], dim=1)


def whole_row_results(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The same of logits at all positions and of the tokens themselves: position t predicts token t + 1."""
    return answer_results(logits[:, :-1], labels[:, 1:])


ANSWERS = Objective(lambda tokenizer, _: make_collator(tokenizer), whole_row_results, mean_loss, VALIDATION_LOSS, False)
OBJECTIVES = {"chat": ANSWERS, "classification": CLASSES, "summarization": SUMMARIES}


def training_arguments(run: RunConfig, output_folder: Path) -> TrainingArguments:
    """The Trainer's settings, from the run's."""
    on_cpu = run.device == "cpu"
    checkpointing = run.gradient_checkpointing != "none"
    kind = Seq2SeqTrainingArguments if run.task == "summarization" else TrainingArguments
    arguments = kind(
        output_dir=str(output_folder),
        per_device_train_batch_size=run.batch_size,
        per_device_eval_batch_size=run.evaluation_batch_size,
        gradient_accumulation_steps=run.accumulation_steps,
        num_train_epochs=run.epochs,
        max_steps=run.max_steps,
        learning_rate=run.peak_learning_rate,
        lr_scheduler_type=run.scheduler,
        warmup_steps=run.warmup_share,
        optim=run.optimizer,
        weight_decay=run.weight_decay,
        max_grad_norm=run.max_grad_norm,
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": run.gradient_checkpointing == "reentrant"}
        if checkpointing
        else None,
        bf16=run.precision.startswith("bf16"),
        fp16=run.precision == "fp16-mixed",
        use_cpu=on_cpu,
        ddp_backend=BACKENDS[run.device] if run.world_size > 1 else None,
        ddp_find_unused_parameters=False,
        eval_strategy="steps",
        eval_steps=run.report_share,
        logging_strategy="steps",
        logging_steps=run.report_share,
        save_strategy="steps",
        save_steps=run.report_share,
        save_total_limit=None,  # `rotate` removes, and only after the next checkpoint is there
        restore_callback_states_from_checkpoint=True,  # how long an early stop has waited
        load_best_model_at_end=True,
        metric_for_best_model=OBJECTIVES[run.task].best_metric,
        greater_is_better=OBJECTIVES[run.task].higher_is_better,
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
    callbacks: list[TrainerCallback] = [ProgressReport(rank, run.figures)]
    if run.early_stop:
        callbacks.append(EarlyStoppingCallback(run.early_stop))
    objective = OBJECTIVES[run.task]
    drawn = partial(PartitionedBatches, parts=run.partition_count) if run.task == "summarization" else EpochBatches
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


def check_training(trainer: CountingTrainer, rank: Rank) -> list[dict[str, object]]:
    """The world after training: per rank its machine, device, samples and tokens; the same list on every rank.

    Raises:
        RuntimeError: a rank did nothing, rows were skipped or repeated, or the learning rate decayed at another pace
            than once per optimizer step that was taken.
    """
    work = trainer.work
    place = {"rank": rank.rank, "host": f"machine{os.environ.get('GROUP_RANK', '0')}", "device": rank.device}
    shares = gather_object([{**place, "samples": len(work.rows), "tokens": work.tokens, "rows": work.rows}])
    for share in shares:
        if share["samples"] == 0 and trainer.state.global_step > trainer.first_step:
            raise RuntimeError(f"Rank {share['rank']} of {len(shares)} trained on no row.")
    rows_by_rank = trainer.of_own_rows([share.pop("rows") for share in shares])
    check_rows_seen(rows_by_rank, len(trainer.train_dataset), row_uses(trainer), goes_on=trainer.first_step > 0)
    scheduled, skipped = trainer.lr_scheduler.last_epoch, trainer.skips.steps
    if scheduled + skipped != trainer.state.global_step:
        raise RuntimeError(
            f"The learning rate took {scheduled} steps, training {trainer.state.global_step}, of which {skipped} were "
            "skipped."
        )
    return shares


def check_rows_seen(rows_by_rank: list[list[int]], row_count: int, row_uses: int, goes_on: bool = False) -> None:
    """Every row was used once per epoch, by one rank only; in an epoch that ended early, at most once.

    `row_uses` is how many rows the steps had room for: epochs times rows, or less where training ended early, or where
    it `goes_on` after a checkpoint, and so began within an epoch.

    Raises:
        RuntimeError: rows were skipped or repeated.
    """
    times_used = Counter(row for rows in rows_by_rank for row in rows)
    if times_used.total() != row_uses:
        raise RuntimeError(f"{times_used.total()} rows were used, but the steps had room for {row_uses}.")
    full_epochs, rest = divmod(row_uses, row_count)
    allowed = (full_epochs, full_epochs + 1) if rest else (full_epochs,)
    if goes_on:  # part of a first epoch and part of a last one
        allowed = range(full_epochs - 1, full_epochs + 3)
    wrong = [row for row in range(row_count) if times_used[row] not in allowed]
    if wrong:
        raise RuntimeError(
            f"{len(wrong)} of {row_count} rows were used another number of times than {full_epochs}; "
            f"row {wrong[0]}: {times_used[wrong[0]]} times."
        )


def steps_per_epoch(trainer: CountingTrainer) -> int:
    """Optimizer steps in an epoch."""
    return -(-len(trainer.batches) // trainer.batches.accumulation_steps)


def row_uses(trainer: CountingTrainer) -> int:
    """Rows that the finished steps of this run had room for."""
    row_count = len(trainer.train_dataset)

    def until(step: int) -> int:
        epochs, rest_steps = divmod(step, steps_per_epoch(trainer))
        return epochs * row_count + min(rest_steps * trainer.batches.rows_per_step, row_count)

    return until(trainer.state.global_step) - until(trainer.first_step)


def training_figures(trainer: CountingTrainer, world: list[dict[str, object]], log: RunLog) -> dict[str, object]:
    """What the record says of training: steps, losses, speed, FLOPs, best checkpoint.

    `reporting_s` is the part of `train_time_s` that went into validation and checkpoints; tokens per second and MFU
    leave it out. `world` comes from `check_training`.
    """
    log.training_ended()
    history, run = trainer.state.log_history, log.run
    trained, multiplied = trainer.parameter_counts()
    flops = training_flops(trained, multiplied - trained, is_encoder_decoder=run.task == "summarization")
    train_time_s, reporting_s = log.phases_s["training"], trainer.work.reporting_s
    tokens = sum(trainer.of_own_rows([share["tokens"] for share in world]))
    tokens_per_s = tokens / (train_time_s - reporting_s)
    return {
        "world": world,
        "effective_batch_size": run.effective_batch_size,
        "peak_learning_rate": run.peak_learning_rate,
        "steps": trainer.state.global_step,
        "skipped_steps": trainer.skips.steps,
        "train_time_s": train_time_s,
        "reporting_s": reporting_s,
        "tokens_per_s": tokens_per_s,
        "trained_parameters": trained,
        **trainer.updates.figures(),
        **flops,
        "mfu": model_flops_utilization(tokens_per_s * flops["flops_per_token"] / run.devices, run),
        "training_losses": [[entry["step"], entry["loss"]] for entry in history if "loss" in entry],
        "validation_losses": [[entry["step"], entry[VALIDATION_LOSS]] for entry in history if VALIDATION_LOSS in entry],
        "best_validation_loss": min(entry[VALIDATION_LOSS] for entry in history if VALIDATION_LOSS in entry),
        **accuracy_figures(history),
        "checkpoints": {
            "best": Path(trainer.state.best_model_checkpoint).name,
            "went_on_from": trainer.goes_on_from.name if trainer.goes_on_from else None,
        },
    }


def accuracy_figures(history: list[dict[str, float]]) -> dict[str, object]:
    """With classification: the validation accuracy by step, and the best one, whose checkpoint is the model."""
    found = [[entry["step"], entry[ACCURACY]] for entry in history if ACCURACY in entry]
    return {"validation_accuracies": found, "best_accuracy": max(value for _, value in found)} if found else {}


def training_flops(
    trained_parameters: int, frozen_parameters: int, is_encoder_decoder: bool = False
) -> dict[str, object]:
    """Floating-point operations per token of a training step, and the formula.

    Forward 2N, the activations' gradients 2N, the weights' gradients 2N (Kaplan et al. 2020, section 2.1); frozen
    weights need no gradients of their own: 4N. Recomputation is not counted. With an encoder-decoder a token goes
    through one of the two, about half of the weights.
    """
    flops = 6 * trained_parameters + 4 * frozen_parameters
    if is_encoder_decoder:
        return {"flops_per_token": flops // 2, "flops_formula": "3N: each token through encoder or decoder"}
    formula = "4N frozen + 6N trained" if frozen_parameters else "6N full"
    return {"flops_per_token": flops, "flops_formula": formula}


def model_flops_utilization(flops_per_s: float, run: RunConfig) -> float | None:
    """MFU: a device's useful floating-point operations per second over its dense peak in the run's precision.

    None on CPU, and on a GPU that the catalogue does not know. (Chowdhery et al. 2022, "PaLM", appendix B.)
    """
    gpu = gpu_of_device(gpus()[1][0]) if run.device == "cuda" else None
    peak_tflops = gpu.tflops_dense[run.arithmetic] if gpu else None
    return flops_per_s / (peak_tflops * 1e12) if peak_tflops else None


def merge_and_reload(
    log: RunLog, trainer: CountingTrainer, tokenizer: PreTrainedTokenizerBase, device_map: dict[str, str]
) -> tuple[PreTrainedModel, dict[str, float]]:
    """Save the adapter and the merged model, load both again as any user would, and compare them with what was trained.

    Rank 0 writes `adapter` and `merged` into the results folder; every rank loads the merged model. The trainer's own
    model is given up on the way, so that a device holds no more than two models at a time.

    Returns:
        The merged model as plain Transformers loads it, and the largest absolute differences of logits.

    Raises:
        RuntimeError: what was saved is not what was trained.
    """
    run, adapter_folder, merged_folder = log.run, log.folder / "adapter", log.folder / "merged"
    trained = trainer.accelerator.unwrap_model(trainer.model)
    batch, expected = validation_logits(trainer, run)
    differences: dict[str, float] = {}
    if log.rank.is_main:
        trained.save_pretrained(adapter_folder)
    give_up(trainer, log.rank.device)
    if log.rank.is_main:
        reloaded = PeftModel.from_pretrained(load_base_model(run, device_map), adapter_folder)
        differences["adapter"] = check_equal_logits(expected, reloaded, batch, "adapter", run.precision)
        reloaded.merge_and_unload().save_pretrained(merged_folder)
        tokenizer.save_pretrained(merged_folder)
        del reloaded
    wait_for_everyone()
    tuned = load_base_model(run, device_map, source=merged_folder)
    differences["merged"] = check_equal_logits(expected, tuned, batch, "merged model", run.precision)
    return tuned, differences


def validation_logits(trainer: CountingTrainer, run: RunConfig) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The first batch of validation rows, and the trained model's logits of it, shape (rows, tokens, vocabulary)."""
    batch = trainer.data_collator(trainer.eval_dataset[: run.evaluation_batch_size])
    return batch, next_token_logits(trainer.accelerator.unwrap_model(trainer.model), batch)


def give_up(trainer: CountingTrainer, device: str) -> None:
    """Free the memory of a trainer's model, gradients and optimizer, also where a notebook still has names for them."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    trainer.optimizer.state.clear()
    trainer.model_wrapped = model  # DDP's wrapper has buckets as large as all gradients
    trainer.accelerator.free_memory()
    give_up_model(model, device)


def give_up_model(model: torch.nn.Module, device: str) -> None:
    """Free a model's memory, whoever else still has its weights: an optimizer's groups have, and DDP's wrapper."""
    remove_hook_from_module(model, recurse=True)  # Accelerate's, of a model on several devices: they forbid the move
    drop_quantized(model)
    for weight in model.parameters():
        if isinstance(weight, DTensor):  # FSDP keeps a view of its shard
            storage = weight.to_local().untyped_storage()
            if storage.resizable():
                storage.resize_(0)
    held = [*model.parameters(), *model.buffers()]
    model.to("meta")  # puts other tensors in their place
    for tensor in held:
        tensor.data, tensor.grad = tensor.new_empty(0), None
    if device != "cpu":
        torch.accelerator.empty_cache()


def save_and_reload(
    log: RunLog, trainer: CountingTrainer, tokenizer: PreTrainedTokenizerBase, device_map: dict[str, str | int]
) -> tuple[PreTrainedModel, dict[str, float]]:
    """Save the trained model as it is, load it again as any user would, and compare it with what was trained.

    Rank 0 writes `model` into the results folder, which each disk gets. The trainer's own model is given up on the way.

    Returns:
        The model as plain Transformers loads it, and the largest absolute difference of logits.

    Raises:
        RuntimeError: what was saved is not what was trained.
    """
    run, folder = log.run, log.folder / "model"
    batch, expected = validation_logits(trainer, run)
    if log.rank.is_main:
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    give_up(trainer, log.rank.device)
    wait_for_everyone()
    send_folder(folder, source=0, lacks=log.writes and not log.rank.is_main, rank=log.rank)
    tuned = load_base_model(run, device_map, source=folder)
    difference = check_equal_logits(expected, tuned, batch, "model", run.precision)
    return tuned, {"model": difference}
