"""What may make a step faster on a GPU changes nothing of what is computed."""

import pytest
import torch

from bench import levers
from bench.gpu_trial import REHEARSED_SCALE, Trial, steps_of
from bench.levers import LEVERS, attend_in_a_batch, pulled
from common.models.separate_rows import attend_within_rows
from common.planning import memory_plan
from common.training import chunked_loss

ON_CPU = [name for name in LEVERS if name != "Liger's loss"]  # whose kernels are for GPUs


def update_by(*pulled_levers: str) -> torch.Tensor:
    """Return by how much some steps change all trained weights."""
    trial = Trial("full", "", {"precision": "fp32", "optim": "adamw_8bit"}, pulled_levers)
    with pulled(trial.levers), steps_of(trial.run(REHEARSED_SCALE), REHEARSED_SCALE.length) as (trainer, _):
        trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
        before = torch.cat([weight.detach().flatten() for weight in trained])
        trainer.train()
        return torch.cat([weight.detach().flatten() for weight in trained]) - before


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return update_by()


@pytest.mark.parametrize("lever", ON_CPU)
def test_a_lever_takes_the_same_steps(lever: str, expected: torch.Tensor) -> None:
    """States of 8 bits may be rounded to a neighbour where a sum has another order."""
    assert (update_by(lever) - expected).norm() < 0.01 * expected.norm()


def test_rows_of_one_length_attend_as_a_batch_as_each_alone() -> None:
    torch.manual_seed(0)
    given = [torch.randn(1, heads, 3 * 8, 16, requires_grad=True) for heads in (4, 2, 2)]
    borders = {"cu_seq_lens_q": torch.arange(0, 25, 8, dtype=torch.int32), "max_length_q": 8}
    found, expected = (attend(None, *given, None, **borders)[0] for attend in (attend_in_a_batch, attend_within_rows))
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(each.square().sum(), given) for each in (found, expected))
    torch.testing.assert_close(ours, theirs)


def test_the_plan_shares_the_size_of_a_chunk() -> None:
    with pulled(["2^28 logits at once"]):
        assert {module.LOGITS_AT_ONCE for module in (chunked_loss, memory_plan)} == {levers.MANY_LOGITS}
    assert chunked_loss.LOGITS_AT_ONCE < levers.MANY_LOGITS
