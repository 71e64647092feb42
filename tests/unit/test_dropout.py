"""The cheaper dropout drops and scales as PyTorch's does, and only in training."""

import pytest
import torch

from common.dropout import LaneDropout, use_lane_dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_dropped_and_the_scale_of_the_rest_are_right(p: float) -> None:
    torch.manual_seed(0)
    count = 1_000_003  # no multiple of four
    dropped = LaneDropout(p)(torch.ones(count))
    spread = (p * (1 - p) / count) ** 0.5
    assert (dropped == 0).float().mean().item() == pytest.approx(p, abs=5 * spread)
    assert dropped[dropped != 0].unique().tolist() == pytest.approx([1 / (1 - p)])
    by_lane = (dropped[:1_000_000].view(-1, 4) == 0).float()
    assert by_lane.mean(0).tolist() == pytest.approx([p] * 4, abs=10 * spread)
    assert by_lane.T.corrcoef().fill_diagonal_(0).abs().max().item() < 0.01


def test_the_gradient_goes_where_the_value_went_and_a_seed_gives_the_same_mask() -> None:
    dropout, values = LaneDropout(0.5), torch.ones(3, 5, requires_grad=True)
    torch.manual_seed(1)
    first = dropout(values)
    first.sum().backward()
    assert torch.equal(values.grad, first)
    torch.manual_seed(1)
    assert torch.equal(dropout(values), first)
    assert dropout.eval()(values) is values


def test_every_dropout_of_a_model_is_replaced_but_one_that_drops_nothing() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Dropout(0.1), "b": torch.nn.Sequential(torch.nn.Dropout(0.0))})
    use_lane_dropout(model)
    assert type(model["a"]) is LaneDropout
    assert model["a"].p == 0.1
    assert type(model["b"][0]) is torch.nn.Dropout
