"""What the tracker counts of tensors whose memory comes and goes without an operation."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.runtime.memory_tracker import MemoryTracker, like_cuda
from tests.recipes.held import live_objects


def tracker() -> MemoryTracker:
    return MemoryTracker(vocab_size=0, rounded_to=1)


def test_a_storage_that_is_resized_counts_as_large_as_it_is() -> None:
    """FSDP frees so what it gathered, and takes it back."""
    held = torch.zeros(1000)
    with tracker() as counted:
        counted.add(held, "weights")
        assert counted.live["weights"] == 4000
        held.untyped_storage().resize_(0)
        assert counted.live["weights"] == 0
        held.untyped_storage().resize_(4000)
        assert counted.live["weights"] == 4000
    held.untyped_storage().resize_(0)  # no longer watched
    assert counted.live["weights"] == 4000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_s_backward_kernel_on_cuda_makes_a_temporary(dtype: torch.dtype) -> None:
    """Beside the result and the gradient of the scores, all in fp32 (ATen/native/cuda/SoftMax.cu)."""
    of_result, gradients = torch.randn(4, 16), []
    for context in (nullcontext(), like_cuda()):
        scores = torch.linspace(-1, 1, 64).view(4, 16).to(dtype).requires_grad_()
        with context, tracker() as counted:
            result = torch.nn.functional.softmax(scores, dim=-1, dtype=torch.float32)
            counted.enter("backward")
            result.backward(of_result)
        gradients.append(scores.grad)
    assert sum(counted.timeline["backward"].values()) == 3 * 4 * scores.numel()
    torch.testing.assert_close(gradients[1], gradients[0])


def test_autocast_leaves_a_softmax_in_the_format_that_is_asked_for() -> None:
    """As CUDA's (ATen/autocast_mode.h: `fp32_set_opt_dtype`); gpt-oss asks for that of its scores."""
    scores = torch.ones(4, 16, dtype=torch.bfloat16)
    with like_cuda(), torch.autocast("cpu", torch.bfloat16), tracker() as counted:
        asked_for = torch.nn.functional.softmax(scores, dim=-1, dtype=torch.bfloat16)
        assert sum(counted.timeline["load"].values()) == 2 * scores.numel()
        assert torch.nn.functional.softmax(scores, dim=-1).dtype == torch.float32
    assert asked_for.dtype == torch.bfloat16


@pytest.fixture
def four_ranks() -> Iterator[DeviceMesh]:
    """A mesh of which this process is the first rank, and the others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def test_of_a_distributed_tensor_the_local_part_counts(four_ranks: DeviceMesh) -> None:
    whole = DTensor.from_local(torch.ones(10, 10), four_ranks, [Shard(0)], run_check=False)
    with tracker() as counted:
        doubled = whole * 2
        assert doubled.shape == (40, 10)
        assert counted.live["activations"] == 400
        counted.add(whole, "weights")
        assert counted.live["weights"] == 400


def test_what_watches_a_run_may_meet_a_view_of_a_weight_that_was_just_written_to() -> None:
    """As `Embedding` makes one while it zeroes the padding token: autograd refuses to say whether it is a leaf."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with torch.no_grad():
        view = weight[0]
        view.fill_(0)
    with pytest.raises(RuntimeError, match="no_grad"):
        _ = view.is_leaf
    _, trained = live_objects()
    assert any(each is weight for each in trained)
    assert not any(each is view for each in trained)
