"""The record of one run: schema, environment, save and load. Every figure of a table comes from one of these.

Imports torch only inside a run; reading records needs none.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from common import hardware
from common.failures import RunStoppedError, is_full_disk, is_of_the_network, said_by, status_of, told_later
from common.launch import Rank, was_restarted
from common.run_config import LAST, REPOSITORY, BadInputError, RunConfig
from common.secrets import hide_secrets, without_secrets
from common.watch import BEATS, Watch, reached

if TYPE_CHECKING:
    from common.planner import Plan  # which reads records

SCHEMA_VERSION = 2
RECORD_NAME = "run_record.json"
PREVIOUS, UNFINISHED = ".previous", ".unfinished"
PLAN_TOLERANCE = 0.1
"""Share by which a device's peak may be off its plan before the run says so."""
PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets", "trl", "bitsandbytes", "evaluate", "deepspeed")

Record = dict[str, Any]


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

        from common.disks import first_on_disk  # here: it needs torch

        self.run, self.rank = run, rank
        self.goes_on = goes_on or run.resume_from == LAST or was_restarted()
        """Whether this start goes on with what an earlier one left in the results folder."""
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
                    f"--results_root; --resume_from {LAST} goes on from the newest checkpoint."
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
            save_record(self._record(status, figures), self.folder)
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
        reading = hardware.read_memory(self.rank.device)
        tried = f"rank {self.rank.rank}, {self.rank.device}, {phase}: {self.run.rows_per_rank} rows per step"
        fits = "pass a smaller --batch_size"
        if self.plan:
            tried += f" of up to {self.plan.job.batch.length} tokens"
            rows = self.plan.max_batch_size
            fits = f"by the plan {rows} rows fit: pass --batch_size {rows}" if rows else "by the plan no row fits"
        return (
            f"Out of memory ({tried}; the peak was {reading.peak_gib:.2f} of {reading.total_gib:.1f} GiB): {fits}, "
            "with more --accumulation_steps for the same step, or look at what `python -m common.dry_run` shows."
        )

    def gpu(self) -> hardware.Gpu | None:
        """The GPU at hand, where the catalogue has it; None on CPU."""
        return hardware.gpu_here() if self.run.device == "cuda" else None

    def training_starts(self, plan: "Plan | None") -> None:
        """Keep the plan; from here on a GPU's peak is training's, which the plan is compared with."""
        self.plan = plan
        for device in self.rank.devices:
            if device != "cpu":
                self.peaks_before_gib[device] = hardware.read_memory(device).peak_gib
                hardware.forget_peak(device)

    def training_ended(self) -> None:
        """Remember the peak of this rank's devices in training; on CPU it is the process's highest so far."""
        self.training_peaks_gib = {device: hardware.read_memory(device).peak_gib for device in self.rank.devices}

    def complete(self, **figures: object) -> Record:
        """Write the record of a completed run, with every rank's memory; call it on all ranks."""
        from accelerate.utils import gather_object

        memory = gather_object([self._memory(number, device) for number, device in enumerate(self.rank.devices)])
        record = self._record("completed", {"cost": self._cost(), **figures, "memory": memory})
        if self.rank.is_main:
            for warning in beyond_plan(memory):
                print(warning)
        if self.writes:
            save_record(record, self.folder)
        if self.rank.is_main:
            print(f"record: {RECORD_NAME} in {self.folder.relative_to(self.folder.parents[1])}")
        self.stop()
        return record

    def _memory(self, number: int, device: str) -> dict[str, object]:
        """Of one of this rank's devices, its `number`th."""
        reading = hardware.read_memory(device)
        before_gib = self.peaks_before_gib.get(device, 0.0)
        return {
            "rank": self.rank.rank,
            "device": device,
            "planned_gib": self._planned_gib(self.rank.rank + number, device),
            "peak_training_gib": self.training_peaks_gib.get(device),
            "peak_allocated_gib": None if device == "cpu" else max(before_gib, reading.peak_gib),
            "peak_reserved_gib": reading.peak_reserved_gib,
            "peak_rss_gib": hardware.read_memory("cpu").peak_gib,
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


def settings_without_paths(run: RunConfig) -> dict[str, object]:
    """The run's settings, without paths of this machine: of a model or data folder elsewhere, its name."""
    settings = {**run.to_dict(), "results_root": ""}
    for name in ("model", "data"):
        if str(settings[name]).startswith(("/", "~", ".")):
            settings[name] = Path(str(settings[name])).name
    return settings


def default_run_name(run: RunConfig, launcher: str) -> str:
    """What a run without a name is called; where one workflow shares the work in several ways, with its way."""
    if run.task == "classification":
        parts = f"-micro{run.micro_batches}" if run.parallel == "pp" else ""
        fewer = (
            f"-{run.train_rows}rows" if run.train_rows > 0 else ""
        )  # say with --quick: not to be taken for the whole
        return f"{launcher}-{run.technique}-{run.parallel}{parts}{fewer}-seed{run.seed}"
    if run.task == "summarization":
        return f"{launcher}-{run.loop}-x{run.devices}-seed{run.seed}"
    way = f"{run.parallel}-" if run.is_sharded else ""
    return f"{launcher}-{way}batch{run.batch_size}-seed{run.seed}"


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
                f"--resume_from {LAST} this run would have gone on with it"
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


def environment(run: RunConfig) -> dict[str, object]:
    """Packages, devices and the state of the code."""
    torch = sys.modules.get("torch")
    driver, gpu_names = hardware.gpus()
    return {
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "cuda": torch.version.cuda if torch else None,
        "driver": driver,
        "devices": [hardware.cpu_name()] if run.device == "cpu" else gpu_names[: run.devices],
        "threads_per_rank": torch.get_num_threads() if torch else None,
        "commit": ask_git("rev-parse", "HEAD"),
        "dirty": bool(ask_git("status", "--porcelain")),
    }


def package_version(package: str) -> str | None:
    """The version of an installed package; None = it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def ask_git(*arguments: str) -> str | None:
    """What git says of this repository; None where there is no git, or no history."""
    try:
        done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None  # a copy without git history, say an unpacked archive
    return done.stdout.strip()


def save_record(record: Record, folder: Path) -> Path:
    """Write `run_record.json`."""
    path = folder / RECORD_NAME
    write_json(record, path)
    return path


def write_json(data: dict[str, Any], path: Path) -> None:
    """Write `data` without secrets in place of what is at `path`: a reader finds either of them whole."""
    written = path.with_suffix(f".{os.getpid()}.new")  # ranks may end at once
    written.write_text(without_secrets(json.dumps(data, indent=2)) + "\n", encoding="utf-8")
    written.replace(path)


def load_record(path: Path) -> Record:
    """Read a record.

    Raises:
        BadInputError: it is no record, or of a schema that this code does not know.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path} is no record ({error}): run `make run` first, then `make record`.") from None
    if not isinstance(record, dict) or record.get("schema_version") != SCHEMA_VERSION:
        found = record.get("schema_version") if isinstance(record, dict) else None
        raise BadInputError(f"{path} has schema version {found}, this code reads {SCHEMA_VERSION}: run it again.")
    return record


