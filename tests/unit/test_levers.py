"""What may make a step faster on a GPU changes nothing of what is computed."""

from dataclasses import replace
from types import ModuleType
from unittest import mock

import pytest
import torch

from bench import levers
from bench.gpu import GPU_SCALE, REHEARSED_SCALE, STEPS, Trial, take_steps, trial_started
from bench.levers import attend_in_a_batch, pulled
from common.hardware.devices import find_gpu
from common.models import chunked_loss
from common.models.loading import load_base_model
from common.models.separate_rows import attend_within_rows
from common.planning import memory_plan, phases

FEW_LOGITS, CHUNKS = 20_000, 2 * STEPS
"""With so few at once a step has more than two chunks."""


def update_by(*pulled_levers: str) -> torch.Tensor:
    """Return by how much some steps change all trained weights."""
    trial = Trial("full", "", {"precision": "fp32", "optim": "adamw_8bit"}, pulled_levers)
    with pulled(trial.levers), trial_started(trial.run(REHEARSED_SCALE)) as log:
        model, before = take_steps(log).model, load_base_model(log.run, {"": "cpu"}).state_dict()
    trained = [named for named in model.named_parameters() if named[1].requires_grad]
    return torch.cat([(weight.detach() - before[name]).flatten() for name, weight in trained])


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return update_by()


@pytest.mark.parametrize(("lever", "module", "name"), [
    ("no wait for the norm", levers, "_goes_on"),
    ("2^28 logits at once", chunked_loss, "chunk_losses"),
    ("cuDNN's attention", levers, "attend_in_a_batch"),
])  # fmt: skip
def test_a_lever_is_at_work_and_takes_the_same_steps(
    lever: str, module: ModuleType, name: str, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of 8 bits may be rounded to a neighbour where a sum has another order."""
    monkeypatch.setattr(levers, "MANY_LOGITS", FEW_LOGITS)
    with mock.patch.object(module, name, side_effect=getattr(module, name)) as at_work:
        found = update_by(lever)
    assert at_work.call_count > (CHUNKS if module is chunked_loss else 0)
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_rows_of_one_length_attend_as_a_batch_as_each_alone() -> None:
    torch.manual_seed(0)
    given = [torch.randn(1, heads, 3 * 8, 16, requires_grad=True) for heads in (4, 2, 2)]
    borders = {"cu_seq_lens_q": torch.arange(0, 25, 8, dtype=torch.int32), "max_length_q": 8}
    found, expected = (attend(None, *given, None, **borders)[0] for attend in (attend_in_a_batch, attend_within_rows))
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(each.square().sum(), given) for each in (found, expected))
    torch.testing.assert_close(ours, theirs)


def test_the_plan_shares_the_size_of_a_chunk() -> None:
    """Of 12 bytes a logit, where layers keep so little that the head is the peak."""
    h200, one_row = find_gpu("H200 141GB SXM"), replace(GPU_SCALE, rows=1)
    trials = [Trial("lora", "", {"gradient_checkpointing": True}, names) for names in ((), ("2^28 logits at once",))]
    without, with_many = (trial.planned(h200, one_row).fullest[0].allocated_gib for trial in trials)
    assert 1 < with_many - without < 3
    with pulled(["2^28 logits at once"]):
        assert {module.LOGITS_AT_ONCE for module in (chunked_loss, memory_plan, phases)} == {levers.MANY_LOGITS}
    assert chunked_loss.LOGITS_AT_ONCE < levers.MANY_LOGITS
