"""What the tests of several machines compare with."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.network.workers import GLOBAL_BATCH, SAME, Place, Worker


@pytest.fixture(scope="session")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Worker]:
    """The steps of a workflow with some settings on one device, taken once."""

    @cache
    def finished(script: Path, *settings: str) -> Worker:
        settings = (*SAME, *settings, "--batch_size", f"{GLOBAL_BATCH}")
        place = Place(tmp_path_factory.mktemp("one"), script, settings)
        place.start(0)
        return place.finish_well()[0]

    return finished
