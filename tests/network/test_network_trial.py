"""On a slow link, sending gradients while the backward pass goes on must be worth it."""

import os
from pathlib import Path

import pytest

from common.network_trial import BAR, SLOW_MBIT, STEPS, gain, link_name, measure, table
from common.reporting.summarization import EXCHANGES
from common.runtime.virtual_hosts import VirtualHost
from tests.forked import Forked
from tests.network.virtual_links import namespaces_refused

refusal = namespaces_refused()


def test_a_link_is_named_by_its_rate_and_delay() -> None:
    assert (link_name(100, 0), link_name(0, 0)) == ("100 Mbit/s", "not limited")
    assert (link_name(0, 50), link_name(2.5, 50)) == ("not limited, 50 ms", "2.5 Mbit/s, 50 ms")


@pytest.fixture
def forks_on_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the hosts' programs as forks: their steps are measured, not their imports."""

    def start(host: VirtualHost, command: list[str], log: Path, environment: dict[str, str], cwd: Path) -> Forked:
        return Forked(command, cwd, {**os.environ, **environment}, log, host)

    monkeypatch.setattr(VirtualHost, "start", start)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.usefixtures("forks_on_hosts")
@pytest.mark.skipif(bool(refusal), reason=f"no virtual hosts here: {refusal}")
def test_overlap_and_bf16_are_worth_it_on_100_mbit(tmp_path: Path) -> None:
    records = measure(SLOW_MBIT, 0, EXCHANGES, STEPS, tmp_path)
    print(table(records))
    assert [record["config"]["link"] for record in records] == ["100 Mbit/s"] * 3
    assert len({record["effective_batch_size"] for record in records}) == 1
    assert gain(records) >= BAR
