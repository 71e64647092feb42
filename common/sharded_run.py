"""A run with sharding from its settings: what is checked, the model with what is to be trained, and its trainer."""

from collections.abc import Callable
from functools import partial

from peft import PeftModel
from transformers import PreTrainedModel

from common.device_maps import whole_model_on
from common.launch import Rank, accelerate_shards
from common.models import add_lora, load_base_model, train_linear_layers
from common.placement import model_without_weights
from common.run_config import RunConfig
from common.sharded_training import DdpTrainer, FsdpTrainer, ShardedTrainer
from common.sharding import describe_wrapping, modules_to_wrap, shard
from common.zero_training import ZeroTrainer, check_deepspeed


def check_sharding_inputs(run: RunConfig) -> None:
    """Check what sharding needs: DeepSpeed, and classes to wrap.

    Raises:
        BadInputError: what is missing or does not fit, and what would.
    """
    if run.parallel.startswith("zero"):
        check_deepspeed()
    else:
        modules_to_wrap(model_without_weights(run), run.wrap)


def model_to_train(run: RunConfig, rank: Rank) -> PreTrainedModel | PeftModel:
    """The base with its trained weights switched on; with FSDP divided, so that no GPU ever holds all of it.

    It loads on the host. DeepSpeed, and Accelerate where it was launched with an FSDP file, divide it when training
    begins; with ddp, for comparison, it stays whole on each rank's device.

    Raises:
        BadInputError: the model lacks a class to wrap, or layers to train.
    """
    model = whole_model_to_train(run, rank.device if run.parallel == "ddp" else "cpu")
    if run.parallel != "fsdp":
        return model
    if rank.is_main:
        print(describe_wrapping(model, run.wrap))
    return model if accelerate_shards() else shard(model, run, rank)


def whole_model_to_train(run: RunConfig, device: str) -> PreTrainedModel | PeftModel:
    """The base with its trained weights switched on, whole."""
    model = load_base_model(run, whole_model_on(device))
    if run.technique != "full":
        return add_lora(model, run)
    train_linear_layers(model, run.target_modules)
    return model


def trainer_class(run: RunConfig, rank: Rank) -> Callable[..., ShardedTrainer]:
    """Who makes the step: FSDP2, DeepSpeed, or for comparison DDP."""
    if run.parallel.startswith("zero"):
        return partial(ZeroTrainer, run=run, rank=rank)
    return partial(DdpTrainer if run.parallel == "ddp" else FsdpTrainer, rank=rank)
