"""Collect what a run measures, and write its record, also when a phase fails."""

import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback
from typing_extensions import override

from common.base import errors
from common.base.paths import command_here, from_repository
from common.base.run_config import LAST, RunConfig
from common.base.secrets import hide_secrets
from common.base.signals import end_signals_deferred
from common.hardware import devices
from common.hardware.prices import usual_price
from common.planning.model_configs import cached_commit
from common.planning.phases import TRAINING
from common.planning.plans import Plan
from common.records import store
from common.records.store import RECORD_NAME, Record
from common.runtime.disks import ResultsFolder, started_before
from common.runtime.memory_tracker import MemoryTracker
from common.runtime.torchrun import nodes_command
from common.runtime.watch import Watch, reached
from common.runtime.world import Rank

LOST_LOCK_S = 120.0  # how long the file system of a shared disk may keep the lock of a machine that was lost


class RunRecorder:
    """Collects what a run measures, and writes its record, also of a failure; every rank of a run makes one.

    Attributes:
        resumes: Whether this start resumes what an earlier one left in the results folder.
        writes: Whether this rank writes what all ranks have: one does on each disk.
        row_digests: Of each split that is learnt from or chosen by, for its checkpoints; empty = they are not known.
        step: How many optimizer steps were taken, once training has begun.
        forgetting: What the model made of other texts before (`common.tasks.forgetting`), where that is measured.
        keeps: Whether anything is kept: reports, validations, checkpoints; of a `Trial` nothing is.
        repeats: Whether every batch has all rows, in order, as in a `Trial` of the longest ones.
    """

    keeps, repeats = True, False

    def __init__(self, run: RunConfig, rank: Rank) -> None:
        self.run, self.rank, self.command_rows = run, rank, run.per_device_eval_batch_size
        self.started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self.run_name = run.run_name or store.default_run_name(run, rank.launcher)
        folder = run.results_folder(self.run_name)
        is_restarted, is_here = started_before(folder)
        takes_last = run.resume_from_checkpoint == LAST
        self.resumes = takes_last or is_restarted
        is_resumed = takes_last or is_here  # a machine that was added may have another run of this name
        one_disk = "" if run.parallelism.replicates else f"With {run.parallel} a checkpoint has a part of every rank"
        lock_s = LOST_LOCK_S if is_restarted else 0.0
        self.results = ResultsFolder(folder, rank, is_resumed, run.nodes, one_disk, lock_s)
        self.folder, self.writes = self.results.path, self.results.writes
        self.memory = PeakMemory(rank)
        self.phases_s: dict[str, float] = {}
        self.plan: Plan | None = None
        self.row_digests: dict[str, str] = {}
        self.data: dict[str, int] | None = None
        self.step: Callable[[], int] | None = None
        self.forgetting: Any | None = None
        self.callbacks: list[TrainerCallback] = []
        if run.nodes > 1 and rank.is_main:
            disks = "one disk, which all machines share" if len(self.results.hosts) == 1 else "each machine's own disk"
            print(f"results and checkpoints are on {disks}")
        self.watch = Watch(self.folder, rank, run.step_timeout_s, self._hangs) if rank.is_process else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase of the run, in seconds; say when it starts and how long it took."""
        start_s = time.perf_counter()
        reached(name, 0)
        self.memory.enter(PHASE_OF.get(name, name))
        if self.rank.is_main:
            print(f"{name} ...")
        try:
            yield
        except BaseException as error:  # an interrupt ends a run, too
            with end_signals_deferred():
                hide_secrets(error)
                self._failed(error, name)
            if errors.status_of(error) == "oom":
                raise errors.RunStoppedError(self._out_of_memory(name)) from error
            if errors.is_full_disk(error) and not isinstance(error, errors.RunStoppedError):  # that has said it already
                raise errors.RunStoppedError(
                    f"The disk of {self.folder} is full ({name}: {errors.first_sentence(error)}): make room there, or "
                    f"pass another --results_root; --resume_from_checkpoint {LAST} resumes from the newest checkpoint."
                ) from error
            raise
        self.phases_s[name] = time.perf_counter() - start_s
        if self.rank.is_main:
            print(f"{name}: {devices.time_text(self.phases_s[name])}")

    def _failed(self, error: BaseException, phase: str) -> None:
        """Keep how this rank ended, but not over what went wrong first; a run that refuses its input leaves nothing."""
        if isinstance(error, errors.BadInputError) and self.step is None and not self.resumes:
            self.stop()
            self.results.discard()
            return
        if isinstance(error, GeneratorExit):  # a signal came while `phase` was entered or left, and Python closes it
            error = SystemExit("was told to end by a signal")
        rank, is_lost_rank = self.rank.rank, errors.is_lost_peer(error)
        lost = f"another rank is gone, as rank {rank} saw ({errors.first_sentence(error)}): its output says why"
        figures = {
            "failed_phase": phase,
            "failed_rank": None if is_lost_rank or isinstance(error, errors.AskedToEndError) else rank,
            "failed_step": self.step() if self.step else None,
            "error": lost if is_lost_rank else f"{type(error).__name__}: {error}",
        }
        self.stop()
        self._keep_failure(errors.status_of(error), figures, follows=is_lost_rank or isinstance(error, SystemExit))

    def _hangs(self, said: str) -> None:
        self._keep_failure("failed", {"failed_rank": self.rank.rank, "error": said}, follows=True)

    def _keep_failure(self, status: str, figures: dict[str, object], follows: bool) -> None:
        if follows and (self.folder / RECORD_NAME).exists():
            return
        try:
            store.write_json(self._record(status, figures), self.folder / RECORD_NAME)
        except OSError as error:
            print(f"WARNING: the record of this failure cannot be written ({error}).")

    def stop(self) -> None:
        """Stop the watch, and release the results folder."""
        if self.watch:
            self.watch.end()
        self.results.release()

    def _out_of_memory(self, phase: str) -> str:
        reading = devices.read_memory(self.rank.device)
        tried = f"rank {self.rank.rank}, {self.rank.device}, {phase}: {self.run.rows_per_rank} rows per step"
        fits = "pass a smaller --batch_size"
        if self.plan:
            tried += f" of up to {self.plan.job.batch.length} tokens"
            rows = self.plan.max_batch_size
            fits = f"by the plan {rows} rows fit: pass --batch_size {rows}" if rows else "by the plan no row fits"
        return (
            f"Out of memory ({tried}; the peak was {reading.peak_gib:.2f} of {reading.total_gib:.1f} GiB): {fits}, "
            f"with more --gradient_accumulation_steps for the same step, or look at what `{command_here('dry_run')}` "
            "shows."
        )

    def gpu(self) -> devices.Gpu | None:
        """Return what this rank is planned on: the GPU, where the catalogue has it, or the CPU with this process."""
        return devices.gpu_here() if self.run.device == "cuda" else devices.cpu_device(self.memory.process_gib)

    def training_starts(self, plan: Plan | None) -> None:
        """Keep the plan; from here on a GPU's peak is training's, which the plan is compared with."""
        self.plan = plan
        self.memory.enter(TRAINING)

    def complete(self, **figures: object) -> Record:
        """Write the record of a completed run, with every rank's memory; call it on all ranks."""
        memory = gather_object(self.memory.figures(self.plan))
        for when, found in (self.forgetting.figures if self.forgetting else {}).items():
            figures["quality"][when] |= found
        cost = rent(self.gpu(), self.run.devices, sum(self.phases_s.values()) / 3600)
        record = self._record("completed", {"cost": cost, **figures, "memory": memory})
        if self.writes:
            store.write_json(record, self.folder / RECORD_NAME)
        if self.rank.is_main:
            where = self.folder.relative_to(self.folder.parents[1])
            print(*beyond_plan(memory), f"record: {RECORD_NAME} in {where}", sep="\n")
            if self.run.goal.chats:
                print(f"talk to it: {command_here('chat')} {shlex.quote(str(from_repository(self.folder)))}")
        self.stop()
        return record

    def _record(self, status: str, figures: dict[str, object]) -> Record:
        is_pretrained = self.run.weights == "pretrained"
        return {
            "schema_version": store.SCHEMA_VERSION,
            "status": status,
            "technique": self.run.technique,
            "parallel": self.run.parallel,
            "run_folder": self.run.run_folder,
            "run_name": self.run_name,
            "launcher": self.rank.launcher,
            "command": command_of(replace(self.run, per_device_eval_batch_size=self.command_rows), self.rank),
            "started_at": self.started_at,
            "config": store.settings_anywhere(self.run),
            # None for folders and random weights
            "model_commit": cached_commit(self.run.model, self.run.model_revision) if is_pretrained else None,
            "environment": store.environment(self.run),
            "phases_s": self.phases_s,
            "cost": None,
            "planned": planned_figures(self.plan) if self.plan else None,
            "data": self.data,
            **figures,
        }


