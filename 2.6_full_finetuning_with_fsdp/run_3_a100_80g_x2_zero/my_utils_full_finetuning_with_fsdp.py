"""What only sharding needs: the model with what is to be trained, divided, and a look at what each rank holds."""

from collections.abc import Callable
from functools import partial

import pandas as pd
from peft import PeftModel
from transformers import PreTrainedModel

from common.device_maps import whole_model_on
from common.launch import accelerate_shards
from common.models import add_lora, load_base_model, train_linear_layers
from common.run_record import RunLog
from common.sharded_training import DdpTrainer, FsdpTrainer, ShardedTrainer
from common.sharding import describe_wrapping, shard
from common.zero_training import ZeroTrainer


def trained_model(log: RunLog) -> PreTrainedModel | PeftModel:
    """The base with its trained weights switched on; with FSDP divided, so that no GPU ever holds all of it.

    It loads on the host. DeepSpeed, and Accelerate where it was launched with an FSDP file, divide it when training
    begins; with `--parallel ddp`, for comparison, it stays whole on each rank's device.
    """
    run, rank = log.run, log.rank
    model = load_base_model(run, whole_model_on(rank.device if run.parallel == "ddp" else "cpu"))
    if run.technique == "full":
        train_linear_layers(model, run.target_modules)
    else:
        model = add_lora(model, run)
    if run.parallel != "fsdp":
        return model
    if rank.is_main:
        print(describe_wrapping(model, run.wrap))
    return model if accelerate_shards() else shard(model, run, rank)


def trainer_class(log: RunLog) -> Callable[..., ShardedTrainer]:
    """Who makes the step: FSDP2, DeepSpeed, or for comparison DDP."""
    if log.run.parallel.startswith("zero"):
        return partial(ZeroTrainer, run=log.run, rank=log.rank)
    return partial(DdpTrainer if log.run.parallel == "ddp" else FsdpTrainer, rank=log.rank)


def held_table(held: dict[str, object]) -> pd.DataFrame:
    """What each rank held in the second step, in MiB, beside what one device would."""
    rows = {f"rank {rank}": each for rank, each in enumerate(held["per_rank"])}
    rows["one device would"] = held["whole"]
    table = pd.DataFrame.from_dict(rows, orient="index") / 2**20
    return table.rename(columns=lambda name: name.replace("_bytes", " (MiB)")).round(2)
