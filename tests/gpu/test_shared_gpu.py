"""Two ranks on one GPU, by NCCL: what they send, and each parallelism's losses beside one device's."""

import pytest

from common.checks import shared_gpu
from common.checks.processes import LEFT_OUT, WORKS


@pytest.mark.parametrize("part", shared_gpu.PART_NAMES)
def test_two_ranks_share_a_gpu(part: str, device: str) -> None:
    found = shared_gpu.find_out(part, device)
    if found["status"] == LEFT_OUT:
        pytest.skip(found["why"])
    assert found["status"] == WORKS, found
