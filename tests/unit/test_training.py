"""The truth checks fail when they should."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils.data import DistributedSampler

from common.run_config import RunConfig
from common.training import check_rows_seen, training_arguments, training_flops


def test_rows_used_once_per_epoch_pass() -> None:
    check_rows_seen([[0, 2], [1, 3]], row_count=4, row_uses=4)
    check_rows_seen([[0, 2, 1, 3], [1, 3, 2, 0]], row_count=4, row_uses=8)
    check_rows_seen([[0], [2]], row_count=4, row_uses=2)


@pytest.mark.parametrize(
    "rows_by_rank",
    [[[0, 1], [2, 3, 0]], [[0, 1], [2]], [[0, 1], [0, 1]], [[0, 1, 2], [2]]],
    ids=["one row repeated", "one row dropped", "both ranks used the same rows", "one row twice, one never"],
)
def test_rows_skipped_or_repeated_are_refused(rows_by_rank: list[list[int]]) -> None:
    with pytest.raises(RuntimeError, match="used"):
        check_rows_seen(rows_by_rank, row_count=4, row_uses=4)


@pytest.mark.parametrize("drop_last", [True, False])
def test_pytorchs_sampler_would_be_refused(drop_last: bool) -> None:
    ranks = [DistributedSampler(range(819), 2, rank, seed=42, drop_last=drop_last) for rank in (0, 1)]
    rows_by_rank: list[list[int]] = [[], []]
    for epoch in range(6):
        for rank, sampler in enumerate(ranks):
            sampler.set_epoch(epoch)
            rows_by_rank[rank] += list(sampler)
    with pytest.raises(RuntimeError, match="room for 4914"):
        check_rows_seen(rows_by_rank, row_count=819, row_uses=6 * 819)


def test_frozen_weights_need_no_gradients_of_their_own() -> None:
    assert training_flops(100, 0) == {"flops_per_token": 600, "flops_formula": "6N full"}
    assert training_flops(10, 90)["flops_per_token"] == 420


@pytest.mark.parametrize(("setting", "reentrant"), [("reentrant", True), ("non-reentrant", False)])
def test_the_way_of_checkpointing_is_set_explicitly(
    run_config: RunConfig, tmp_path: Path, setting: str, reentrant: bool
) -> None:
    arguments = training_arguments(replace(run_config, gradient_checkpointing=setting), tmp_path)
    assert arguments.gradient_checkpointing
    assert arguments.gradient_checkpointing_kwargs == {"use_reentrant": reentrant}
    assert arguments.ddp_find_unused_parameters is False


def test_no_checkpointing_is_none(run_config: RunConfig, tmp_path: Path) -> None:
    assert not training_arguments(run_config, tmp_path).gradient_checkpointing
