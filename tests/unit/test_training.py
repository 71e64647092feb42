"""The truth checks fail when they should."""

import pytest

from common.training import check_rows_seen, training_flops


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
