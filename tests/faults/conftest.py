"""What the fault tests share: real runs with a fault, watched from outside, and their outcomes for docs/faults.md."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.tables.outcomes import ENDED_FAULTS
from common.base.paths import REPOSITORY
from common.runtime.faults import VARIABLE
from common.runtime.launchers import torchrun_command
from tests.faults.cases import WORKFLOWS
from tests.forked import CUT_SHORT, Forked
from tests.pace import patient

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background can interrupt, too

KEYS = ("fault", "technique", "outcome")
KEEP = "KEEP_OUTCOMES"
"""Set by `make soak`: the outcomes are kept, for docs/faults.md."""
FINISHED_S = 120


def _is_listened_on(port: int) -> bool:
    with socket.socket(socket.AF_INET6) as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # but for connections that have just ended
        try:
            ours.bind(("", port))
        except OSError:
            return True
    return False


@pytest.fixture
def left_behind() -> Callable[[set[int]], list[object]]:
    """Which of these ports are still listened on, and what shared memory there is that was not there before."""
    before = set(os.listdir("/dev/shm"))

    def left(ports: set[int]) -> list[object]:
        return [*filter(_is_listened_on, ports), *(set(os.listdir("/dev/shm")) - before)]

    return left


@dataclass
class Run:
    """A workflow as processes of their own."""

    process: Forked | subprocess.Popen
    results: Path
    log: Path
    ranks: int
    seen: dict[int, psutil.Process] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.results / "run_record.json").read_text())

    def workers(self) -> dict[int, psutil.Process]:
        """The processes of the ranks, by rank, as far as they have said so."""
        for rank in range(self.ranks):
            place = self.place(rank)
            if rank not in self.seen and "pid" in place:
                with suppress(psutil.NoSuchProcess):
                    self.seen[rank] = psutil.Process(place["pid"])
        return self.seen

    def place(self, rank: int) -> dict[str, Any]:
        """Where a rank of this start is, by its own word."""
        with suppress(OSError, ValueError):
            place = json.loads((self.results / "ranks" / f"rank{rank}.json").read_text())
            if place["said_at"] > self.started_at:
                return place
        return {"step": -1, "point": ""}

    def wait_until(self, true: Callable[[], bool], within_s: float) -> float:
        """How long it took."""
        start_s = time.monotonic()
        while not true():
            assert time.monotonic() - start_s < patient(within_s), self.output[-4000:]
            time.sleep(0.02)
        return time.monotonic() - start_s

    def newest_step(self) -> int:
        """Of the checkpoints."""
        found = (self.results / "checkpoints").glob("checkpoint-*")
        return max((int(path.name.partition("-")[2]) for path in found if path.name.count(".") == 0), default=0)

    def wait_for_checkpoint(self, step: int, within_s: float = 90) -> None:
        self.workers()
        self.wait_until(lambda: self.newest_step() >= step or self.process.poll() is not None, within_s)
        self.wait_until(lambda: len(self.workers()) == self.ranks, 10)

    def end(self, within_s: float) -> int:
        """The exit code, of a job that ends by itself in time."""
        return self.process.wait(patient(within_s))

    def finish(self) -> dict[str, Any]:
        """The record of a run that ends well, in time."""
        try:
            code = self.end(FINISHED_S)
        finally:
            self.kill()
        assert code == 0, self.output[-3000:]
        assert self.record["status"] == "completed"
        return self.record

    def alive(self) -> list[int]:
        """Ranks whose processes are still there."""
        return [rank for rank, process in self.seen.items() if process.is_running() and process.status() != "zombie"]

    def ports(self) -> set[int]:
        """On which its launcher, or what that started, listens now."""
        launcher = psutil.Process(self.process.pid)
        open_ones = [
            one for each in (launcher, *launcher.children(recursive=True)) for one in each.net_connections("tcp")
        ]
        return {one.laddr.port for one in open_ones if one.status == psutil.CONN_LISTEN}

    def kill(self) -> None:
        """It and all that it started, unless it has ended."""
        if self.process.poll() is not None:
            return
        for process in (*psutil.Process(self.process.pid).children(recursive=True), self.process):
            try:
                process.send_signal(signal.SIGCONT)
                process.kill()
            except psutil.NoSuchProcess:
                pass


def _start(
    folder: Path,
    technique: str,
    overrides: Sequence[str] = (),
    fault: str = "",
    name: str = "run",
    restarts: int = 0,
    is_forked: bool = True,
    is_in_cell: bool = False,
    launcher: Sequence[str] = (),
) -> Run:
    """Start a technique's run as a fork, cut short after its training; or just as a user's shell would start it.

    `is_in_cell`: from a process that starts the ranks as a notebook's cell does. `launcher`: more options of torchrun.
    """
    workflow, ranks, own = WORKFLOWS[technique]
    place = REPOSITORY / workflow
    arguments = [*own, "--results_root", str(folder), "--run_name", name, *overrides]
    command = [sys.executable, place.name, *arguments]
    if ranks > 1:
        command = torchrun_command(place.name, ranks, *arguments)
        place_of_options = command.index("--nproc_per_node")
        command[place_of_options:place_of_options] = [f"--max_restarts={restarts}", *launcher]
    if is_in_cell:
        cell = folder / "cell.py"
        cell.write_text(f"from common.runtime.launchers import stream_command\nstream_command({command})\n")
        command = [sys.executable, str(cell)]
    log = folder / f"{name}-{len(list(folder.glob('*.log')))}.log"
    log.touch()
    env = {**os.environ, **({VARIABLE: fault} if fault else {})}
    if is_forked:
        process = Forked(command, place.parent, {**env, CUT_SHORT: "1"}, log)
    else:
        with log.open("ab") as output:
            process = subprocess.Popen(command, cwd=place.parent, env=env, stdout=output, stderr=output)
    return Run(process, folder / "results" / name, log, ranks)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start a technique's run with a fault; what is left of it is killed in the end."""
    runs: list[Run] = []

    def start_run(technique: str, *overrides: str, **others: Any) -> Run:
        runs.append(_start(tmp_path, technique, overrides, **others))
        return runs[-1]

    yield start_run
    for run in runs:
        run.kill()


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The results of a technique's run that nothing happened to, made once."""

    @cache
    def results_of(technique: str, *settings: str) -> Path:
        run = _start(tmp_path_factory.mktemp("straight"), technique, settings)
        run.finish()
        return run.results

    return results_of


