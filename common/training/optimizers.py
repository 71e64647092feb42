"""Optimizers and schedules by their names in Transformers: built for a run, and tried before a model loads."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import SchedulerType, TrainingArguments, get_scheduler
from transformers.trainer_pt_utils import get_parameter_names
from transformers.training_args import OptimizerNames

from common.base.errors import BadInputError, reading
from common.base.run_config import SHARDED_OPTIMIZERS, RunConfig, check_choice, names_in
from common.models.loading import weight_dtype
from common.runtime.world import BACKENDS
from common.tasks.objectives import objective_of

SCHEDULES = tuple(each.value for each in SchedulerType)
NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
WIDTH = 320
"""Of a square of weights: of fewer than 4,096 bitsandbytes' states have 32 bits, and of fewer than 100,000 no pages."""


class LoopArguments(TrainingArguments):
    """Transformers' settings of a training, without the devices and process groups that they would look for."""

    def __post_init__(self) -> None:
        """Check and start nothing."""


def optimizer_settings(run: RunConfig) -> dict[str, object]:
    """Return what `TrainingArguments` are told of optimizer and schedule."""
    return {
        "optim": run.optim,
        "learning_rate": run.peak_learning_rate,
        "lr_scheduler_type": run.lr_scheduler_type,
        "warmup_steps": run.warmup_steps,
        "weight_decay": run.weight_decay,
    }


def training_arguments(
    run: RunConfig,
    output_folder: Path,
    keeps: bool = True,
    kind: type[TrainingArguments] = LoopArguments,
    **more: Any,
) -> TrainingArguments:
    """Return Transformers' settings of a training, which callbacks and trackers read, from the run's.

    Args:
        run: As it trains.
        output_folder: Where checkpoints go.
        keeps: Whether the training reports, validates and saves.
        kind: Of arguments.
        more: Settings beside the run's.
    """
    every, trackers = "steps" if keeps else "no", names_in(run.report_to if keeps else "none")
    return kind(
        output_dir=str(output_folder),
        per_device_train_batch_size=run.per_device_train_batch_size,
        per_device_eval_batch_size=run.rows_evaluated_at_once,
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        num_train_epochs=run.num_train_epochs,
        max_steps=run.max_steps,
        max_grad_norm=run.max_grad_norm,
        gradient_checkpointing=run.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": run.use_reentrant} if run.gradient_checkpointing else None,
        bf16=run.precision.startswith("bf16"),
        fp16=run.precision == "fp16-mixed",
        use_cpu=run.device == "cpu",
        ddp_backend=BACKENDS[run.device] if run.world_size > 1 else None,
        eval_strategy=every,
        eval_steps=run.eval_steps,
        logging_strategy=every,
        logging_steps=run.eval_steps,
        save_strategy="best" if keeps else "no",  # and where `SaveSchedule` asks for it
        save_steps=run.save_steps,
        load_best_model_at_end=keeps,
        metric_for_best_model=objective_of(run).best_metric,
        greater_is_better=objective_of(run).higher_is_better,
        remove_unused_columns=False,
        dataloader_num_workers=run.dataloader_num_workers,
        report_to=trackers[0] if len(trackers) == 1 else list(trackers),
        disable_tqdm=True,
        seed=run.seed,
        **optimizer_settings(run),
        **more,
    )


def make_optimizer(model: torch.nn.Module, run: RunConfig) -> torch.optim.Optimizer:
    """Return the run's optimizer of what `model` trains; biases and norms decay no weights, as in Transformers.

    Divided weights (DTensors) have groups of their own: PyTorch's `foreach` steps take no list with both kinds.
    """
    kind, settings = optimizer_class(model, run)
    decaying = set(get_parameter_names(model, [torch.nn.LayerNorm], NOT_DECAYED))
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            groups.setdefault((name not in decaying, isinstance(weight, DTensor)), []).append(weight)
    optimizer = kind(
        [
            {"params": weights, "weight_decay": 0.0 if is_exempt else run.weight_decay}
            for (is_exempt, _), weights in sorted(groups.items(), key=lambda group: group[0])
        ],
        **settings,
    )
    if settings.get("optim_bits") == 8:  # bitsandbytes' are unstable for embeddings in 8 bits
        from bitsandbytes.optim import GlobalOptimManager  # here: it takes seconds

        manager = GlobalOptimManager.get_instance()
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                manager.register_module_override(module, "weight", {"optim_bits": 32})
    return optimizer


