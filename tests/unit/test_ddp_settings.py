"""What DDP is told of its buckets."""

from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs
from torch.nn.parallel import DistributedDataParallel

from common.training.ddp import ddp_settings


def test_cpu_has_one_bucket_and_gpu_has_pytorchs_own(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert [len(_buckets(device)) for device in ("cpu", "cuda")] == [1, 2]
    finally:
        dist.destroy_process_group()


def test_accelerate_passes_all_settings_on() -> None:
    """It leaves out what equals its own default, for which PyTorch then takes another."""
    handler = DistributedDataParallelKwargs(**ddp_settings("cpu"))
    assert handler.to_kwargs() == ddp_settings("cpu")


def _buckets(device: str) -> list[str]:
    """Return the sizes of the buckets after a step, of a model with two layers of 2.3 MB each."""
    model = torch.nn.Sequential(torch.nn.Linear(768, 768), torch.nn.Linear(768, 768))
    replica = DistributedDataParallel(model, **ddp_settings(device))
    for _ in range(3):  # the buckets are built anew after the first, which the next one says
        replica(torch.ones(1, 768)).sum().backward()
    return replica._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
