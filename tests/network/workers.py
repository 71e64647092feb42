"""Processes of a workflow on virtual hosts, each with its own folder for results, as with a disk of its own."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.records.store import RECORD_NAME, Record, load_record
from common.runtime.virtual_hosts import VirtualHost, VirtualNetwork
from tests.forked import Forked
from tests.network.virtual_links import namespaces_refused

START_S = 60
"""How long a process may take to come so far that it joins, on a busy machine."""
RUN_S = 120
"""How long the rest of a whole run may take."""
END_S = 10
"""How long everyone may take to end after one has gone."""

MASTER = "10.77.0.1:29400"
"""Where the hosts meet: at the first one."""
refusal = namespaces_refused()
needs_hosts = pytest.mark.skipif(bool(refusal), reason=f"no virtual hosts here: {refusal}")


@dataclass(frozen=True)
class Worker:
    """A process of the workflow, or of what starts it."""

    process: Forked | subprocess.Popen[bytes]
    disk: Path

    @property
    def output(self) -> str:
        return (self.disk / "log").read_text(errors="replace")

    @property
    def error(self) -> str:
        """The one sentence that it ended with."""
        errors = [line for line in self.output.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, self.output
        assert "Traceback" not in self.output
        return errors[0]

    @property
    def results(self) -> Path:
        return self.disk / "results" / "test"

    @property
    def record(self) -> Record:
        return load_record(self.results / RECORD_NAME)

    @property
    def resumed_after(self) -> int:
        """After which step it resumed, the last time."""
        return int(re.findall(r"resumes after step (\d+)", self.output)[-1])

    def has_said(self, text: str) -> bool:
        return text in self.output


@dataclass(frozen=True)
class Place:
    """Where workers run: on the hosts of a network, or without one on this machine."""

    folder: Path
    script: Path
    settings: tuple[str, ...]
    network: VirtualNetwork | None = None
    workers: list[Worker] = field(default_factory=list)

    def start(
        self,
        host: int,
        *overrides: str,
        launcher: Sequence[str] = (sys.executable,),
        is_forked: bool = True,
        **environment: str,
    ) -> Worker:
        """Start a worker as a fork; or as a process that begins anew, with this environment from its first line."""
        disk = self.folder / f"disk{len(self.workers)}"
        disk.mkdir(parents=True, exist_ok=True)
        command = [*launcher, self.script.name, *self.settings, "--results_root", str(disk), *overrides]
        around = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment}
        on = self.network.hosts[host] if self.network else None
        (disk / "log").touch()
        process = (
            Forked(command, self.script.parent, around, disk / "log", on)
            if is_forked
            else on.start(command, disk / "log", around, self.script.parent)
        )
        self.workers.append(Worker(process, disk))
        return self.workers[-1]

    def finish(self, within_s: float) -> list[int]:
        """Every worker's exit code; all end in time, and leave no process behind."""
        wait_until(lambda: all(worker.process.poll() is not None for worker in self.workers), within_s, self.workers)
        if self.network:
            hosts = self.network.hosts
            wait_until(lambda: not any(host.processes() for host in hosts), END_S, self.workers)
        return [worker.process.returncode for worker in self.workers]


def torchrun(
    host: VirtualHost,
    nodes: int | str,
    ranks: int = 1,
    max_restarts: int = 0,
    address: str = MASTER,
    rdzv_conf: str = "",
) -> list[str]:
    """What starts one host's ranks; forks of the tests do not find hosts by their names, and so are told.

    `rdzv_conf` comes after the usual settings, by which a machine that is gone is noticed in 3 s.
    """
    settings = f"is_host={int(host.number == 0)},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc_per_node", str(ranks),
        "--max_restarts", str(max_restarts), "--rdzv_backend", "c10d", "--rdzv_endpoint", address, "--rdzv_id", "test",
        "--rdzv_conf", f"{settings},{rdzv_conf}".rstrip(","), "--local_addr", host.address,
    ]  # fmt: skip


def wait_until(is_so: Callable[[], bool], within_s: float, workers: Sequence[Worker]) -> None:
    deadline_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline_s, "\n\n".join(worker.output for worker in workers)
        time.sleep(0.05)
