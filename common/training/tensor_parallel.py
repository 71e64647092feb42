"""Tensor parallel: each rank has a part of every layer's matrices, and all ranks work on the same rows.

Of Megatron's kind (Shoeybi et al. 2019, section 3), by PyTorch's own `parallelize_module`: Transformers has no plan for
BERT and RoBERTa. A rank has some attention heads and some of the feed-forward's inner neurons; outputs are summed over
the ranks twice a layer, and so are the gradients of inputs in the backward pass. What is between is whole on every
rank, which is why dropout must draw the same masks everywhere: seed all ranks alike.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PretrainedConfig
from typing_extensions import override

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.models.divided import load_divided
from common.models.loading import any_shape_config, model_without_weights
from common.models.shards import local_part
from common.models.trained_weights import with_trained_weights
from common.runtime.world import Rank
from common.training.answer_logits import Batch, Model
from common.training.part import Part, clip_divided

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
FAMILIES = ("bert", "roberta", "xlm-roberta")
AGREEMENT = 1e-7  # by which a whole weight may differ between ranks


class Columns(Part):
    """Columns or rows of each layer's matrices (`split_by_plan`); all ranks have the same rows of a batch."""

    def __init__(self, module: Model, run: RunConfig, rank: Rank) -> None:
        check_split(module, rank.world_size)
        super().__init__(module, run, rank)

    @classmethod
    @override
    def check(cls, run: RunConfig) -> None:
        check_divisible(any_shape_config(run.model, run.model_revision), run.devices)

    @override
    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        return clip_gradients(self.model.parameters(), max_norm, self.rank.device)

    @override
    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        return value  # every rank knows it all

    @override
    def logits(self, batch: Batch) -> torch.Tensor:
        with self.autocast():
            return super().logits(batch)

    @override
    def own_rows(self, of_ranks: list[Any]) -> list[Any]:
        own = super().own_rows(of_ranks)
        check_whole_weights_agree(self.model)
        return own


def mesh_of_all(rank: Rank) -> DeviceMesh:
    """Return the devices of all ranks in a row."""
    # without names: PEFT would make adapters for this rank's part of a matrix, which `split_by_plan` divides
    return init_device_mesh(torch.device(rank.device).type, (rank.world_size,))


def load_columns(run: RunConfig, rank: Rank, mesh: DeviceMesh) -> Model:
    """Return the model to train, of which each rank loads its part of each layer's matrices; called on every rank."""
    planned = planned_dimensions(model_without_weights(run))
    return with_trained_weights(load_divided(run, rank.device, mesh, planned.get), run)


def check_divisible(config: PretrainedConfig, ranks: int) -> None:
    """Refuse a model that the ranks cannot share evenly, or that there is no plan for."""
    if config.model_type not in FAMILIES:
        raise BadInputError(
            f"model is of type {config.model_type}, which has no plan of tensor parallel: choose one of type "
            f"{' or '.join(FAMILIES)}, or pass --parallel ddp."
        )
    heads, inner = config.num_attention_heads, config.intermediate_size
    if heads % ranks or inner % ranks:
        fitting = [f"--devices {count}" for count in range(2, heads + 1) if heads % count == inner % count == 0]
        raise BadInputError(
            f"The model's num_attention_heads is {heads} and its intermediate_size {inner}, which {ranks} ranks cannot "
            f"share evenly: pass {' or '.join([*fitting, '--parallel ddp'])}."
        )


def layer_plans(model: Model) -> Iterator[tuple[torch.nn.Module, dict[str, type[ParallelStyle]]]]:
    """Yield each layer with its plan, to which the adapters that the layer has are added.

    An adapter is divided where its matrix is: lora_B by outputs, or lora_A by inputs. The other one is whole, and so is
    what it gets and gives: its gradient is complete on every rank.
    """
    whole = model.get_base_model() if isinstance(model, PeftModel) else model
    for layer in whole.base_model.encoder.layer:
        plan = {}
        for name, style in PLAN.items():
            module = layer.get_submodule(name)
            if isinstance(module, LoraLayer):
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
        if name.startswith("attention.self.") and isinstance(module, LoraLayer):
            for adapter in module.lora_dropout:
                styles[f"{name}.lora_dropout.{adapter}"] = PrepareModuleInput(**whole, use_local_output=True)
    return styles


def split_dimension(weight: torch.Tensor) -> int | None:
    """Return the dimension along which a weight (or a gradient) is divided, None if it is whole."""
    if not isinstance(weight, DTensor) or not weight.placements[0].is_shard():
        return None
    return weight.placements[0].dim


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


def check_whole_weights_agree(model: torch.nn.Module) -> None:
    """Refuse ranks whose copies of a whole weight went apart, as other dropout masks would make them; on every rank."""
    for name, weight in model.named_parameters():
        if split_dimension(weight) is None:
            own = local_part(weight.detach())
            ends = torch.stack([own, -own])
            dist.all_reduce(ends, op=dist.ReduceOp.MAX)  # the largest and, with its sign turned, the smallest value
            difference = (ends[0] + ends[1]).max().item()
            if not difference <= AGREEMENT:  # also where it is no number
                raise RuntimeError(
                    f"{name} is whole on every rank, but its copies differ by up to {difference:.1e}: were all ranks "
                    "seeded alike, and do they see the same rows?"
                )


def clip_gradients(weights: Iterable[torch.Tensor], max_norm: float, device: str) -> torch.Tensor:
    """Clip the whole model's gradients, of which what every rank has whole counts once; return their norm."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    divided = [gradient.to_local() for gradient in gradients if split_dimension(gradient) is not None]
    whole = [local_part(gradient) for gradient in gradients if split_dimension(gradient) is None]
    return clip_divided(divided + whole, divided, whole, max_norm, device)