def kept_records(root: Path = REPOSITORY) -> list[Record]:
    """Every record that was kept, in the order of folders and names."""
    return [load_record(path) for path in sorted(root.glob("*/run_*/records/*.json"))]


def keep_record(results_folder: Path) -> Path:
    """Copy a run's record from `<run folder>/results/<name>` to `<run folder>/records/<name>.json`, to be committed.

    Raises:
        BadInputError: there is no record, or not in a run folder's results.
    """
    record = load_record(results_folder / RECORD_NAME)
    folder = results_folder.resolve()
    if folder.parent.name != "results":
        raise BadInputError(
            f"{results_folder} is no <run folder>/results/<name>: pass RUN=<run folder>/results/<name>."
        )
    kept = folder.parents[1] / "records" / f"{record['run_name']}.json"
    kept.parent.mkdir(exist_ok=True)
    if kept.exists():
        print(f"replaces the record of {load_record(kept)['started_at']}")
    kept.write_text((folder / RECORD_NAME).read_text(encoding="utf-8"), encoding="utf-8")
    return kept


def main() -> None:
    """`python -m common.run_record RESULTS_FOLDER`: keep a run's record."""
    parser = argparse.ArgumentParser(description="Keep the record of a run: copy it where it is committed.")
    parser.add_argument("results_folder", type=Path, help="<run folder>/results/<name>")
    try:
        kept = keep_record(parser.parse_args().results_folder)
    except BadInputError as mistake:
        parser.exit(2, f"error: {mistake}\n")
    where = kept.relative_to(REPOSITORY) if kept.is_relative_to(REPOSITORY) else kept
    print(f"kept {where}; `make tables` renders it")


if __name__ == "__main__":
    main()
