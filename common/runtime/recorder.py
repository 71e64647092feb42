"""Collect what a run measures, and write its record, also when a phase fails."""

import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from common.base.errors import (
    BadInputError,
    RunStoppedError,
    is_full_disk,
    is_of_the_network,
    said_by,
    status_of,
    told_later,
)
from common.base.run_config import LAST, RunConfig
from common.base.secrets import hide_secrets
from common.hardware import devices
from common.runtime.disks import first_on_disk
from common.runtime.watch import BEATS, Watch, reached
from common.runtime.world import Rank, was_restarted

if TYPE_CHECKING:
    from common.planning.plans import Plan
from common.records.store import (
    PLAN_TOLERANCE,
    PREVIOUS,
    RECORD_NAME,
    SCHEMA_VERSION,
    UNFINISHED,
    Record,
    default_run_name,
    environment,
    load_record,
    settings_without_paths,
    write_json,
)


class RunLog:
    """Collects what a run measures, and writes its record: also when a phase fails.

    Made on every rank of a run; making it gives the run an empty results folder. An earlier run of the same name moves
    to `<run name>.previous`, replacing what was there, unless it did not complete: then what was there stays, and with
    checkpoints it moves to `<run name>.unfinished`, without it goes. A phase left by an exception writes a record with
    status `oom`, `interrupted` or `failed`.
    """

    def __init__(self, run: RunConfig, rank: Rank, goes_on: bool = False) -> None:
        """Make the results folder, once for all ranks that share a disk; `goes_on`: with what the last start left."""
        from accelerate.utils import wait_for_everyone

        self.run, self.rank = run, rank
        self.goes_on = goes_on or run.resume_from_checkpoint == LAST or was_restarted()
        """Whether this start resumes what an earlier one left in the results folder."""
        self.run_name = run.run_name or default_run_name(run, rank.launcher)
        self.folder = run.results_folder(self.run_name)
        self.phases_s: dict[str, float] = {}
        self.plan: Plan | None = None
        self.data: dict[str, int] | None = None
        """What was read, once it is in tokens."""
        self.peaks_before_gib: dict[str, float] = {}
        self.training_peaks_gib: dict[str, float] = {}
        self.started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self.writes = first_on_disk(self.folder.parent, rank)
        """Whether this rank is the one that writes what all ranks have."""
        self._own_folder()
        if self.writes:
            if self.folder.exists() and not self.goes_on:
                _make_way(self.folder)
            self.folder.mkdir(exist_ok=self.goes_on)
            (self.folder / RECORD_NAME).unlink(missing_ok=True)
            shutil.rmtree(self.folder / BEATS, ignore_errors=True)  # of ranks that are gone
        wait_for_everyone()
        self.step: Callable[[], int] | None = None
        """How many optimizer steps were taken, once there is a trainer."""
        self.watch = Watch(self.folder, rank, run.step_timeout_s, self._hangs) if rank.is_process else None

    def _own_folder(self) -> None:
        """Take the results folder, which has one owner at a time; a lock of the system's goes with its process.

        Raises:
            BadInputError: another run has it; on every rank.
        """
        from accelerate.utils import gather_object

        taken = False
        if self.writes:
            self.lock = FileLock(self.folder.with_name(f".{self.run_name}.lock"), timeout=0, is_singleton=True)
            try:
                self.lock.acquire()
            except Timeout:
                taken = True
        if any(gather_object([taken])):
            raise BadInputError(
                f"Another run is writing to the results folder {self.folder.name}: wait for it, end it, or pass "
                "another --run_name."
            )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase of the run, in seconds; say when it starts and how long it took."""
        start_s = time.perf_counter()
        reached(name, 0)
        if self.rank.is_main:
            print(f"{name} ...")
        try:
            yield
        except BaseException as error:  # an interrupt is a way to end, too
            with told_later():
                hide_secrets(error)
                self.failed(error, name)
            if status_of(error) == "oom":
                raise RunStoppedError(self._out_of_memory(name)) from error
            if is_full_disk(error) and not isinstance(error, RunStoppedError):  # that has said it already
                raise RunStoppedError(
                    f"The disk of {self.folder} is full ({name}: {said_by(error)}): make room there, or pass another "
                    f"--results_root; --resume_from_checkpoint {LAST} resumes from the newest checkpoint."
                ) from error
            raise
        self.phases_s[name] = time.perf_counter() - start_s
        if self.rank.is_main:
            print(f"{name}: {self.phases_s[name]:.1f} s")

    def failed(self, error: BaseException, phase: str) -> None:
        """Keep how this rank ended; what went wrong first stays, and is not covered by what followed from it."""
        if isinstance(error, GeneratorExit):  # a signal came while `phase` was entered or left, and Python closes it
            error = SystemExit("was told to end by a signal")
        figures = {
            "failed_phase": phase,
            "failed_rank": self.rank.rank,
            "failed_step": self.step() if self.step else None,
            "error": f"{type(error).__name__}: {error}",
        }
        if is_of_the_network(error):
            figures |= {
                "failed_rank": None,
                "error": f"another rank is gone, as rank {self.rank.rank} saw ({said_by(error)}): its output says why",
            }
        self.stop()
        self._keep_failure(status_of(error), figures, follows=is_of_the_network(error) or isinstance(error, SystemExit))

    def _hangs(self, said: str) -> None:
        self._keep_failure("failed", {"failed_rank": self.rank.rank, "error": said}, follows=True)

    def _keep_failure(self, status: str, figures: dict[str, object], follows: bool) -> None:
        if follows and (self.folder / RECORD_NAME).exists():
            return
        try:
            write_json(self._record(status, figures), self.folder / RECORD_NAME)
        except OSError as error:
            print(f"WARNING: the record of this failure cannot be written ({error}).")

    def stop(self) -> None:
        """Watch no more, and give the results folder free."""
        if self.watch:
            self.watch.end()
        if self.writes:
            self.lock.release(force=True)

    def _out_of_memory(self, phase: str) -> str:
        """What was tried, and what would fit."""
        reading = devices.read_memory(self.rank.device)
        tried = f"rank {self.rank.rank}, {self.rank.device}, {phase}: {self.run.rows_per_rank} rows per step"
        fits = "pass a smaller --batch_size"
        if self.plan:
            tried += f" of up to {self.plan.job.batch.length} tokens"
            rows = self.plan.max_batch_size
            fits = f"by the plan {rows} rows fit: pass --batch_size {rows}" if rows else "by the plan no row fits"
        return (
            f"Out of memory ({tried}; the peak was {reading.peak_gib:.2f} of {reading.total_gib:.1f} GiB): {fits}, "
            "with more --gradient_accumulation_steps for the same step, or look at what `python -m common.dry_run` shows."
        )

    def gpu(self) -> devices.Gpu | None:
        """The GPU at hand, where the catalogue has it; None on CPU."""
        return devices.gpu_here() if self.run.device == "cuda" else None

    def training_starts(self, plan: "Plan | None") -> None:
        """Keep the plan; from here on a GPU's peak is training's, which the plan is compared with."""
        self.plan = plan
        for device in self.rank.devices:
            if device != "cpu":
                self.peaks_before_gib[device] = devices.read_memory(device).peak_gib
                devices.forget_peak(device)

    def training_ended(self) -> None:
        """Remember the peak of this rank's devices in training; on CPU it is the process's highest so far."""
        self.training_peaks_gib = {device: devices.read_memory(device).peak_gib for device in self.rank.devices}

    def complete(self, **figures: object) -> Record:
        """Write the record of a completed run, with every rank's memory; call it on all ranks."""
        from accelerate.utils import gather_object

        memory = gather_object([self._memory(number, device) for number, device in enumerate(self.rank.devices)])
        record = self._record("completed", {"cost": self._cost(), **figures, "memory": memory})
        if self.rank.is_main:
            for warning in beyond_plan(memory):
                print(warning)
        if self.writes:
            write_json(record, self.folder / RECORD_NAME)
        if self.rank.is_main:
            print(f"record: {RECORD_NAME} in {self.folder.relative_to(self.folder.parents[1])}")
        self.stop()
        return record

    def _memory(self, number: int, device: str) -> dict[str, object]:
        """Of one of this rank's devices, its `number`th."""
        reading = devices.read_memory(device)
        before_gib = self.peaks_before_gib.get(device, 0.0)
        return {
            "rank": self.rank.rank,
            "device": device,
            "planned_gib": self._planned_gib(self.rank.rank + number, device),
            "peak_training_gib": self.training_peaks_gib.get(device),
            "peak_allocated_gib": None if device == "cpu" else max(before_gib, reading.peak_gib),
            "peak_reserved_gib": reading.peak_reserved_gib,
            "peak_rss_gib": devices.read_memory("cpu").peak_gib,
            "total_gib": reading.total_gib,
        }

    def _planned_gib(self, place: int, device: str) -> float | None:
        """A device's planned peak, in the terms it is measured in: allocated on a GPU, the whole process on CPU."""
        if self.plan is None:
            return None
        memory = self.plan.devices[place]
        return memory.peak_gib if device == "cpu" else memory.allocated_gib

    def _planned(self) -> dict[str, object] | None:
        """What was planned: memory of a device by part, and a step's time; all projected."""
        if self.plan is None:
            return None
        batch, memory = self.plan.job.batch, self.plan.devices[0]
        return {
            "batch": {"rows": batch.rows, "length": batch.length, "labelled": batch.labelled},
            "moment": memory.moment,
            **{f"{part}_gib": gib for part, gib in memory.parts_gib.items()},
            "peak_gib": memory.peak_gib,
            "longest_step_s": self.plan.time.total_s,
            "max_batch_size": self.plan.max_batch_size,
            "sent_bytes": self.plan.time.sent_gb * 1e9,
        }

    def _cost(self) -> dict[str, object] | None:
        """Rent of the GPUs for the phases so far, by the catalogue's price; None on CPU and for other GPUs."""
        gpu = self.gpu()
        if gpu is None or gpu.usd_per_hour is None:
            return None
        hours = sum(self.phases_s.values()) / 3600
        return {
            "usd": gpu.usd_per_hour * self.run.devices * hours,
            "usd_per_hour": gpu.usd_per_hour * self.run.devices,
            "price_date": gpu.price_date,
            "price_source": gpu.price_source,
        }

    def _command(self) -> str:
        """The command that runs this again, from the run folder; a notebook's is the notebook itself."""
        if "ipykernel" in sys.modules:
            return "the notebook"
        started_by = {
            "torchrun": f"torchrun --nproc_per_node {self.rank.world_size}",
            "acclaunch": "accelerate launch --config_file my_accelerate_config.yaml",
        }.get(self.rank.launcher, "python")
        main, run = sys.modules["__main__"], self.run
        settings = ["--technique", run.technique, "--parallel", run.parallel] if hasattr(main, "SETTINGS") else []
        literal = main.defaults_for(run.technique, run.parallel) if settings else getattr(main, "RUN", run)
        settings_now = settings_without_paths(self.run)
        changed = {name: value for name, value in settings_now.items() if value != literal.to_dict()[name]}
        overrides = [*settings, *(word for name, value in changed.items() for word in (f"--{name}", str(value)))]
        return shlex.join([*started_by.split(), Path(sys.argv[0]).name, *overrides])

    def _record(self, status: str, figures: dict[str, object]) -> Record:
        return {
            "schema_version": SCHEMA_VERSION,
            "status": status,
            "technique": self.run.technique,
            "parallel": self.run.parallel,
            "run_folder": self.run.run_folder,
            "run_name": self.run_name,
            "launcher": self.rank.launcher,
            "command": self._command(),
            "started_at": self.started_at,
            "config": settings_without_paths(self.run),
            "environment": environment(self.run),
            "phases_s": self.phases_s,
            "cost": None,
            "planned": self._planned(),
            "data": self.data,
            **figures,
        }


