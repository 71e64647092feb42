"""What DDP is told of its buckets."""

import pytest
import torch

from common.runtime.world import Rank
from common.training.ddp import data_parallel


@pytest.mark.usefixtures("one_rank")
def test_cpu_has_one_bucket_and_gpu_has_pytorchs_own() -> None:
    assert [len(_buckets(device)) for device in ("cpu", "cuda")] == [1, 2]


def _buckets(device: str) -> list[str]:
    """Return the sizes of the buckets after a step, of a model with two layers of 2.3 MB each."""
    model = torch.nn.Sequential(torch.nn.Linear(768, 768), torch.nn.Linear(768, 768))
    replica = data_parallel(model, Rank(0, 2, device, "torchrun"))
    for _ in range(3):  # the buckets are built anew after the first, which the next one says
        replica(torch.ones(1, 768)).sum().backward()
    return replica._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
