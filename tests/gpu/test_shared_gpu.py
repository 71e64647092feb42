"""Two ranks on one GPU, by NCCL: what they send, and each parallelism's losses beside one device's."""

import json
from pathlib import Path

import pytest

from common.checks import shared_gpu
from common.checks.processes import LEFT_OUT, WORKS


@pytest.mark.parametrize("part", shared_gpu.PART_NAMES)
def test_two_ranks_share_a_gpu(part: str, device: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    shared_gpu.main([part, "--device", device, "--json", str(file)])
    found = json.loads(file.read_text())
    if found["status"] == LEFT_OUT:
        pytest.skip(found["why"])
    assert found["status"] == WORKS, found
