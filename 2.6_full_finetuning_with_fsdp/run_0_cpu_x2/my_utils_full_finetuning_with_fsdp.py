"""What only sharding needs: DeepSpeed's engine, how fast ranks can be, and the library's own trainer."""

import warnings
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from common.base.command_line import silent_if_well
from common.base.run_config import RunConfig
from common.data.batches import make_collator
from common.measuring.beside import trained_beside
from common.measuring.ceiling import measure_machine_ceiling
from common.models.divided import load_rows, mesh_of
from common.models.loading import weight_dtype, what_to_load
from common.models.shards import gathered, return_freed_memory
from common.models.trained_weights import with_trained_weights
from common.runtime.rank import end_rank, start_rank
from common.runtime.recorder import Trial
from common.runtime.world import Rank
from common.training.answer_logits import Model
from common.training.ddp import load_replica
from common.training.deepspeed_config import deepspeed_config, zero_stage
from common.training.loop import TrainingLoop
from common.training.optimizers import training_arguments
from common.training.steps import load_data

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

WHOLE_AT_MOST_BYTES = 256 * 2**20  # weights that may be whole on each rank beside training that divides them


def load_for_zero(run: RunConfig, rank: Rank) -> Model:
    """Return the model to train on this rank's device, with stage 3 its part; called on every rank.

    Adapters are put on rows of every weight, as DeepSpeed's parts have no shape; then one weight after the other is
    made whole and handed to DeepSpeed. (Transformers' loader has every rank hold the whole model on its host.)
    """
    # its names for collectives are older than PyTorch's: it says so at every call
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    if zero_stage(run) < 3:
        return load_replica(run, rank)
    mesh = mesh_of(rank, run)
    model = with_trained_weights(load_rows(run, rank, mesh), run)
    hand_over(model, deepspeed_config(run, model.config.hidden_size), mesh)
    return model.to(rank.device)  # buffers


@silent_if_well()
def hand_over(model: Model, config: dict[str, Any], mesh: DeviceMesh) -> None:
    """Divide rows of weights, in place, as DeepSpeed's stage 3 does, with one weight whole at a time, on `mesh`.

    Called on every rank. With bf16 all weights become bf16, as DeepSpeed wants them.
    """
    import deepspeed

    partitioned: torch.nn.Parameter | None = None
    for places in _places_of_weights(model):
        weight = _whole_weight(places, mesh, torch.bfloat16 if config["bf16"]["enabled"] else None)
        for module, name in places:
            module._parameters[name] = weight
        if partitioned is None:
            deepspeed.zero.Init(module=torch.nn.ParameterList([weight]), config_dict_or_path=config)
            partitioned = weight
        else:  # as it does with adapters itself: to read the settings again takes longer
            partitioned.convert_to_zero_parameters(param_list=[weight])
        return_freed_memory()


def _places_of_weights(model: torch.nn.Module) -> list[list[tuple[torch.nn.Module, str]]]:
    """Return of each weight the modules that have it, several where it is tied, and its names there."""
    places: dict[torch.Tensor, list[tuple[torch.nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            places[weight].append((module, name))
    return list(places.values())


def _whole_weight(
    places: list[tuple[torch.nn.Module, str]], mesh: DeviceMesh, dtype: torch.dtype | None
) -> torch.nn.Parameter:
    module, name = places[0]
    weight = module._parameters[name]
    rows = weight.detach()
    if isinstance(rows, DTensor):  # from_local moves them to the mesh's devices
        about = {"run_check": False, "shape": rows.shape, "stride": rows.stride()}
        rows = DTensor.from_local(rows.to_local(), mesh, rows.placements, **about)
    return torch.nn.Parameter(gathered(rows).to(mesh.device_type, dtype), requires_grad=weight.requires_grad)


@silent_if_well()  # each rank would print that DeepSpeed has built an operator
def zero_engine(model: Model, optimizer: torch.optim.Optimizer, run: RunConfig) -> "DeepSpeedEngine":
    """Hand model and optimizer to DeepSpeed's engine, which divides what the stage says."""
    import deepspeed  # here: runs without ZeRO need none

    config = deepspeed_config(run, model.config.hidden_size)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def measure_ceiling(loop: TrainingLoop, held: dict[str, Any] | None) -> dict[str, float] | None:
    """Measure the highest possible speed-up; on CPU only, of a model small enough to be whole on each rank."""
    if loop.run.device != "cpu" or held is None or held["whole"]["weights_bytes"] > WHOLE_AT_MOST_BYTES:
        return None
    with loop.log.phase("upper bound"):
        return measure_machine_ceiling(loop, load_replica(loop.run, loop.rank))


def train_by_trainer(log: Trial) -> None:
    """Train with Transformers' Trainer, on a model that Transformers divides among the ranks as it loads."""
    from transformers import PrinterCallback, Trainer, TrainingArguments  # here: PEFT, which `common` is to come before

    tokenizer, data = load_data(log)
    sharded = DistributedConfig(fsdp_size=log.rank.world_size)
    source, dtype = what_to_load(log.run), weight_dtype(log.run)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype, distributed_config=sharded)
    arguments = training_arguments(log.run, log.folder, keeps=False, kind=TrainingArguments)
    model, collate = with_trained_weights(model, log.run), make_collator(tokenizer)
    trainer = Trainer(model, arguments, collate, data.train, callbacks=log.callbacks)
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def compare_with_trainer(run: RunConfig) -> None:
    """Print losses, time and memory of this folder's loop, and of the Trainer's; called on every rank."""
    from my_workflow_full_finetuning_with_fsdp import train  # here: it imports this module

    rank = start_rank(run)
    ways = {"this loop": lambda log: train(log, *load_data(log)), "Trainer": train_by_trainer}
    table = trained_beside(run, rank, ways)
    if rank.is_main:
        print(table.to_string())
    end_rank()
