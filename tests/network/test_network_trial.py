"""On a slow link, sending gradients while the backward pass goes on must be worth it."""

from pathlib import Path

import pytest

from tests.network.network_trial import SLOW_MBIT, gain, measure, table
from tests.network.workers import needs_hosts

BAR = 1.5


@pytest.mark.slow
@pytest.mark.alone
@needs_hosts
def test_overlap_and_bf16_are_worth_it_on_100_mbit(tmp_path: Path) -> None:
    records = measure(SLOW_MBIT, tmp_path)
    print(table(records))
    assert [record["config"]["link"] for record in records] == ["100 Mbit/s"] * 3
    assert len({record["effective_batch_size"] for record in records}) == 1
    assert gain(records) >= BAR
