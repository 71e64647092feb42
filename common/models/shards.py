"""Weights of which a rank holds a part (FSDP's, DeepSpeed's) or all: measure them, and make them whole."""

from collections.abc import Callable, Iterable

import torch
from torch.distributed.tensor import DTensor


def local_part(weight: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a weight (or of its gradient): FSDP's shard, DeepSpeed's (stage 3), or all of it."""
    return weight.to_local() if isinstance(weight, DTensor) else getattr(weight, "ds_tensor", weight)


def global_numel(weight: torch.Tensor) -> int:
    """Return the number of elements of a weight, wherever they are."""
    return getattr(weight, "ds_numel", weight.numel())


def byte_count(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all of them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def full_weights(
    named: Iterable[tuple[str, torch.Tensor]], is_main: bool, gather: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return every weight whole, on the host of rank 0 (elsewhere empty); one at a time on the devices.

    `gather` makes a weight whole; every rank must call this.
    """
    whole = {}
    for name, weight in named:
        gathered = gather(weight)
        if is_main:
            whole[name] = gathered.detach().cpu().clone()
    return whole


def gathered(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight made whole from FSDP's shards."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
