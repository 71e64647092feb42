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
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers.trainer_pt_utils import safe_globals

from common.base.paths import REPOSITORY
from common.reporting.outcomes import ENDED_FAULTS
from common.runtime.faults import VARIABLE
from common.runtime.launchers import torchrun_command
from common.training.checkpoints import read_manifest
from common.training.strategy import SHARDS
from tests.forked import CUT_SHORT, Forked

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background can interrupt, too

KEYS = ("fault", "technique", "outcome")
KEEP = "KEEP_OUTCOMES"
"""Set by `make soak`: the outcomes are kept, for docs/faults.md."""
CHAT = ("--train_rows", "65", "--validation_rows", "8", "--test_rows", "1", "--num_train_epochs", "2",
        "--eval_steps", "0.1", "--save_steps", "0.1", "--independent_judge", "none", "--report_to", "none",
        "--max_new_tokens", "1")  # fmt: skip
SUMMARIES = ("--train_rows", "65", "--validation_rows", "4", "--test_rows", "2", "--num_train_epochs", "2",
             "--eval_steps", "0.1", "--save_steps", "0.1", "--report_to", "none", "--num_beams", "1",
             "--max_new_tokens", "2")  # fmt: skip
PAIRS = ("--train_rows", "65", "--validation_rows", "8", "--test_rows", "2", "--num_train_epochs", "2", "--eval_steps",
         "0.1", "--save_steps", "0.1", "--report_to", "none", "--max_new_tokens", "1")  # fmt: skip
WORKFLOWS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "single": ("2.1_lora_finetuning/run_0_cpu_x1/my_workflow_lora_finetuning.py", 1, (*CHAT, "--batch_size", "16")),
    "ddp": ("2.2_lora_finetuning_with_ddp/run_0_cpu_x2/my_workflow_lora_finetuning_with_ddp.py", 2,
            (*CHAT, "--batch_size", "8")),
    "fsdp": ("2.6_full_finetuning_with_fsdp/run_0_cpu_x2/my_workflow_full_finetuning_with_fsdp.py", 2,
             (*CHAT, "--batch_size", "8")),
    "pp": ("2.7_full_finetuning_with_pp/run_0_cpu_x2/my_workflow_full_finetuning_with_pp.py", 2,
           (*CHAT, "--batch_size", "16", "--micro_batches", "2")),
    "machines": ("3.2_summarization/run_0_cpu_x2/my_workflow_summarization_machines.py", 2,
                 (*SUMMARIES, "--batch_size", "8")),
    "preferences": ("3.4_preference_tuning/run_0_cpu_x1/my_workflow_preference_tuning.py", 2,
                    (*PAIRS, "--technique", "full", "--parallel", "ddp", "--batch_size", "8")),
}  # fmt: skip
"""By technique: its workflow, ranks, and settings of a run of ten steps that keeps each of them."""
STEPS = 10


HISTORY = "training_args.bin"
"""Of a checkpoint: the settings of its run, with its name in them."""
TEXTS = (".json", ".jinja", ".md", ".txt")


@pytest.fixture(scope="session")
def workflows() -> dict[str, tuple[str, int, tuple[str, ...]]]:
    return WORKFLOWS


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
            assert time.monotonic() - start_s < within_s, self.output[-4000:]
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
        return self.process.wait(within_s)

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
    launcher: Sequence[str] = (),
) -> Run:
    """Start a technique's run as a fork, cut short after its training; or just as a user's shell would start it.

    `launcher`: more options of torchrun.
    """
    workflow, ranks, own = WORKFLOWS[technique]
    place = REPOSITORY / workflow
    arguments = [*own, "--results_root", str(folder), "--run_name", name, *overrides]
    command = [sys.executable, place.name, *arguments]
    if ranks > 1:
        command = torchrun_command(place.name, ranks, *arguments)
        place_of_options = command.index("--nproc_per_node")
        command[place_of_options:place_of_options] = [f"--max_restarts={restarts}", *launcher]
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
        if run.process.poll() is None:
            run.kill()


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The results of a technique's run that nothing happened to, made once."""

    @cache
    def results_of(technique: str) -> Path:
        run = _start(tmp_path_factory.mktemp("straight"), technique)
        try:
            assert run.end(120) == 0, run.output[-3000:]
        finally:
            if run.process.poll() is None:
                run.kill()
        return run.results

    return results_of


@pytest.fixture
def completed(straight: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
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


# -- two checkpoints


def _tensors(content: object, name: str = "") -> dict[str, torch.Tensor]:
    if torch.is_tensor(content):
        return {name: content.float()}
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return {inner: tensor for key, value in items for inner, tensor in _tensors(value, f"{name}.{key}").items()}


def _part(name: str) -> str:
    """A file, or the folder of shards that make up one state."""
    return SHARDS if name.startswith(f"{SHARDS}/") else name


def _read(path: Path) -> object:
    if path.is_dir():
        whole = path.parent.parent / f"{path.parent.name}.pt"
        dcp_to_torch_save(path, whole)
        return torch.load(whole, weights_only=True)
    with safe_globals():  # numpy's, of the random numbers
        return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def _largest_difference(one: Path, other: Path) -> float:
    """Between two checkpoints' weights, optimizers, schedules and random numbers; bytes that are equal are 0."""
    files, others = (read_manifest(folder)["files"] for folder in (one, other))
    assert files.keys() == others.keys()
    largest = 0.0
    tensors = [name for name in files if not name.endswith(TEXTS) and name != HISTORY]
    for name in {_part(name) for name in tensors}:
        if files.get(name, one) == others.get(name, other):
            continue
        mine, theirs = (_tensors(_read(folder / name)) for folder in (one, other))
        assert mine, name
        assert mine.keys() == theirs.keys(), name
        largest = max([largest, *(float((mine[key] - theirs[key]).abs().max()) for key in mine)])
    return largest


@pytest.fixture(scope="session")
def largest_difference() -> Callable[[Path, Path], float]:
    return _largest_difference
