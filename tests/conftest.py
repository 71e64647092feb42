"""How tests are assigned to workers and measured, and what every process of the tests begins with."""

import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

# before the libraries are imported, which read these once: no network, one thread for a device
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
os.environ.setdefault("KILLS_SEED", str(time.time_ns() % 1_000_000))  # one for all workers

import pytest

from tests.durations import read_kept, scope_of, seconds_of_scopes, slice_of_now
from tests.pace import slowness

SLOW_TESTS = pytest.StashKey[list[str]]()
"""Of those that were collected, whether they are selected or not; `make soak`'s are no one else's."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `make test-all` and of the slice."""
    parser.addoption("--measured", type=Path, help="write each test's seconds into this file, for tests.durations")
    parser.addoption("--slice", action="store_true", help="run, of the slow tests, those of this commit's slice")


def pytest_configure(config: pytest.Config) -> None:
    """Register the fixtures where tests run: xdist's controller runs none, and need not wait for PyTorch's import."""
    if config.getoption("numprocesses", None):
        slowness()  # before there are workers, which share it
    config.option.loadscopereorder = False
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.getoption("numprocesses", None):
        config.pluginmanager.register(importlib.import_module("tests.fixtures"))
    if config.getoption("measured") and not is_worker:
        config.pluginmanager.register(Measured(config.getoption("measured")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note which tests are slow, order them for the workers, and select the slice's and those not yet measured."""
    slow = [item.nodeid for item in items if item.get_closest_marker("slow") and not item.get_closest_marker("soak")]
    config.stash[SLOW_TESTS] = slow
    if hasattr(config, "workerinput"):  # the longest first, so that no worker is left alone with them in the end
        seconds = seconds_of_scopes()
        items.sort(key=lambda item: -seconds.get(scope_of(item.nodeid), 0))
    if config.getoption("slice"):
        chosen = {test for tests in slice_of_now() for test in tests} | (set(slow) - read_kept().slow.keys())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]


class Measured:
    """Of each test: the seconds that it and what it sets up took, None if it was skipped, and whether it is slow.

    Those of `make soak` alone are left out.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.seconds, self.slow = file, dict[str, float | None](), set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a test's set-up, call or end."""
        if "soak" in report.keywords:
            return
        before = self.seconds.get(report.nodeid, 0.0)
        self.seconds[report.nodeid] = None if report.skipped or before is None else before + report.duration
        if "slow" in report.keywords:
            self.slow.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write them."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps({test: (each, test in self.slow) for test, each in self.seconds.items()}))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Assign tests to workers: a file whose tests share one launch of ranks goes to one worker.

    So do all tests that measure time, which therefore never run at once. By names, as xdist's groups are lost with
    pytest 9.2; in the order in which they were collected.
    """
    from xdist.scheduler import LoadScopeScheduling  # here: a single test needs no xdist

    class TogetherWhatShares(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return TogetherWhatShares(config, log)
