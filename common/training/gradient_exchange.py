"""Gradients of several machines brought together, in buckets: after each backward pass, or while it goes on."""

import socket
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from common.base.errors import BadInputError
from common.base.run_config import RunConfig

Bucket = list[torch.nn.Parameter]


def buckets_of(weights: list[torch.nn.Parameter], bucket_bytes: float) -> list[Bucket]:
    """Trained weights in groups of about `bucket_bytes`, last layer first, as the backward pass comes to them."""
    buckets: list[Bucket] = []
    held = bucket_bytes
    for weight in reversed([weight for weight in weights if weight.requires_grad]):
        size = weight.numel() * weight.element_size()
        if held + size > bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(weight)
        held += size
    return buckets


def sum_gradients(buckets: list[Bucket]) -> None:
    """Replace every gradient by its sum over all ranks: one message for each bucket, none for each weight."""
    for bucket in buckets:
        gradients = [weight.grad for weight in bucket if weight.grad is not None]  # an unused weight has none anywhere
        if not gradients:
            continue
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def check_same_weights(model: torch.nn.Module) -> None:
    """Refuse to begin where the ranks' models differ: equal gradients would not make them equal.

    Raises:
        BadInputError: with a digest of each rank's weights, and its host.
    """
    digest = sha256()
    for weight in model.parameters():
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy())
    found = gather_object([(socket.gethostname(), digest.hexdigest()[:12])])
    if len({digest for _, digest in found}) > 1:
        listed = ", ".join(f"rank {rank} ({host}) {digest}" for rank, (host, digest) in enumerate(found))
        raise BadInputError(f"The members begin with different weights ({listed}): give all the same --model.")


def send_as_bf16(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's hook, which DDP lets through by its own name with NCCL alone; gloo sums bf16, too."""
    return bf16_compress_hook(group, bucket)


class GradientExchange:
    """How the ranks of a loop come to the same gradients, as `RunConfig.gradient_exchange` says.

    Each rank's loss is its sum over the labelled tokens of *all* ranks, so that the sum of the ranks' gradients is the
    mean over these tokens: a rank with longer summaries weighs more, as it would on one device.
    """

    def __init__(self, model: torch.nn.Module, run: RunConfig) -> None:
        """`model` is this rank's; DDP, where it is asked for, stands around it.

        Raises:
            BadInputError: the ranks' models differ.
        """
        check_same_weights(model)
        self.ranks, self.overlaps = dist.get_world_size(), run.gradient_exchange != "after"
        self.model = model
        self.buckets = buckets_of(list(model.parameters()), run.bucket_cap_mb * 2**20)
        if self.overlaps:
            own_gpu = None if run.device == "cpu" else [next(model.parameters()).device]
            self.model = DistributedDataParallel(
                model, device_ids=own_gpu, bucket_cap_mb=run.bucket_cap_mb, gradient_as_bucket_view=True
            )
        if run.gradient_exchange == "overlapped-bf16":
            self.model.register_comm_hook(None, send_as_bf16)

    def part(self, is_last: bool) -> AbstractContextManager[object]:
        """Around forward and backward pass of a micro-batch: DDP sends in the last one of a step only."""
        return nullcontext() if is_last or not self.overlaps else self.model.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of this rank's share of the loss."""
        factor = self.ranks if self.overlaps else 1  # DDP takes the mean over ranks, but each loss is part of a sum
        (loss * factor).backward()

    def complete(self) -> None:
        """Every rank has the sum of all gradients afterwards."""
        if not self.overlaps:
            sum_gradients(self.buckets)
