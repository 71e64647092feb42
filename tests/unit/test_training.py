"""The truth checks fail when they should."""

from dataclasses import replace
from pathlib import Path

import pytest

from common.run_config import RunConfig
from common.training import check_rows_seen, training_arguments, training_flops


def test_rows_seen_once_per_epoch_pass() -> None:
    check_rows_seen([[0, 2], [1, 3]], row_count=4)
    check_rows_seen([[0, 2, 1, 3], [1, 3, 2, 0]], row_count=4)
    check_rows_seen([[0], [2]], row_count=4)


@pytest.mark.parametrize(
    "rows_by_rank",
    [[[0, 1, 2, 3], [0, 1, 2, 3], [0]], [[0, 1], [0, 1]], [[0, 1, 2], [2]]],
    ids=["one row three times", "both ranks saw the same rows", "one row twice, one never"],
)
def test_rows_skipped_or_repeated_are_refused(rows_by_rank: list[list[int]]) -> None:
    with pytest.raises(RuntimeError, match="were not seen"):
        check_rows_seen(rows_by_rank if len(rows_by_rank) < 3 else [*rows_by_rank, [0]], row_count=4)


def test_frozen_weights_cost_two_thirds() -> None:
    assert training_flops(100, 0) == {"flops_per_token": 600, "flops_formula": "6N full"}
    assert training_flops(10, 90)["flops_per_token"] == 6 * 10 + 4 * 90


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
