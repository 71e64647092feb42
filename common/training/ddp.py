"""DDP: each rank has a replica of the model and its own rows; gradients are averaged during the backward pass."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from common.base.run_config import RunConfig
from common.models.loading import load_base_model
from common.models.trained_weights import with_trained_weights
from common.planning.device_maps import whole_model_on
from common.runtime.world import Rank
from common.training.answer_logits import Model

ONE_BUCKET_MB = 1000  # more than what trains on CPUs here has of gradients


def data_parallel(model: torch.nn.Module, rank: Rank) -> torch.nn.Module:
    """Put DDP around `model`, which is on this rank's device; alone, a rank has nothing to exchange.

    Gradients are views of DDP's buckets, which are exchanged as soon as they are full. On a GPU the first bucket has
    1 MiB, so that its exchange begins early in the backward pass (PyTorch's default). On a CPU exchange and computation
    share the cores, and one bucket less is one wait less (LOG.md has the times).
    """
    if rank.world_size == 1:
        return model
    bucket_mb = ONE_BUCKET_MB if rank.device == "cpu" else None
    return DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)


def load_replica(run: RunConfig, rank: Rank) -> Model:
    """Return the base with adapters, or with the trained weights switched on, whole on this rank's device."""
    return with_trained_weights(load_base_model(run, whole_model_on(rank.device)), run)


def exchanging(replica: torch.nn.Module, is_last: bool) -> AbstractContextManager[object]:
    """Return a context for the passes of a batch: gradients are exchanged in the last one of a step alone."""
    return replica.no_sync() if isinstance(replica, DistributedDataParallel) and not is_last else nullcontext()
