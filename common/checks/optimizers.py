"""Optimizers and schedules of the learning rate, tried on a few weights before a model loads."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import SchedulerType
from transformers.training_args import OptimizerNames

from common.base.errors import BadInputError, reading
from common.base.run_config import SHARDED_OPTIMIZERS, RunConfig, check_choice
from common.models.loading import weight_dtype
from common.training.optimizers import make_schedule, optimizer_class, training_arguments

SCHEDULES = tuple(each.value for each in SchedulerType)
WIDTH = 320
"""Of a square of weights: of fewer than 4,096 bitsandbytes' states have 32 bits, and of fewer than 100,000 no pages."""


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
        if isinstance(schedule, LambdaLR):
            warmup = training_arguments(run).get_warmup_steps(steps)
            places = {place for end in (0, warmup, steps) for place in (end - 1, end, end + 1) if 0 <= place <= steps}
            for factor in schedule.lr_lambdas:
                list(map(factor, places))
            return
    raise BadInputError(f"{what} follows what validations find, but the learning rate here follows the steps alone.")
