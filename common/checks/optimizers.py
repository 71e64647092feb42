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
# of a square of weights: of fewer than 4,096 bitsandbytes' states have 32 bits, and of fewer than 100,000 no pages
WIDTH = 320


def check_optimizer(run: RunConfig) -> None:
    """Raise BadInputError unless Transformers knows the optimizer, and it can be built and, on a CPU, takes a step."""
    check_choice("optim", run.optim, [each.value for each in OptimizerNames])
    if run.optim in SHARDED_OPTIMIZERS:  # PyTorch's own
        return
    weights = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float32 if run.method.has_adapters else weight_dtype(run))
    what = f"optim is {run.optim}, which"
    with reading(what, OTHER_OPTIMIZERS, "built"):
        kind, settings = optimizer_class(weights, run)
    if "model" in settings or "optimizer_dict" in settings:
        raise BadInputError(f"{what} takes its steps in the backward pass, before clipping. {OTHER_OPTIMIZERS}")
    if hasattr(kind, "train"):
        raise BadInputError(f"{what} trains and validates with different weights. {OTHER_OPTIMIZERS}")
    with reading(what, OTHER_OPTIMIZERS, "built"):
        optimizer = kind(weights.parameters(), **settings)
        if run.device == "cpu":  # a GPU that only looks ahead is left alone
            for weight in weights.parameters():
                weight.grad = torch.ones_like(weight)
            optimizer.step()


def check_schedule_name(run: RunConfig) -> None:
    """Raise BadInputError unless Transformers knows the learning-rate schedule."""
    check_choice("lr_scheduler_type", run.lr_scheduler_type, [each.value for each in SchedulerType])


def check_schedule(run: RunConfig, steps: int) -> None:
    """Raise BadInputError unless a run of so many steps can follow its learning-rate schedule.

    It is tried where its formula changes: at its ends and those of its warm-up.
    """
    check_schedule_name(run)
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
        f"{what} follows validations, but learning rates here follow the steps alone. {OTHER_SCHEDULES}"
    )