def beyond_plan(memory: list[dict[str, object]]) -> list[str]:
    """A loud line for each device whose peak in training is off its plan by more than `PLAN_TOLERANCE`."""
    lines = []
    for entry in memory:
        planned_gib, peak_gib = entry["planned_gib"], entry["peak_training_gib"]
        if planned_gib and peak_gib and abs(peak_gib / planned_gib - 1) > PLAN_TOLERANCE:
            lines.append(
                f"WARNING: rank {entry['rank']}, {entry['device']}: training peaked at {peak_gib:.2f} GiB, "
                f"{peak_gib / planned_gib - 1:+.0%} of the {planned_gib:.2f} GiB planned: "
                "`python -m common.dry_run` shows the step part by part (the planner's --explain of shards and 4 bits)"
            )
    return lines


def _make_way(folder: Path) -> None:
    """Move an earlier run aside; a failed one does not push out a completed one."""
    previous = folder.with_name(folder.name + PREVIOUS)
    if previous.exists() and not _completed(folder):
        checkpoints = sorted(path.name for path in folder.glob("checkpoints/checkpoint-*"))
        unfinished = folder.with_name(folder.name + UNFINISHED)
        if checkpoints:
            shutil.rmtree(unfinished, ignore_errors=True)
            folder.rename(unfinished)
            print(
                f"an unfinished run of this name ({', '.join(checkpoints)}) is kept as {unfinished.name}; with "
                f"--resume_from_checkpoint {LAST} this run would have resumed it"
            )
        else:
            shutil.rmtree(folder)
        return
    shutil.rmtree(previous, ignore_errors=True)
    folder.rename(previous)


def _completed(folder: Path) -> bool:
    try:
        return load_record(folder / RECORD_NAME)["status"] == "completed"
    except BadInputError:
        return False