class Trial:
    """Stands in for a run's recorder where its steps are tried; `folder` is for what a library must write."""

    keeps = writes = False
    repeats = True
    run_name = "trial"
    phase = nullcontext  # which times and says nothing

    def __init__(self, run: RunConfig, rank: Rank, folder: Path, callbacks: Iterable[TrainerCallback] = ()) -> None:
        self.run, self.rank, self.folder, self.callbacks = run, rank, folder, list(callbacks)
        self.memory = Uncounted(rank)

    def gpu(self) -> devices.Gpu | None:
        """Return what layers are placed for: the GPU, where the catalogue has it, or the CPU."""
        return devices.gpu_here() if self.run.device == "cuda" else devices.cpu_device()


PHASE_OF = {  # phases of a plan by a workflow's name of them; others are called the same
    "load model and data": "loading",
    "load data": "loading",
    "build trainer": "loading",
    "sum up": TRAINING,
    "merge and reload": "merging",
    "save and reload": "merging",
}


@dataclass
class PeakMemory:
    """The peak memory of a rank's devices in each phase, in GiB.

    A GPU's allocator knows it. A process's peak cannot be reset, and most of it is Python's and the libraries': on a
    CPU tensors are counted instead, in a step of each phase, beside the process's peak at the end of training.

    Attributes:
        by_phase: Peaks by phase and device; of phases that come several times the highest.
        process_gib: What the process held before its model loaded.
    """

    rank: Rank
    by_phase: dict[str, dict[str, float]] = field(default_factory=dict)
    training_gib: dict[str, float] = field(default_factory=dict)
    process_gib: float = field(default_factory=lambda: devices.read_memory("cpu").now_gib)
    current: str = "loading"

    def enter(self, phase: str) -> None:
        """Keep the GPUs' peaks as those of the phase so far, and let them start again."""
        peaks = self.by_phase.setdefault(self.current, {})
        for device in self.rank.devices:
            if device != "cpu":
                peaks[device] = max(peaks.get(device, 0.0), devices.read_memory(device).peak_gib)
                devices.forget_peak(device)
        self.current = phase

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Enter a phase, and afterwards the one before again."""
        before = self.current
        self.enter(phase)
        yield
        self.enter(before)

    @contextmanager
    def counting(self, phase: str, parts: Mapping[str, Iterable[torch.Tensor]]) -> Iterator[MemoryTracker | None]:
        """On a CPU, count the tensors that are alive meanwhile as those of a phase; `parts` were there before."""
        if self.rank.device != "cpu":
            yield None
            return
        tracker = MemoryTracker(vocab_size=0, rounded_to=1)
        tracker.add_all(parts)
        del parts  # else what is freed meanwhile would still be held
        with tracker:
            tracker.enter(phase)
            yield tracker
        peak_gib = max(sum(alive.values()) for alive in tracker.timeline.values()) / devices.GIB
        peaks = self.by_phase.setdefault(phase, {})
        peaks["cpu"] = max(peaks.get("cpu", 0.0), peak_gib)

    def training_ended(self) -> None:
        """Remember each device's peak in training; on CPU it is the process's highest so far."""
        self.enter(TRAINING)
        on_cpu = devices.read_memory("cpu").peak_gib
        self.training_gib = {
            device: on_cpu if device == "cpu" else self.by_phase[TRAINING][device] for device in self.rank.devices
        }

    def figures(self, plan: Plan | None) -> list[dict[str, object]]:
        """Return what the record says of each device, beside what `plan` has for it."""
        self.enter(self.current)
        return [self._of_device(device, plan, self.rank.rank + n) for n, device in enumerate(self.rank.devices)]

    def _of_device(self, device: str, plan: Plan | None, number: int) -> dict[str, object]:
        reading, on_cpu = devices.read_memory(device), device == "cpu"
        planned, phases = (plan.devices[number], plan.phases[number]) if plan else (None, ())
        measured = {name: peaks[device] for name, peaks in self.by_phase.items() if device in peaks}
        return {
            "rank": self.rank.rank,
            "device": device,
            # as it is measured: the whole process on CPU, what is allocated on a GPU
            "planned_gib": planned and (planned.peak_gib if on_cpu else planned.allocated_gib),
            "planned_gib_by_phase": {phase.name: phase.memory.allocated_gib for phase in phases},
            "peak_training_gib": self.training_gib.get(device),
            "peak_gib_by_phase": measured,
            "peak_allocated_gib": None if on_cpu else max(measured.values(), default=None),
            "peak_reserved_gib": reading.peak_reserved_gib,
            "process_gib": self.process_gib,
            "peak_rss_gib": devices.read_memory("cpu").peak_gib,
            "total_gib": reading.total_gib,
        }


class Uncounted(PeakMemory):
    """Leaves the peaks as they are, where they are read by who tries the steps."""

    @override
    def enter(self, phase: str) -> None:
        self.current = phase

    @override
    def counting(self, phase: str, parts: Mapping[str, Iterable[torch.Tensor]]) -> AbstractContextManager[None]:
        return nullcontext()


def beyond_plan(memory: list[dict[str, object]]) -> list[str]:
    """Return a warning for each device whose peak in training is off its plan by more than `PLAN_TOLERANCE`."""
    lines = []
    for entry in memory:
        planned_gib, peak_gib = entry["planned_gib"], entry["peak_training_gib"]
        if entry["device"] == "cpu":  # tensors: what a process keeps besides differs from machine to machine
            planned_gib, peak_gib = (entry[f"{kind}_gib_by_phase"].get(TRAINING) for kind in ("planned", "peak"))
        if planned_gib and peak_gib and abs(peak_gib / planned_gib - 1) > store.PLAN_TOLERANCE:
            lines.append(
                f"WARNING: rank {entry['rank']}, {entry['device']}: training peaked at {peak_gib:.2f} GiB, "
                f"{peak_gib / planned_gib - 1:+.0%} of the {planned_gib:.2f} GiB planned: "
                f"`{command_here('dry_run')}` shows the step part by part (planner --explain: of shards and 4 bits)"
            )
    return lines


def planned_figures(plan: Plan) -> dict[str, object]:
    """Return what was planned: the first device's memory by part, and a step's time."""
    batch, memory = plan.job.batch, plan.devices[0]
    return {
        "batch": {"rows": batch.rows, "length": batch.length, "labelled": batch.labelled},
        "moment": memory.moment,
        **{f"{part}_gib": gib for part, gib in memory.parts_gib.items()},
        "peak_gib": memory.peak_gib,
        "phases_gib": {phase.name: phase.memory.peak_gib for phase in plan.phases[0]},
        "longest_step_s": plan.time.total_s,
        "max_batch_size": plan.max_batch_size,
        "sent_bytes": plan.time.sent_gb * 1e9,
    }


def rent(gpu: devices.Gpu | None, count: int, hours: float) -> dict[str, object] | None:
    """Return the rent of `count` GPUs by its usual price; None on CPU and for GPUs without a price."""
    if (price := usual_price(gpu)) is None:
        return None
    return {
        "usd": price.usd_per_hour * count * hours,
        "usd_per_hour": price.usd_per_hour * count,
        "price_date": price.date,
        "price_source": f"{price.provider}: {price.source}",
    }


def command_of(run: RunConfig, rank: Rank) -> str:
    """Return the command that repeats a run from its run folder; for a notebook that is the notebook itself."""
    if "ipykernel" in sys.modules:
        return "the notebook"
    launchers = {
        "torchrun": nodes_command(run.nodes, run.ranks_per_node),
        "acclaunch": ["accelerate", "launch", "--config_file", "my_accelerate_config.yaml"],
    }
    main = sys.modules["__main__"]
    settings = ["--technique", run.technique, "--parallel", run.parallel] if hasattr(main, "SETTINGS") else []
    literal = main.defaults_for(run.technique, run.parallel) if settings else getattr(main, "RUN", run)
    usual = literal.to_dict()
    asked = store.settings_anywhere(run)
    changed = {name: value for name, value in asked.items() if value != usual[name]}
    if "model" in changed:  # with another model the folder's own rate would become that of the rule
        changed["learning_rate"] = asked["learning_rate"]
    overrides = [*settings, *(word for name, value in changed.items() for word in (f"--{name}", str(value)))]
    return shlex.join([*launchers.get(rank.launcher, ["python"]), Path(sys.argv[0]).name, *overrides])