@pytest.fixture
def completed(straight: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of those results, where `start` would go on."""
    return lambda technique: Path(shutil.copytree(straight(technique), tmp_path / "results" / "run"))


@dataclass
class Outcomes:
    """Of faults, for the tables of docs/faults.md."""

    rows: dict[tuple[int, str, str], dict[str, object]] = field(default_factory=dict)
    test: str = ""
    """The file of the test that runs."""

    def keep(
        self,
        fault: int,
        technique: str,
        outcome: str,
        noticed_s: float | None = None,
        ended_s: float | None = None,
        lost_steps: int | None = None,
        **of_saves: float,
    ) -> None:
        """One line for each fault, technique and outcome, with the most of each figure; seconds from the fault on.

        None: it was not measured. `of_saves`: `lost_minutes` of training, and `held_up_s`, the longest wait for a save.
        """
        key, seconds = (fault, technique, outcome), {"noticed_s": noticed_s, "ended_s": ended_s}
        rounded = {name: None if value is None else round(value, 1) for name, value in seconds.items()}
        rounded |= {name: round(value, 2) for name, value in of_saves.items()}
        figures, before = {**rounded, "lost_steps": lost_steps}, self.rows.get(key, {})
        most = {name: max(filter(None, (value, before.get(name))), default=value) for name, value in figures.items()}
        self.rows[key] = {**dict(zip(KEYS, key, strict=True)), **most, "test": self.test}


@pytest.fixture
def outcomes(all_outcomes: Outcomes, request: pytest.FixtureRequest) -> Outcomes:
    all_outcomes.test = request.path.relative_to(REPOSITORY).as_posix()
    return all_outcomes


@pytest.fixture(scope="session")
def all_outcomes() -> Iterator[Outcomes]:
    """Kept in a file where that is asked for."""
    found = Outcomes()
    yield found
    if KEEP in os.environ:  # beside what other tests came to; `make soak` begins with none
        before = json.loads(ENDED_FAULTS.read_text()) if ENDED_FAULTS.exists() else []
        rows = {**{tuple(row[name] for name in KEYS): row for row in before}, **found.rows}
        ordered = [rows[key] for key in sorted(rows)]
        ENDED_FAULTS.write_text(json.dumps(ordered, indent=1) + "\n")
