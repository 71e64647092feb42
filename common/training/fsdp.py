"""FSDP2: a model whose weights are divided among the ranks, and what proves that they are.

PyTorch's `fully_shard` is called here directly: Accelerate's FSDP plugin runs plain DDP on a CPU, and says nothing.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from accelerate.utils import gather_object
from peft import PeftModel
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.hardware.devices import GIB
from common.models.shards import byte_count, global_numel, local_part
from common.runtime.world import Rank

UNEVEN_SHARE = 0.05
"""By which a rank's bytes may be off the whole divided by the ranks: weights are cut along their first dimension."""
OWN_LAYERS = "layers"
"""The setting `wrap` for the model's own layers."""


def mixed_precision(run: RunConfig) -> MixedPrecisionPolicy:
    """The format that weights are gathered and computed in, and the one that gradients are added up in.

    With mixed precision the shards stay fp32: weights are rounded when they are gathered, so that no autocast is
    needed, and gradients are summed in fp32.
    """
    if run.precision == "bf16-mixed":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def modules_to_wrap(model: PreTrainedModel | PeftModel, wrap: str) -> list[torch.nn.Module]:
    """The modules that are gathered one at a time, in the order of the forward pass.

    `wrap` is `layers`, or names of classes with commas between.

    Raises:
        BadInputError: the model has no module of a class; with the classes that repeat, as layers do.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    asked = list(base._no_split_modules) if wrap == OWN_LAYERS else wrap.split(",")
    classes = Counter(type(module).__name__ for module in base.modules())
    for name in asked:
        if not classes[name]:
            repeated = ", ".join(sorted(other for other, count in classes.items() if count > 1))
            raise BadInputError(
                f"wrap has {name!r}, but {type(base).__name__} has no module of that class: pass --wrap layers, or "
                f"some of {repeated}."
            )
    return [module for module in base.modules() if type(module).__name__ in asked]


def mesh_of(rank: Rank) -> DeviceMesh:
    """The devices of all ranks in a row; called on every rank."""
    return init_device_mesh(torch.device(rank.device).type, (rank.world_size,))


def shard(model: PreTrainedModel | PeftModel, run: RunConfig, mesh: DeviceMesh) -> PreTrainedModel | PeftModel:
    """Divide every weight among the ranks, in place: wrapped modules one by one, then what is left in the root.

    A model on the host moves to the rank's GPU module by module, so that the GPU never holds more than its shards and
    one whole module.

    Raises:
        BadInputError: see `modules_to_wrap`.
    """
    wrapped = modules_to_wrap(model, run.wrap)
    about = {
        "mesh": mesh,
        "mp_policy": mixed_precision(run),
        "offload_policy": CPUOffloadPolicy() if run.offload == "cpu" else OffloadPolicy(),
    }
    for module in reversed(wrapped):  # a wrapped module's own parts come first
        fully_shard(module, **about)
    fully_shard(model, **about)
    prefetch(wrapped, run.prefetch)
    return model


def prefetch(wrapped: Sequence[FSDPModule], ahead: int) -> None:
    """Have each wrapped module ask for the `ahead` ones after it, and in the backward pass for those before it."""
    for place, module in enumerate(wrapped if ahead else ()):
        module.set_modules_to_forward_prefetch(wrapped[place + 1 : place + 1 + ahead])
        module.set_modules_to_backward_prefetch(wrapped[max(0, place - ahead) : place][::-1])


@dataclass(frozen=True)
class ShardMemory:
    """Bytes that a rank keeps between two passes."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int

    def __str__(self) -> str:
        """For a printed line."""
        parts = [f"{name.removesuffix('_bytes')} {count / GIB * 1024:.2f} MiB" for name, count in asdict(self).items()]
        return ", ".join(parts)


def held_by_ranks(held: ShardMemory, whole: ShardMemory) -> dict[str, object]:
    """For the record: what each rank holds, and what one device would."""
    return {"per_rank": gather_object([asdict(held)]), "whole": asdict(whole)}


def whole_of(model: torch.nn.Module) -> ShardMemory:
    """What one device would hold, with Adam's two states."""
    weights = list(model.parameters())
    trained = [weight for weight in weights if weight.requires_grad]
    of_trained = sum(global_numel(weight) * weight.element_size() for weight in trained)
    return ShardMemory(
        sum(global_numel(weight) * weight.element_size() for weight in weights), of_trained, 2 * of_trained
    )


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of the states on this rank; their step counters left out."""
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return byte_count(local_part(state) for state in states if state.numel() > 1)


def check_fully_sharded(model: torch.nn.Module, world_size: int) -> int:
    """Refuse a model that only looks sharded. Returns the bytes of weights on this rank.

    Raises:
        RuntimeError: a weight is whole on this rank, or this rank has more than its part.
    """
    weights = dict(model.named_parameters())
    whole = [name for name, weight in weights.items() if not isinstance(weight, DTensor)]
    if whole:
        raise RuntimeError(
            f"{len(whole)} of {len(weights)} weights were to be sharded, but are whole on every rank, such as "
            f"{whole[0]}."
        )
    local, everything = byte_count(map(local_part, weights.values())), byte_count(weights.values())
    check_share("weights", local, everything, world_size)
    return local


def check_share(what: str, local_bytes: int, whole_bytes: int, world_size: int) -> None:
    """Refuse a rank that holds another part than its own.

    Raises:
        RuntimeError: with both sizes.
    """
    expected = whole_bytes / world_size
    if abs(local_bytes - expected) > UNEVEN_SHARE * expected:
        raise RuntimeError(
            f"This rank holds {local_bytes:,} bytes of {what}, but {whole_bytes:,} divided by {world_size} ranks are "
            f"{expected:,.0f}."
        )


def describe_wrapping(model: PreTrainedModel | PeftModel, wrap: str) -> str:
    """One line: which modules are gathered one at a time, and what the root keeps together."""
    wrapped = modules_to_wrap(model, wrap)
    inside = {id(weight) for module in wrapped for weight in module.parameters()}
    rest = sum(global_numel(weight) for weight in model.parameters() if id(weight) not in inside)
    counts = Counter(type(module).__name__.removeprefix("FSDP") for module in wrapped)
    names = ", ".join(f"{count} x {name}" for name, count in counts.items())
    largest = max(sum(map(global_numel, module.parameters())) for module in wrapped)
    return f"gathered one at a time: {names} (up to {largest:,} weights); together in the root: {rest:,} weights"
