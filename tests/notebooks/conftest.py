"""Notebooks' kernels as forks of a server that has the libraries loaded."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.forked import CUT_SHORT, Forked
from tests.pace import patient

KERNEL = Path(__file__).with_name("forked_kernel.py")


class ForkedKernel(Forked):
    """A kernel that Jupyter's provisioner takes for one of its own."""

    stdin = stdout = stderr = None

    def __init__(self, arguments: list[str], cwd: Path, env: Mapping[str, str], log: Path) -> None:
        """Start it, and wait until it leads a session: its process group is the one that Jupyter will kill."""
        super().__init__([sys.executable, str(KERNEL), *arguments], cwd, env, log)
        latest = time.monotonic() + patient(60)
        while os.getpgid(self.pid) != self.pid:
            assert time.monotonic() < latest, log.read_text(errors="replace")
            time.sleep(0.01)


@contextmanager
def kernels_forked(log: Path, variables: Mapping[str, str]) -> Iterator[None]:
    """Have Jupyter start kernels as forks, with further variables of the environment; they print to `log`."""

    def launch(command: list[str], env: Mapping[str, str], cwd: str = ".", **_: Any) -> ForkedKernel:
        return ForkedKernel(command[command.index("-f") :], Path(cwd).absolute(), {**env, **variables}, log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jupyter_client.provisioning.local_provisioner.launch_kernel", launch)
        yield


@pytest.fixture
def forked_kernels(tmp_path: Path) -> Iterator[None]:
    """Start kernels as forks, whose runs are short."""
    with kernels_forked(tmp_path / "kernel.log", {CUT_SHORT: "1"}):
        yield
