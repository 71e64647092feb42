"""What a rank holds and sends in a step, beside what one device would hold."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.hardware.devices import MIB
from common.models.shards import byte_count, local_part

UNEVEN_SHARE = 0.05  # by which a rank's bytes may be off its part, such as for padding


@dataclass(frozen=True)
class Held:
    """Bytes that a rank keeps between two passes."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int

    def __str__(self) -> str:
        return ", ".join(f"{name.removesuffix('_bytes')} {count / MIB:.2f} MiB" for name, count in asdict(self).items())


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's states on this rank, without their step counters."""
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return [local_part(state) for state in states if state.numel() > 1]


def part_bytes(weights: Iterable[torch.Tensor], ranks: int) -> tuple[int, int]:
    """Return the least and the most bytes on a rank of weights that FSDP cuts, as `torch.chunk` does, by rows."""
    least = most = 0
    for weight in weights:
        rows = weight.shape[0]
        row_bytes, first = weight.numel() // rows * weight.element_size(), math.ceil(rows / ranks)
        least, most = least + max(0, rows - (ranks - 1) * first) * row_bytes, most + first * row_bytes
    return least, most


def check_part(what: str, local_bytes: int, parts: tuple[float, float]) -> None:
    """Check that a rank holds between the least and the most of `parts` of what is divided."""
    least, most = parts
    if not (1 - UNEVEN_SHARE) * least <= local_bytes <= (1 + UNEVEN_SHARE) * most:
        raise RuntimeError(
            f"This rank holds {local_bytes:,} bytes of {what}, but the ranks' parts have {least:,.0f} to {most:,.0f}."
        )


# where collectives are; DTensor's are in the second, of which tensor parallel needs `all_reduce` alone
NAMESPACES = ("c10d", "_c10d_functional")
SENT_SHARE = {
    "allreduce_": 2, "all_reduce": 2, "allgather_": 1, "_allgather_base_": 1, "allgather_into_tensor_coalesced_": 1,
    "reduce_scatter_": 1, "_reduce_scatter_base_": 1, "reduce_scatter_tensor_coalesced_": 1, "reduce_": 1,
    "broadcast_": 1, "alltoall_base_": 1,
}  # fmt: skip
"""Of a collective's largest tensor (the whole that is gathered, summed or scattered), how often a rank of a ring sends
(n - 1) / n of it: an all-reduce is a reduce-scatter and an all-gather (nccl-tests, doc/PERFORMANCE.md)."""


class SentBytes(TorchDispatchMode):
    """Counts the bytes of collectives while it is entered; also those of FSDP, DDP, DeepSpeed and DTensor.

    Attributes:
        bytes_by_collective: Of the tensors that were whole: not yet times (n - 1) / n.
        sent_bytes: What one rank sends, as in a ring of the n ranks of each collective's own group.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes_by_collective: dict[str, int] = {}
        self.sent_bytes = 0.0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return that layers are compiled while it is entered, too."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace in NAMESPACES and name in SENT_SHARE:
            largest = max(byte_count(filter(torch.is_tensor, tree_leaves(argument))) for argument in args)
            self.bytes_by_collective[name] = self.bytes_by_collective.get(name, 0) + largest
            # c10d is given the group itself, DTensor's operators its name as their last text
            groups = [each for each in args if isinstance(each, torch.ScriptObject)]
            names = [each for each in args if isinstance(each, str)]
            group = dist.ProcessGroup.unbox(groups[0]) if groups else _resolve_process_group(names[-1])
            ranks = group.size()
            self.sent_bytes += SENT_SHARE[name] * (ranks - 1) / ranks * largest
        return func(*args, **(kwargs or {}))
