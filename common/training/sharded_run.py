"""A run with sharding from its settings: what is checked, the model with what is to be trained, and its trainer."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from accelerate.utils import wait_for_everyone
from peft import PeftModel
from transformers import PreTrainedModel

from common.base.run_config import RunConfig
from common.models.loading import add_lora, load_base_model, train_linear_layers
from common.planning.device_maps import whole_model_on
from common.runtime.rank import accelerate_shards
from common.runtime.world import Rank
from common.training.fsdp import describe_wrapping, mesh_of, mixed_precision, modules_to_wrap, shard
from common.training.placement import model_without_weights
from common.training.sharded_training import DdpTrainer, FsdpTrainer, ShardedTrainer
from common.training.zero_training import ZeroTrainer, check_deepspeed


def check_sharding_inputs(run: RunConfig) -> None:
    """Check what sharding needs: DeepSpeed, and classes to wrap.

    Raises:
        BadInputError: what is missing or does not fit, and what would.
    """
    if run.parallelism.uses_deepspeed:
        check_deepspeed()
    else:
        modules_to_wrap(model_without_weights(run), run.wrap)


def model_to_train(run: RunConfig, rank: Rank) -> PreTrainedModel | PeftModel:
    """The base with its trained weights switched on; with FSDP divided, so that no GPU ever holds all of it.

    It loads on the host; with FSDP one rank of a machine after the other, so that the host holds one whole model and
    not one for each GPU. DeepSpeed, and Accelerate where it was launched with an FSDP file, divide it when training
    begins; with ddp, for comparison, it stays whole on each rank's device.

    Raises:
        BadInputError: the model lacks a class to wrap, or layers to train.
    """
    if not run.parallelism.uses_fsdp or accelerate_shards():
        model = whole_model_to_train(run, rank.device if run.parallelism.replicates else "cpu")
        if run.parallelism.uses_fsdp and rank.is_main:
            print(describe_wrapping(model, run.wrap))
        return model
    mesh = mesh_of(rank)
    with in_turn(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        model = whole_model_to_train(run, "cpu")
        if rank.is_main:
            print(describe_wrapping(model, run.wrap))
        return shard(model, run, mesh)


@contextmanager
def in_turn(own_turn: int, turns: int) -> Iterator[None]:
    """What ranks do here they do one after the other, in the order of their turns from 0; called on every rank."""
    for _ in range(own_turn):
        wait_for_everyone()
    yield
    for _ in range(turns - own_turn):
        wait_for_everyone()


def whole_model_to_train(run: RunConfig, device: str) -> PreTrainedModel | PeftModel:
    """The base with its trained weights switched on, whole."""
    model = load_base_model(run, whole_model_on(device))
    if run.method.has_adapters:
        return add_lora(model, run)
    train_linear_layers(model, run.target_modules)
    return model


def trainer_class(run: RunConfig, rank: Rank) -> Callable[..., ShardedTrainer]:
    """Who makes the step: FSDP2, DeepSpeed, or for comparison DDP."""
    if run.parallelism.uses_deepspeed:
        return partial(ZeroTrainer, run=run, rank=rank)
    if run.parallelism.replicates:
        return partial(DdpTrainer, rank=rank)
    return partial(FsdpTrainer, rank=rank, policy=mixed_precision(run))
