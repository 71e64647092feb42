"""Weights of which a rank holds a part (FSDP's, DeepSpeed's) or all: measured, made whole, and given back."""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from accelerate.hooks import remove_hook_from_module
from accelerate.utils.memory import clear_device_cache
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils.parametrize import is_parametrized

EXPERTS_NDIM = 3


def local_part(weight: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a weight (or of its gradient): FSDP's shard, DeepSpeed's (stage 3), or all of it."""
    return weight.to_local() if isinstance(weight, DTensor) else getattr(weight, "ds_tensor", weight)


def global_numel(weight: torch.Tensor) -> int:
    """Return the number of elements of a weight, wherever they are."""
    return getattr(weight, "ds_numel", weight.numel())


def tensors_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield what a rank holds of a model: weights, or its part of them, buffers, and the scales of 4-bit weights."""
    for weight in (*model.parameters(), *model.buffers()):
        if weight.is_meta:  # of a model that was freed
            continue
        yield local_part(weight)
        scales = getattr(weight, "quant_state", None)
        yield from (value for value in (scales.as_dict() if scales else {}).values() if torch.is_tensor(value))


def byte_count(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all of them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def host_copy(parts: dict[str, Any]) -> dict[str, Any]:
    """Return `parts` with all tensors copied to the host's memory, as DCP copies a checkpoint before it writes."""
    names = ("use_pinned_memory", "use_shared_memory", "use_async_staging", "use_non_blocking_copy")
    with closing(DefaultStager(StagingOptions(**dict.fromkeys(names, False)))) as stager:  # open it would keep the copy
        return stager.stage(parts)


def full_weights(named: Iterable[tuple[str, torch.Tensor]], is_main: bool) -> dict[str, torch.Tensor]:
    """Return every weight whole, on the host of rank 0 (elsewhere empty), one after the other; called on every rank."""
    whole = {}
    for name, weight in named:
        one = gathered(weight).detach()
        if is_main:
            whole[name] = one.cpu()
        del one  # before the next one comes
    return whole


def gathered(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight made whole from the ranks' parts, FSDP's, tensor parallel's or DeepSpeed's; on every rank."""
    if hasattr(weight, "ds_tensor"):
        part, ranks = weight.ds_tensor.to(weight.device), dist.get_world_size()
        flat = torch.empty(ranks * part.numel(), dtype=part.dtype, device=part.device)  # padded to a multiple
        _fill(flat.chunk(ranks), part)
        return flat[: weight.ds_numel].view(weight.ds_shape)
    if not isinstance(weight, DTensor):
        return weight
    weight = weight.detach().to(weight.device_mesh.device_type)  # offloaded, from the host: NCCL sends nothing there
    if weight.device_mesh.ndim > 1 or weight.placements != (Shard(0),):
        return weight.full_tensor()
    part = weight.to_local()
    whole = torch.empty(weight.shape, dtype=part.dtype, device=part.device)
    _fill(whole.chunk(weight.device_mesh.size()), part, weight.device_mesh.get_group())
    return whole


def _fill(places: Sequence[torch.Tensor], own: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Bring each rank's part to its place in a whole weight: Gloo's own gathering needs as much memory again."""
    for owner, place in enumerate(places):
        if owner == dist.get_rank(group):
            place.copy_(own)
        dist.broadcast(place, group=group, group_src=owner)


def is_quantized(module: torch.nn.Module) -> bool:
    """Return whether this is a linear layer whose weights are stored in 4 bits; an adapter's wrapper of one is not."""
    return hasattr(module._parameters.get("weight"), "quant_type")  # also of a rank's part, which keeps its attributes


def has_fused_experts(module: torch.nn.Module) -> bool:
    """Return whether this module has the matrices of all experts of a layer, each kind as one weight, or in 4 bits."""
    has_three = any(weight.ndim == EXPERTS_NDIM for weight in module.parameters(recurse=False))
    return is_parametrized(module) or (has_three and not isinstance(module, torch.nn.Conv1d))


def free_model(model: torch.nn.Module) -> None:
    """Free a model's memory, whoever else still has its weights: an optimizer's groups have, and DDP's wrapper."""
    remove_hook_from_module(model, recurse=True)  # Accelerate's, of a model on several devices: they forbid the move
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if hasattr(weight, "quant_type"):  # such weights cannot be moved to `meta` as others can
                module._parameters[name] = None
                for holder in module.modules():  # the layer, or what reads experts
                    holder.quant_state = None
    held = [*model.parameters(), *model.buffers()]
    for weight in held:
        if isinstance(weight, DTensor):  # FSDP keeps a view of its shard
            storage = weight.to_local().untyped_storage()
            if storage.resizable():
                storage.resize_(0)
    model.to("meta")  # puts other tensors in their place
    for tensor in held:
        tensor.data, tensor.grad = tensor.new_empty(0), None
    clear_device_cache()


def return_freed_memory() -> None:
    """Give the system back what was freed: glibc keeps it, in pieces too small for what comes next."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
