"""How pytest-xdist assigns tests to workers, and what every process of the tests begins with."""

import importlib
import os
import re
import time
from typing import Any

# before the libraries are imported, which read these once: no network, one thread for a device
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
os.environ.setdefault("KILLS_SEED", str(time.time_ns() % 1_000_000))  # one for all workers: it names tests

import pytest

TIMED = re.compile(r"faults/test_(processes|random_kills)|network/")
"""Files whose tests measure how soon something happens, and share runs."""
SHARES_RANKS = re.compile(r"recipes/|fake_gpus/|faults/test_resume|unit/test_(pipeline|tensor_parallel)\.py")
"""Files whose tests look at what one start of ranks computed."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the fixtures where tests run: xdist's controller runs none, and need not wait for PyTorch's import."""
    is_controller = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not is_controller:
        config.pluginmanager.register(importlib.import_module("tests.fixtures"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Assign tests to workers: a file whose tests share one launch of ranks goes to one worker.

    So do all tests that measure time, which therefore never run at once. By names, as xdist's groups are lost with
    pytest 9.2; the largest groups come first.
    """
    from xdist.scheduler import LoadScopeScheduling  # here: a single test needs no xdist

    class TogetherWhatShares(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if TIMED.search(nodeid):
                return "timed"
            return nodeid.partition("::")[0] if SHARES_RANKS.search(nodeid) else nodeid

    return TogetherWhatShares(config, log)
