"""FSDP2: a model whose weights are divided among the ranks, and what proves that they are.

PyTorch's `fully_shard` is called directly: Accelerate's FSDP plugin runs plain DDP on a CPU, and says nothing.
"""

from collections import Counter
from itertools import pairwise

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from typing_extensions import override

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.models.compiled_layers import layers_of
from common.models.divided import load_rows
from common.models.loading import model_without_weights
from common.models.shards import byte_count, global_numel, local_part
from common.models.trained_weights import with_trained_weights
from common.runtime.world import Rank
from common.training.answer_logits import Model
from common.training.part import Part, clip_divided
from common.training.usage import Held, check_part, part_bytes


class Shards(Part):
    """A shard of each weight (`shard`); the others' are gathered layer by layer."""

    def __init__(self, module: Model, run: RunConfig, rank: Rank) -> None:
        check_fully_sharded(module, run.shard_ranks)
        if rank.is_main:
            print(describe_wrapping(module))
        self.autocasts = mixed_precision(run).param_dtype is None  # adapters are fp32 beside a base in bf16
        super().__init__(module, run, rank)

    @classmethod
    @override
    def check(cls, run: RunConfig) -> None:
        if not layers_of(model_without_weights(run)):
            raise BadInputError(f"FSDP gathers a model by layers, but {run.model} has none: pass another --model.")

    @override
    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        gradients = self.gradients()
        mesh = next(self.model.parameters()).device_mesh
        group = mesh.get_group(mesh.ndim - 1)  # hybrid sharding: each copy has all of the gradients
        return clip_divided(gradients, gradients, [], max_norm, self.rank.device, group)

    @override
    def check_shard_memory(self, held: Held) -> None:
        weights, ranks = list(self.model.parameters()), self.run.shard_ranks
        trained = [weight for weight in weights if weight.requires_grad]
        check_part("weights", held.weights_bytes, part_bytes(weights, ranks))
        check_part("gradients", held.gradients_bytes, part_bytes(trained, ranks))


def load_parts(run: RunConfig, rank: Rank, mesh: DeviceMesh) -> Model:
    """Return the model to train, of which each rank loads its part of every weight alone; called on every rank."""
    return with_trained_weights(load_rows(run, rank, mesh), run)


def mixed_precision(run: RunConfig) -> MixedPrecisionPolicy:
    """Return the formats that weights are gathered and computed in, and that gradients are added up in.

    With mixed precision shards stay fp32: weights are rounded when they are gathered, so that no autocast is needed.
    """
    if run.precision == "bf16-mixed":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def shard(model: Model, run: RunConfig, mesh: DeviceMesh) -> Model:
    """Divide every weight among the ranks, in place: layers one by one, then what is left in the root.

    While a layer computes, the next one is gathered; in the backward pass the one before. What ranks hold parts of
    already (`load_parts`) stays where it is.
    """
    loaded, layers = _put_on_meta(model), layers_of(model)
    offload = CPUOffloadPolicy() if run.offload == "cpu" else OffloadPolicy()
    for module in [*reversed(layers), model]:  # a layer inside another one comes before it
        fully_shard(module, mesh=mesh, mp_policy=mixed_precision(run), offload_policy=offload)
    _put_back(loaded)
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])
    return model


def _put_on_meta(model: Model) -> list[tuple[torch.nn.Module, str, DTensor]]:
    """Put whole weights on `meta`, which `fully_shard` takes, in the places of loaded parts; return these places."""
    places: list[tuple[torch.nn.Module, str, DTensor]] = []
    stand_ins: dict[int, torch.nn.Parameter] = {}  # tied weights stay tied
    for module in model.modules():
        for name, part in list(module.named_parameters(recurse=False)):
            if isinstance(part, DTensor):
                empty = torch.empty(part.shape, dtype=part.dtype, device="meta")
                stand_in = torch.nn.Parameter(empty, requires_grad=part.requires_grad)
                places.append((module, name, part))
                setattr(module, name, stand_ins.setdefault(id(part), stand_in))
    return places


def _put_back(places: list[tuple[torch.nn.Module, str, DTensor]]) -> None:
    """Put loaded parts in the places of those that `fully_shard` has made of whole weights on `meta`."""
    parts: dict[int, torch.nn.Parameter] = {}
    for module, name, loaded in places:
        of_meta = getattr(module, name)
        # `from_local` would leave the host
        part = DTensor(loaded.to_local().detach(), of_meta._spec, requires_grad=False)
        part = torch.nn.Parameter(part, requires_grad=of_meta.requires_grad)
        setattr(module, name, parts.setdefault(id(loaded), part))


def check_fully_sharded(model: torch.nn.Module, world_size: int) -> None:
    """Refuse a model with a weight that is whole on this rank, or of which this rank has more than its part."""
    weights = dict(model.named_parameters())
    whole = [name for name, weight in weights.items() if not isinstance(weight, DTensor)]
    if whole:
        raise RuntimeError(
            f"{len(whole)} of {len(weights)} weights were to be sharded, but are whole on every rank, such as "
            f"{whole[0]}."
        )
    local = byte_count(map(local_part, weights.values()))
    check_part("weights", local, part_bytes(weights.values(), world_size))


def describe_wrapping(model: Model) -> str:
    """Return which modules of a divided model are gathered by themselves, and what the root keeps."""
    sizes = {layer: sum(map(global_numel, layer.parameters())) for layer in layers_of(model)}
    counts = Counter(type(layer).__name__.removeprefix("FSDP") for layer in sizes)
    names = ", ".join(f"{count} x {name}" for name, count in counts.items())
    in_layers = {id(weight) for layer in sizes for weight in layer.parameters()}
    rest = sum(global_numel(weight) for weight in model.parameters() if id(weight) not in in_layers)
    largest = max(sizes.values())
    return f"gathered one at a time: {names} (up to {largest:,} weights); together in the root: {rest:,} weights"
