"""Tensor parallel: which matrices of a layer are divided among the ranks, how they are loaded, and what proves it.

Of Megatron's kind (Shoeybi et al. 2019, section 3), by PyTorch's own `parallelize_module`: Transformers has no plan for
BERT and RoBERTa. A rank has some attention heads and some of the feed-forward's inner neurons; outputs are summed over
the ranks twice a layer, and so are the gradients of inputs in the backward pass. What is between is whole on every
rank, which is why dropout must draw the same masks everywhere: seed all ranks alike.
"""

from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from common.base.run_config import RunConfig
from common.models.divided import load_divided
from common.models.loading import model_without_weights
from common.models.shards import local_part
from common.models.trained_weights import with_trained_weights
from common.runtime.world import Rank
from common.training.answer_logits import Model
from common.training.tensor_parallel import check_divisible, split_dimension

PLAN: dict[str, type[ParallelStyle]] = {
    "attention.self.query": ColwiseParallel,
    "attention.self.key": ColwiseParallel,
    "attention.self.value": ColwiseParallel,
    "attention.output.dense": RowwiseParallel,
    "intermediate.dense": ColwiseParallel,
    "output.dense": RowwiseParallel,
}
"""Of every encoder layer: divided by outputs, column-wise (the weight's first dimension, and the bias), or by inputs,
row-wise (its second; the bias is whole). All else is whole on every rank: embeddings, layer norms, pooler and
classifier."""


def mesh_of_all(rank: Rank) -> DeviceMesh:
    """Return the devices of all ranks in a row."""
    # without names: PEFT would make adapters for this rank's part of a matrix, which `split_by_plan` divides
    return init_device_mesh(torch.device(rank.device).type, (rank.world_size,))


def load_columns(run: RunConfig, rank: Rank, mesh: DeviceMesh) -> Model:
    """Return the model to train, of which each rank loads its part of each layer's matrices; called on every rank."""
    planned = planned_dimensions(model_without_weights(run))
    return with_trained_weights(load_divided(run, rank.device, mesh, planned.get), run)


def layer_plans(model: Model) -> Iterator[tuple[torch.nn.Module, dict[str, type[ParallelStyle]]]]:
    """Yield each layer with its plan, to which the adapters that the layer has are added.

    An adapter is divided where its matrix is: lora_B by outputs, or lora_A by inputs. The other one is whole, and so is
    what it gets and gives: its gradient is complete on every rank.
    """
    whole = model.get_base_model() if hasattr(model, "peft_config") else model  # with adapters
    for layer in whole.base_model.encoder.layer:
        plan = {}
        for name, style in PLAN.items():
            module = layer.get_submodule(name)
            if hasattr(module, "lora_A"):
                divided = "lora_B" if style is ColwiseParallel else "lora_A"
                plan |= {f"{name}.{divided}.{adapter}": style for adapter in getattr(module, divided)}
                name = f"{name}.base_layer"
            plan[name] = style
        yield layer, plan


def planned_dimensions(model: Model) -> dict[str, int | None]:
    """Return for every parameter the dimension that the plan divides, or None: it stays whole."""
    dimensions: dict[str, int | None] = {name: None for name, _ in model.named_parameters()}
    names = {module: name for name, module in model.named_modules()}
    for layer, plan in layer_plans(model):
        for path, style in plan.items():
            name = names[layer.get_submodule(path)]
            dimensions[f"{name}.weight"] = 0 if style is ColwiseParallel else 1
            if style is ColwiseParallel and f"{name}.bias" in dimensions:
                dimensions[f"{name}.bias"] = 0
    return dimensions


def split_by_plan(model: Model, mesh: DeviceMesh) -> Model:
    """Divide every layer's matrices among the ranks of `mesh`, in place; what is loaded in parts stays as it is."""
    check_divisible(model.config, mesh.size())
    for layer, plan in layer_plans(model):
        parallelize_module(layer, mesh, {name: style() for name, style in plan.items()} | shared_input(layer))
    return model


def shared_input(layer: torch.nn.Module) -> dict[str, ParallelStyle]:
    """Have query, key and value take one DTensor, whose gradient is summed over the ranks once, not three times."""
    whole = {"input_layouts": Replicate(), "desired_input_layouts": Replicate()}
    styles = {"attention.self": PrepareModuleInput(**whole)}
    for name in PLAN:
        module = layer.get_submodule(name)
        if name.startswith("attention.self.") and hasattr(module, "lora_A"):
            for adapter in module.lora_dropout:
                styles[f"{name}.lora_dropout.{adapter}"] = PrepareModuleInput(**whole, use_local_output=True)
    return styles


def check_split(model: Model, ranks: int) -> None:
    """Refuse a model that is not divided as the plan has it, and nothing else."""
    planned = planned_dimensions(model)
    for name, weight in model.named_parameters():
        found, local = split_dimension(weight), local_part(weight).numel()
        if found != planned[name] or local * (1 if found is None else ranks) != weight.numel():
            raise RuntimeError(
                f"{name} is {_divided(found)}, and this rank has {local:,} of its {weight.numel():,} elements, but "
                f"over {ranks} ranks it was to be {_divided(planned[name])}."
            )


def _divided(dimension: int | None) -> str:
    return "whole" if dimension is None else f"divided along dimension {dimension}"
