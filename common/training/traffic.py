"""What ranks send each other in a step, counted call by call, beside what a formula says."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

COUNTED_STEP = 2
"""The first one has what engines only do once."""
NAMESPACES = ("c10d", "_c10d_functional")
"""Where collectives are; DTensor's are in the second, of which tensor parallel needs `all_reduce` alone."""
SENT_SHARE = {
    "allreduce_": 2,
    "all_reduce": 2,
    "allgather_": 1,
    "_allgather_base_": 1,
    "allgather_into_tensor_coalesced_": 1,
    "reduce_scatter_": 1,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "reduce_": 1,
    "broadcast_": 1,
}
"""Of a collective's largest tensor (the whole that is gathered, summed or scattered), how often a rank of a ring sends
(n - 1) / n of it: an all-reduce is a reduce-scatter and an all-gather (nccl-tests, doc/PERFORMANCE.md)."""


class SentBytes(TorchDispatchMode):
    """Counts the bytes of collectives while it is entered; also those of FSDP, DDP, DeepSpeed and DTensor."""

    def __init__(self, world_size: int) -> None:
        """Nothing was sent yet."""
        super().__init__()
        self.world_size = world_size
        self.bytes_by_collective: dict[str, int] = {}
        """Of the tensors that were whole: not yet times (n - 1) / n."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Count, then call."""
        if func.namespace in NAMESPACES:
            name = func._schema.name.partition("::")[2]
            if name in SENT_SHARE:
                before = self.bytes_by_collective.get(name, 0)
                self.bytes_by_collective[name] = before + max(map(_byte_count, args))
        return func(*args, **(kwargs or {}))

    @property
    def sent_bytes(self) -> float:
        """What one rank sends, as in a ring."""
        around = (self.world_size - 1) / self.world_size
        return sum(SENT_SHARE[name] * around * count for name, count in self.bytes_by_collective.items())


def _byte_count(argument: object) -> int:
    tensors = argument if isinstance(argument, (list, tuple)) else [argument]
    return sum(
        tensor.numel() * tensor.element_size() if isinstance(tensor, torch.Tensor) else _byte_count(tensor)
        for tensor in tensors
        if isinstance(tensor, (torch.Tensor, list, tuple))
    )


class TrafficReport(TrainerCallback):
    """Counts what this rank sends in the second step."""

    def __init__(self, world_size: int) -> None:
        """Nothing was counted yet."""
        self.sent, self.step = SentBytes(world_size), 0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Count from here."""
        self.step += 1
        if self.step == COUNTED_STEP:
            self.sent.__enter__()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """To here."""
        if self.step == COUNTED_STEP:
            self.sent.__exit__(None, None, None)

    def figures(self) -> dict[str, object]:
        """For the record; None where there was no second step."""
        if not self.sent.bytes_by_collective:
            return {"sent": None}
        return {"sent": {"bytes": self.sent.sent_bytes, "by_collective": self.sent.bytes_by_collective}}