def optimizer_class(model: torch.nn.Module, run: RunConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of the run's optimizer for `model`, and its settings, as Transformers' Trainer has them."""
    from transformers import Trainer  # here: it imports `datasets`, which takes seconds

    return Trainer.get_optimizer_cls_and_kwargs(LoopArguments(output_dir="", **optimizer_settings(run)), model)


def make_schedule(optimizer: torch.optim.Optimizer, run: RunConfig, steps: int) -> LRScheduler:
    """Return the run's schedule of the learning rate, over `steps` of the optimizer."""
    warmup_steps = LoopArguments(output_dir="", **optimizer_settings(run)).get_warmup_steps(steps)
    return get_scheduler(run.lr_scheduler_type, optimizer, warmup_steps, steps)


def waits_for_validation(schedule: LRScheduler) -> bool:
    """Return whether a schedule follows what validations find, and not the steps."""
    return not isinstance(schedule, LambdaLR)


def check_optimizer(run: RunConfig) -> None:
    """Refuse an optimizer that Transformers does not know, or that cannot be built, or work, in this run.

    Raises:
        BadInputError: with the reason, and the names of those that can.
    """
    names = [each.value for each in OptimizerNames]
    check_choice("optim", run.optim, names)
    if run.optim in SHARDED_OPTIMIZERS:  # PyTorch's own
        return
    _check_tried(run, "optim", names, _try_optimizer)


def check_schedule_name(run: RunConfig) -> None:
    """Refuse a learning-rate schedule that Transformers does not know.

    Raises:
        BadInputError: with the names of those that it does.
    """
    check_choice("lr_scheduler_type", run.lr_scheduler_type, SCHEDULES)


def check_schedule(run: RunConfig, steps: int) -> None:
    """Refuse a learning-rate schedule that Transformers does not know, or that cannot be followed in this run.

    `steps`: the optimizer's, of the whole run.

    Raises:
        BadInputError: with the reason, and the names of those that can.
    """
    check_schedule_name(run)
    _check_tried(run, "lr_scheduler_type", SCHEDULES, lambda each: _try_schedule(each, steps))


def _check_tried(run: RunConfig, setting: str, names: Iterable[str], attempt: Callable[[RunConfig], object]) -> None:
    def works(name: str) -> bool:
        try:
            with warnings.catch_warnings(action="ignore"):  # nobody has asked for these
                attempt(replace(run, **{setting: name}))
        except BadInputError:
            return False
        return True

    try:
        attempt(run)
    except BadInputError as refused:
        raise BadInputError(f"{refused} In this run these work: {', '.join(filter(works, names))}.") from None


def _try_optimizer(run: RunConfig) -> None:
    """Build the optimizer for a square of weights, and on the CPU take a step."""
    weights = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float32 if run.method.has_adapters else weight_dtype(run))
    what = f"optim is {run.optim}, which"
    with reading(what, done="built"):
        kind, settings = optimizer_class(weights, run)
    if "model" in settings or "optimizer_dict" in settings:
        raise BadInputError(f"{what} takes its steps in the backward pass, before gradients are checked and clipped.")
    if hasattr(kind, "train"):
        raise BadInputError(f"{what} has weights to train and others to validate by, which the loop does not switch.")
    with reading(what, done="built"):
        optimizer = kind(weights.parameters(), **settings)
        if run.device == "cpu":  # a GPU that only looks ahead is left alone
            for weight in weights.parameters():
                weight.grad = torch.ones_like(weight)
            optimizer.step()


def _try_schedule(run: RunConfig, steps: int) -> None:
    """Build the schedule, and follow it where its formula changes: at its ends and those of its warm-up."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=run.peak_learning_rate)
    what = f"lr_scheduler_type is {run.lr_scheduler_type}, which"
    with reading(what, done="followed"):
        schedule = make_schedule(optimizer, run, steps)
        if not waits_for_validation(schedule):
            warmup = LoopArguments(output_dir="", **optimizer_settings(run)).get_warmup_steps(steps)
            places = {place for end in (0, warmup, steps) for place in (end - 1, end, end + 1) if 0 <= place <= steps}
            for factor in schedule.lr_lambdas:
                list(map(factor, places))
            return
    if objective_of(run).higher_is_better:
        raise BadInputError(f"{what} waits for a lower loss, but this task is validated by a score that is to rise.")
    if max(schedule.min_lrs) > run.peak_learning_rate:
        raise BadInputError(
            f"{what} keeps the learning rate above {max(schedule.min_lrs)}, but learning_rate is "
            f"{run.peak_learning_rate}."
        )
