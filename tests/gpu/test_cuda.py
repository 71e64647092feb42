"""The same workflow on a GPU. Skips, visibly, where there is none."""

from collections.abc import Callable

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lora_trains_on_one_gpu_and_reports_its_memory(run_workflow: Callable, precision: str) -> None:
    done = run_workflow("python", "--device", "cuda", "--precision", precision, "--max_steps", "4")
    assert done.exit_code == 0, done.output
    record = done.record
    assert record["world"][0]["device"] == "cuda:0"
    assert 0 < record["memory"][0]["peak_allocated_gib"] <= record["memory"][0]["peak_reserved_gib"]
    assert "[RANK0:GPU0]" in done.output
