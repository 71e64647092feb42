"""Processes of a workflow on virtual hosts, each with its own folder for results, as with a disk of its own."""

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from common.records.store import RECORD_NAME, Record, load_record
from tests.forked import Forked
from tests.network.virtual_hosts import VirtualHost, VirtualNetwork
from tests.network.virtual_links import namespaces_refused
from tests.pace import patient

START_S = 60
"""How long a process may take to come so far that it joins, on a busy machine."""
RUN_S = 120
"""How long the rest of a whole run may take."""
END_S = 10
"""How long everyone may take to end after one has gone."""

GLOBAL_BATCH = 8
STEPS = 5
SAME = ("--train_rows", "33", "--validation_rows", "9", "--test_rows", "1", "--independent_judge", "none",
        "--max_new_tokens", "1", "--report_to", "none", "--learning_rate_scaling", "none", "--optimizer", "sgd",
        "--learning_rate", "0.003", "--warmup_steps", "0", "--max_steps", f"{STEPS}", "--eval_steps", "0.2",
        "--save_steps", "1", "--run_name", "test")  # fmt: skip
"""With which several ranks take the steps of one device."""

MASTER = "10.77.0.1:29400"
"""Where the hosts meet: at the first one."""
refusal = namespaces_refused()
needs_hosts = pytest.mark.skipif(bool(refusal), reason=f"no virtual hosts here: {refusal}")


@dataclass(frozen=True)
class Worker:
    """A process of the workflow, or of what starts it."""

    process: Forked
    disk: Path

    @property
    def output(self) -> str:
        return (self.disk / "log").read_text(errors="replace")

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
    ranks: int = 1
    """On each host."""
    disk: Path | None = None
    """That all share; else each has one of its own."""
    workers: list[Worker] = field(default_factory=list)

    def start(self, host: int, *overrides: str, launcher: Sequence[str] = (sys.executable,), **env: str) -> Worker:
        """Start a worker as a fork."""
        disk = self.folder / f"disk{len(self.workers)}"
        disk.mkdir(parents=True, exist_ok=True)
        root = ("--results_root", str(self.disk or disk))
        command = [*launcher, self.script.name, *self.settings, *root, *overrides]
        around = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env}
        on = self.network.hosts[host] if self.network else None
        (disk / "log").touch()
        self.workers.append(Worker(Forked(command, self.script.parent, around, disk / "log", on), disk))
        return self.workers[-1]

    def start_ranks(
        self,
        host: int,
        *overrides: str,
        env: Mapping[str, str] | None = None,
        by: Sequence[str] = (),
        **options: object,
    ) -> Worker:
        """Start the ranks of one host; `options` are those of `torchrun`, `by` stands before the workflow's name."""
        count = len(self.network.hosts)
        launcher = torchrun(self.network.hosts[host], **{"nodes": count, "ranks": self.ranks, **options})
        size = ("--devices", f"{count * self.ranks}", "--nodes", f"{count}")
        return self.start(host, *size, *overrides, launcher=[*launcher, *by], **(env or {}))

    def start_all(self, *overrides: str, **options: Any) -> list[Worker]:
        """Start the ranks of each host."""
        return [self.start_ranks(host.number, *overrides, **options) for host in self.network.hosts]

    def finish(self, within_s: float = START_S + RUN_S) -> list[int]:
        """Every worker's exit code; all end in time, and leave no process behind."""
        wait_until(lambda: all(worker.process.poll() is not None for worker in self.workers), within_s, self.workers)
        if self.network:
            hosts = self.network.hosts
            wait_until(lambda: not any(host.processes() for host in hosts), END_S, self.workers)
        return [worker.process.returncode for worker in self.workers]

    def finish_well(self, within_s: float = START_S + RUN_S) -> list[Worker]:
        """The workers, when all have ended without an error."""
        assert not any(self.finish(within_s)), [worker.output for worker in self.workers]
        return self.workers


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
    deadline_s = time.monotonic() + patient(within_s)
    while not is_so():
        assert time.monotonic() < deadline_s, "\n\n".join(worker.output for worker in workers)
        time.sleep(0.05)
