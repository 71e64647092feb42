"""Whole replicas on every rank, for loops over steps that are written out in a workflow, also across machines.

How gradients come together is the workflow's (across machines by `GradientExchange`, in buckets, after each backward
pass or while it goes on); the rest of a step is that of every `LoopTrainer`.
"""

import socket
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from typing_extensions import override

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.rows import Tokens
from common.models.shards import host_copy
from common.runtime.recorder import RunRecorder
from common.training.digests import begin_hashing, begin_writing
from common.training.loop import LoopTrainer
from common.training.strategy import Batch, WholeModel

WEIGHTS_FILE = "replica.pt"
"""Of a checkpoint: weights and optimizer as every rank has them."""


class Replicas(WholeModel):
    """Every rank holds the whole model, and has rows of its own; the workflow sums the gradients."""

    takes_steps = True

    def __init__(self, log: RunRecorder) -> None:
        """`log` knows which rank of each disk writes what all have."""
        super().__init__(log.run, log.rank)
        self.writes = log.writes

    def save(self, folder: Path) -> None:
        """Write what all ranks have, on one rank of each disk."""
        self._write(folder, {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def save_weights(self, folder: Path) -> None:
        """Write the weights, on one rank of each disk."""
        self._write(folder, {"model": self.model.state_dict()})

    def copied(self, is_full: bool) -> dict[str, Any]:
        """Return a copy of what `save`, or else `save_weights`, writes, on one rank of each disk."""
        states = {"optimizer": self.optimizer.state_dict()} if is_full else {}
        return host_copy({"model": self.model.state_dict()} | states) if self.writes else {}

    def write_in_background(self, folder: Path, parts: dict[str, Any]) -> Future[Any]:
        """Write what `copied` has returned, on one rank of each disk."""
        file = folder / WEIGHTS_FILE
        write, files = (partial(torch.save, parts, file), [file]) if self.writes else (lambda: None, [])
        return begin_writing(write, files)

    def load(self, folder: Path) -> None:
        """Take back weights and optimizer, on every rank."""
        self.optimizer.load_state_dict(self._take_back(folder)["optimizer"])

    def load_weights(self, folder: Path) -> None:
        """Take back the weights, on every rank."""
        self._take_back(folder)

    def _write(self, folder: Path, content: dict[str, Any]) -> None:
        if self.writes:
            torch.save(content, folder / WEIGHTS_FILE)
            begin_hashing([folder / WEIGHTS_FILE])

    def _take_back(self, folder: Path) -> dict[str, Any]:
        """Load a checkpoint's weights, and return all that it has."""
        saved = torch.load(folder / WEIGHTS_FILE, map_location="cpu", weights_only=True)
        self.model.load_state_dict(saved["model"])
        return saved


class PlainLoop(LoopTrainer):
    """Rows, optimizer, schedule, reports, validation and checkpoints of one rank; `steps()` hands out the work.

    Ranks may stand on machines with a disk each.

    Attributes:
        around: What stands around the model, such as DDP, once a loss was computed.
    """

    around: torch.nn.Module | None = None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.writes = self.strategy.writes
        self.create_optimizer()

    def loss_of(self, model: torch.nn.Module, batch: Batch, num_items_in_batch: int) -> torch.Tensor:
        """Return this batch's part of the step's loss: the sum of its losses over the step's `num_items_in_batch`.

        `model` is the trained one, or what stands around it.
        """
        self.reach("batch")
        self.around = model
        loss = self.strategy.loss(batch, num_items_in_batch, model)
        self.loss_sum += loss.detach()
        return loss

    @override
    def back_propagate(self, rows: list[Tokens]) -> None:
        labels = sum(map(self.strategy.labels_in, rows)) * self.batches.world_size
        for batch in self.at_once(rows):
            self.strategy.loss(batch, labels, self.around).backward()

    @override
    def kept_buffers(self) -> list[torch.Tensor]:
        return self.buckets_of(self.around)

    @override
    def free(self) -> None:
        self.around = None
        super().free()


# -- gradients of several machines brought together

Bucket = list[torch.nn.Parameter]


def buckets_of(weights: list[torch.nn.Parameter], bucket_bytes: float) -> list[Bucket]:
    """Return the trained weights in groups of about `bucket_bytes`, the last layer first, as in a backward pass."""
    buckets: list[Bucket] = []
    held = bucket_bytes
    for weight in reversed([weight for weight in weights if weight.requires_grad]):
        if held + weight.nbytes > bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(weight)
        held += weight.nbytes
    return buckets


def sum_gradients(buckets: list[Bucket]) -> None:
    """Replace every gradient by its sum over all ranks: one message for each bucket, none for each weight."""
    for bucket in buckets:
        gradients = [weight.grad for weight in bucket if weight.grad is not None]  # an unused weight has none anywhere
        if gradients:
            flat = parameters_to_vector(gradients)
            dist.all_reduce(flat)
            vector_to_parameters(flat, gradients)


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
        raise BadInputError(f"The ranks begin with different weights ({listed}): give all the same --model.")


def send_as_bf16(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Call PyTorch's hook, which DDP lets through by its own name with NCCL alone; gloo sums bf16, too."""
    return bf16_compress_hook(group, bucket)


class GradientExchange:
    """Sums the gradients of all ranks of a loop, as `RunConfig.gradient_exchange` says.

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
            self.model = DistributedDataParallel(model, bucket_cap_mb=run.bucket_cap_mb, gradient_as_bucket_view=True)
        if run.gradient_exchange == "overlapped-bf16":
            self.model.register_comm_hook(None, send_as_bf16)

    def part(self, is_last: bool) -> AbstractContextManager[object]:
        """Return a context for the passes of a micro-batch: DDP sends in the last one of a step only."""
        return nullcontext() if is_last or not self.overlaps else self.model.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of this rank's share of the loss."""
        factor = self.ranks if self.overlaps else 1  # DDP takes the mean over ranks, but each loss is part of a sum
        (loss * factor).backward()

    def complete(self) -> None:
        """Give every rank the sum of all gradients."""
        if not self.overlaps:
            sum_gradients(self.buckets)
