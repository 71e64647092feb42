"""DDP in the written-out loop, for comparison with what is sharded: every rank holds everything."""

from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from common.training.strategy import Batch, Strategy

ONE_BUCKET_MB = 1000
"""More than what trains on CPUs here has of gradients; not 25, which Accelerate takes for no size given."""


def ddp_settings(device: str) -> dict[str, bool | int]:
    """Return what DDP is told: gradients lie in its buckets, not beside them, and how large the buckets are.

    On a GPU the first bucket has 1 MiB, so that its exchange begins early in the backward pass (PyTorch's default). On
    a CPU exchange and computation share the cores, and one bucket less is one wait less (LOG.md has the times).
    """
    return {"gradient_as_bucket_view": True} | ({"bucket_cap_mb": ONE_BUCKET_MB} if device == "cpu" else {})


class Ddp(Strategy):
    """Every rank holds the whole model; PyTorch's DDP averages the gradients."""

    buckets: list[torch.Tensor] | None = None

    def prepare(self, optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> torch.optim.Optimizer:
        """Put DDP, which sums the gradients, around the model."""
        self.replica = DistributedDataParallel(self.model, **ddp_settings(self.rank.device))
        return super().prepare(optimizer, accelerator)

    def forward(self, **inputs: Any) -> Any:
        """Return the model's output, in training through DDP, whose hooks sum the gradients."""
        return (self.replica if self.model.training else self.model)(**inputs)

    def backward(self, batch: Batch, num_items_in_batch: int, is_last: bool) -> torch.Tensor:
        """Add the gradients, which are summed over the ranks after the last batch of a step."""
        with nullcontext() if is_last else self.replica.no_sync():
            loss = self.loss(batch, num_items_in_batch)
            (loss * self.rank.world_size).backward()  # DDP takes the mean over ranks, but each loss is part of the sum
        return loss.detach()

    def kept_buffers(self) -> list[torch.Tensor]:
        """Return DDP's buckets, which all gradients are views of."""
        self.buckets = self.gradients() or self.buckets or []
        return self.buckets

    def free(self) -> None:
        """Free DDP's module: it has buckets as large as all gradients."""
        self.replica = self.buckets = None
