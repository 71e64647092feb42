"""Optimizers and schedules of the learning rate, tried on a few weights before a model loads."""

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import SchedulerType
from transformers.training_args import OptimizerNames

from common.base.errors import BadInputError, reading
from common.base.run_config import SHARDED_OPTIMIZERS, RunConfig, check_choice
from common.models.loading import weight_dtype
from common.training.optimizers import make_schedule, optimizer_class, training_arguments

OTHER_OPTIMIZERS = f"Choose another one, such as {', '.join(SHARDED_OPTIMIZERS)}."
OTHER_SCHEDULES = "Choose another one, such as cosine, linear or constant_with_warmup."
WIDTH = 320
"""Of a square of weights: of fewer than 4,096 bitsandbytes' states have 32 bits, and of fewer than 100,000 no pages."""


def check_optimizer(run: RunConfig) -> None:
    """Refuse an optimizer or a schedule that Transformers does not know, and an optimizer that cannot work in this run.

    It is built for a square of weights, and on the CPU takes a step.

    Raises:
        BadInputError: with the reason, and the names of some that can.
    """
    check_choice("optim", run.optim, [each.value for each in OptimizerNames])
    check_choice("lr_scheduler_type", run.lr_scheduler_type, [each.value for each in SchedulerType])
    if run.optim in SHARDED_OPTIMIZERS:  # PyTorch's own
        return
    weights = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float32 if run.method.has_adapters else weight_dtype(run))
    what = f"optim is {run.optim}, which"
    with reading(what, OTHER_OPTIMIZERS, "built"):
        kind, settings = optimizer_class(weights, run)
    if "model" in settings or "optimizer_dict" in settings:
        raise BadInputError(
            f"{what} takes its steps in the backward pass, before gradients are checked and clipped. {OTHER_OPTIMIZERS}"
        )
    if hasattr(kind, "train"):
        raise BadInputError(
            f"{what} has weights to train and others to validate by, which the loop does not switch. {OTHER_OPTIMIZERS}"
        )
    with reading(what, OTHER_OPTIMIZERS, "built"):
        optimizer = kind(weights.parameters(), **settings)
        if run.device == "cpu":  # a GPU that only looks ahead is left alone
            for weight in weights.parameters():
                weight.grad = torch.ones_like(weight)
            optimizer.step()


def check_schedule(run: RunConfig, steps: int) -> None:
    """Refuse a learning-rate schedule that cannot be followed in this run, of so many steps.

    It is followed where its formula changes: at its ends and those of its warm-up.

    Raises:
        BadInputError: with the reason, and the names of some that can.
    """
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=run.peak_learning_rate)
    what = f"lr_scheduler_type is {run.lr_scheduler_type}, which"
    with reading(what, OTHER_SCHEDULES, "followed"):
        schedule = make_schedule(optimizer, run, steps)
        if isinstance(schedule, LambdaLR):
            warmup = training_arguments(run).get_warmup_steps(steps)
            places = {place for end in (0, warmup, steps) for place in (end - 1, end, end + 1) if 0 <= place <= steps}
            for factor in schedule.lr_lambdas:
                list(map(factor, places))
            return
    raise BadInputError(
        f"{what} follows what validations find, but the learning rate here follows the steps alone. {OTHER_SCHEDULES}"
    )
