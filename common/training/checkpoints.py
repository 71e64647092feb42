"""Checkpoints that are there whole or not at all: written aside, flushed, listed with their digests, then renamed.

A checkpoint is a full state, which a training resumes from, or the best weights alone.

A process that dies at any moment leaves the checkpoint before, the new one, or both. What is read again is first
compared with its list: PyTorch, safetensors and DCP all load a file with a wrong byte without an error.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object, wait_for_everyone

from common.base.errors import BadInputError, RunStoppedError, is_of_the_network, said_by
from common.base.run_config import BAD, LAST, RunConfig
from common.base.specs import PARALLELISMS
from common.data.rows import Splits
from common.hardware.devices import GIB
from common.records.store import default_run_name
from common.runtime.disks import places_aside
from common.runtime.faults import fault_at
from common.runtime.machines import digest_of_model, digest_of_rows
from common.runtime.watch import reached
from common.training.digests import Digests, collecting_digests, digest_of, flush_file
from common.training.strategy import trainer_takes_steps

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
"""The name of a checkpoint's folder, as Transformers gives it: with the optimizer steps that were taken."""
MANIFEST_FILE = "manifest.json"
"""What a checkpoint is of (`about`), its files with bytes and SHA-256, and a digest of the list itself."""
STATE_FILE = "trainer_state.json"
PARTIAL, GOING = ".partial", ".going"
"""Folders beside the checkpoints: of one that is being written, and of those that are being removed."""
SPARE_BYTES = 2**20
HOLDS, BEST = "holds", "best"
"""Of what a checkpoint says: `FULL_STATE` or `WEIGHTS`; and the best step so far, 0 where there is none."""
FULL_STATE, WEIGHTS = "full state", "weights"


class DamagedCheckpointError(BadInputError):
    """A checkpoint is not as it was written."""


# -- writing


@contextmanager
def atomic_checkpoint(folder: Path, about: Mapping[str, Any], byte_count: int, commits: bool) -> Iterator[Path]:
    """Yield a fresh folder to write into, which becomes `folder` when every rank has left this context.

    Called on every rank; arguments and errors are those of `UnfinishedCheckpoint`.
    """
    unfinished = UnfinishedCheckpoint(folder, about, byte_count, commits)
    with unfinished.being_written() as partial:
        yield partial
    unfinished.commit()


class UnfinishedCheckpoint:
    """A checkpoint that is being written, aside, until it is committed; a process has one at a time.

    Attributes:
        background: What is still being written while training goes on.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], byte_count: int, commits: bool) -> None:
        """Make a fresh folder to write into; called on every rank.

        `about` says what run the checkpoint is of, `byte_count` how much this rank is about to write, and `commits`
        whether it is the one of its disk that lists and renames.

        Raises:
            RunStoppedError: there is no space for it; what was there before is as it was.
        """
        self.folder, self.about, self.commits = folder, about, commits
        self.step, self.partial = steps_at(folder), folder.parent / PARTIAL / folder.name
        self.digests = Digests()
        self.background: Future[Any] | None = None
        reached("saving", self.step)
        _check_space(folder, byte_count, commits)
        if commits:
            shutil.rmtree(self.partial.parent, ignore_errors=True)
            self.partial.mkdir(parents=True)
        wait_for_everyone()

    @contextmanager
    def being_written(self) -> Iterator[Path]:
        """Yield the folder to write into.

        Raises:
            RunStoppedError: it could not be written; what was there before is as it was.
        """
        with self._telling_of_failures(), collecting_digests(self.digests):
            yield self.partial

    def is_written(self) -> bool:
        """Return whether nothing is being written any more on any rank; called on every rank."""
        is_written = self.background is None or self.background.done()
        return all(gather_object([is_written and self.digests.are_done()]))

    def commit(self) -> None:
        """Wait until all is written, list it, and give it its name; called on every rank.

        Raises:
            RunStoppedError: it could not be written; what was there before is as it was.
        """
        reached("saving", self.step)
        with self._telling_of_failures():
            if self.background:
                self.background.result()
            fault_at("written", self.step)
            own = self.digests.collect(self.partial)
            of_ranks = gather_object([own])  # every rank has written its part
            if self.commits:
                # where disks are apart each has a file of the same name, whose bytes may differ
                self._rename({name: digest for each in (*of_ranks, own) for name, digest in each.items()})
        wait_for_everyone()

    def _rename(self, known: Mapping[str, str]) -> None:
        flush(self.partial)
        fault_at("flushed", self.step)
        write_manifest(self.partial, self.about, known)
        fault_at("listed", self.step)
        if _is_listed(self.folder):  # of the same step, from an earlier start
            remove([self.folder])
        elif self.folder.exists():
            _set_aside(self.folder)
        self.partial.rename(self.folder)
        flush_file(self.folder.parent)
        fault_at("renamed", self.step)

    @contextmanager
    def _telling_of_failures(self) -> Iterator[None]:
        try:
            yield
        except (KeyboardInterrupt, SystemExit, RunStoppedError):
            raise
        except BaseException as error:  # DCP's own derives from it
            if is_of_the_network(error):
                raise
            root = self.folder.parent
            raise RunStoppedError(
                f"The checkpoint after step {self.step} could not be written ({said_by(error)}; "
                f"{shutil.disk_usage(root).free / GIB:.2f} GiB are free in {root}): make room there, or pass another "
                f"--results_root; the checkpoint before is whole, and --resume_from_checkpoint {LAST} resumes from it."
            ) from error


def _check_space(folder: Path, byte_count: int, commits: bool) -> None:
    """Refuse to begin what the disk cannot hold; every rank comes to the same end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    counts, writers, free_on_ranks = zip(*gather_object([(byte_count, commits, free)]), strict=True)
    needed, least = sum(counts) / max(1, sum(writers)) + SPARE_BYTES, min(free_on_ranks)
    if least < needed:
        raise RunStoppedError(
            f"The checkpoint after step {steps_at(folder)} takes about {needed / GIB:.2f} GiB, but {least / GIB:.2f} "
            f"GiB are free in {folder.parent}: make room there, or pass another --results_root; the checkpoint before "
            f"is whole, and --resume_from_checkpoint {LAST} resumes from it."
        )


def write_manifest(folder: Path, about: Mapping[str, Any], known: Mapping[str, str] | None = None) -> None:
    """List the files of a folder, with what they are of; the last file that is written.

    `known`: the digests of files by their names, where they were hashed while they were written.
    """
    known = known or {}
    files = {
        name: {"bytes": path.stat().st_size, "sha256": known.get(name) or digest_of(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        for name in [path.relative_to(folder).as_posix()]
    }
    path = folder / MANIFEST_FILE
    path.write_bytes(_as_bytes({"about": dict(about), "files": files}))
    flush_file(path)
    flush_file(folder)


def _as_bytes(listed: Mapping[str, Any]) -> bytes:
    """Return a manifest as it is written, so that no byte of it can change unseen."""
    digest = sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**listed, "sha256": digest}, indent=1, sort_keys=True) + "\n").encode()


def flush(folder: Path) -> None:
    """Have the system write a folder's files, and their names, to the disk now."""
    for path in [*folder.rglob("*"), folder]:
        flush_file(path)


def to_keep(checkpoints: Path, best: int | None) -> set[str]:
    """Return the names of the checkpoints that are still needed: at most two full states, and best weights.

    Those are the weights after step `best`, the newest full state, and the weights that were the best when it was
    written: a run that resumes from it begins with them. Should it be damaged there is one full state more: one of
    those weights is, or else it is the one before.
    """
    states = [folder for folder in found_in(checkpoints) if _has_full_state(folder)]
    best_ones = {best, *(read_manifest(newest)["about"].get(BEST) for newest in states[:1])}
    kept = {f"checkpoint-{step}" for step in best_ones if step} | {newest.name for newest in states[:1]}
    spare = [state.name for state in states if state.name not in kept]
    return kept | set(spare[: max(0, 2 - (len(states) - len(spare)))])


def _has_full_state(folder: Path) -> bool:
    """Return whether a training can resume from a checkpoint, by its list; from a damaged list none can."""
    with suppress(DamagedCheckpointError):
        return holds(folder) == FULL_STATE
    return False


def rotate(checkpoints: Path, keep: set[str]) -> None:
    """Remove every checkpoint but those named `keep`."""
    remove([folder for folder in found_in(checkpoints) if folder.name not in keep and _is_listed(folder)])
    fault_at("rotated", max((steps_at(checkpoints / name) for name in keep), default=0))


def remove(folders: list[Path]) -> None:
    """Remove checkpoints: first their names, at once, so that no half of one is left under its name."""
    for folder in folders:
        going = folder.parent / GOING
        going.mkdir(exist_ok=True)
        shutil.rmtree(going / folder.name, ignore_errors=True)
        folder.rename(going / folder.name)
        shutil.rmtree(going, ignore_errors=True)


# -- reading


def steps_at(folder: Path) -> int:
    """Return after how many optimizer steps a checkpoint was written, by its folder's name."""
    named = CHECKPOINT.fullmatch(folder.name)
    if not named:
        raise BadInputError(f"{folder} is no checkpoint: its folder is to be called checkpoint-<step>.")
    return int(named[1])


def found_in(checkpoints: Path) -> list[Path]:
    """Return the checkpoints of a run, whole or not, the newest first."""
    folders = [path for path in checkpoints.glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name)]
    return sorted(folders, key=steps_at, reverse=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        DamagedCheckpointError: it is missing, or not as it was written.
    """
    try:
        content = (folder / MANIFEST_FILE).read_bytes()
    except OSError as error:
        raise DamagedCheckpointError(
            f"{folder} has no {MANIFEST_FILE} that can be read ({said_by(error)}), so that it is no whole checkpoint: "
            "pass a folder checkpoint-<step> that a run of this folder wrote."
        ) from None
    try:
        listed = json.loads(content)
        del listed["sha256"]
        unchanged = _as_bytes(listed) == content
    except (ValueError, TypeError, KeyError, RecursionError):
        unchanged = False
    if not unchanged:
        raise _damaged(folder, f"{MANIFEST_FILE} was changed")
    return listed


def holds(folder: Path) -> str:
    """Return what a checkpoint is, by its list: a `FULL_STATE`, as all were once, or `WEIGHTS` alone.

    Raises:
        DamagedCheckpointError: see `read_manifest`.
    """
    return read_manifest(folder)["about"].get(HOLDS, FULL_STATE)


def verify(folder: Path) -> dict[str, Any]:
    """Read every byte of a checkpoint, and return what it is of (`about`).

    Raises:
        DamagedCheckpointError: a file is missing, new, of another size, or has other bytes than were written.
    """
    listed = read_manifest(folder)
    files = listed["files"]
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    for name in sorted(there - {MANIFEST_FILE, *files}):
        raise _damaged(folder, f"{name} was put beside its files")
    for name, file in files.items():
        path = folder / name
        if name not in there:
            raise _damaged(folder, f"{name} is missing")
        if path.stat().st_size != file["bytes"]:
            raise _damaged(folder, f"{name} has {path.stat().st_size:,} of {file['bytes']:,} bytes")
        if digest_of(path) != file["sha256"]:
            raise _damaged(folder, f"{name} has other bytes than were written")
    return listed["about"]


def _damaged(folder: Path, reason: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"The checkpoint {folder} is damaged: {reason}. Resume from another one: --resume_from_checkpoint {LAST} takes "
        "the newest whole one of a run."
    )


def verify_once(folder: Path, is_main: bool) -> dict[str, Any]:
    """Verify a checkpoint on one rank for all; every rank returns or raises the same.

    Raises:
        DamagedCheckpointError: see `verify`.
    """
    found: list[dict[str, Any] | DamagedCheckpointError] = []
    reached("verifying", steps_at(folder))
    if is_main:
        try:
            found = [verify(folder)]
        except DamagedCheckpointError as damage:
            found = [damage]
    (about,) = gather_object(found)
    if isinstance(about, DamagedCheckpointError):
        raise about
    return about


def newest_whole(checkpoints: Path) -> Path | None:
    """Return a run's newest undamaged full state; damaged checkpoints are named and renamed."""
    for folder in found_in(checkpoints):
        try:
            if holds(folder) == WEIGHTS:
                continue
            verify(folder)
        except DamagedCheckpointError as damage:
            print(f"WARNING: {damage}")
            print(f"It is kept as {_set_aside(folder).name}; the one before is tried.")
        else:
            return folder
    return None


def _is_listed(folder: Path) -> bool:
    """Return whether a checkpoint was written here: others of such a name are the user's."""
    return (folder / MANIFEST_FILE).is_file()


def _set_aside(folder: Path) -> Path:
    """Rename a checkpoint that is not as it was written, and return it; only another such one makes way for it."""
    aside = next(place for place in places_aside(folder, BAD) if _is_listed(place) or not place.exists())
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


# -- what a run can resume from


GROUPED = "group_by_length"
KEPT = (
    "technique", "task", "weights", "precision", "quantization", "picture_noise", "train_on", "max_length",
    "max_target_length", "beta", "exchange_answers", "warmup_steps", "lr_scheduler_type", "optim", "weight_decay",
    "max_grad_norm", "target_modules", "freeze_vision_tower", "lora_r", "lora_alpha", "lora_dropout",
)  # fmt: skip
"""Settings that a resumed run has as the checkpoint's; what other settings ask for is told by rows, ranks and steps, or
may change: how long, how far, when to report and save, and by which kernels."""
BY_MEASUREMENT = ("reduce_lr_on_plateau", "greedy")
"""Schedules whose learning rate follows from what was measured, and cannot be set anew in between."""
TRAINERS_FILE, LOOPS_FOLDER = "optimizer.pt", "shards/"
"""By which checkpoints of the Trainer and of the written-out loop are told apart, of one device or of DDP."""


def about_run(run: RunConfig, rows: int, data: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what a checkpoint says of its run, which a resumed run must share, but for its steps and learning rate.

    Args:
        run: As it trains.
        rows: To train on.
        data: What `digests_of` returns of its rows; None = they are not known.
    """
    settings: dict[str, Any] = {name: getattr(run, name) for name in KEPT}
    settings["target_modules"] = ",".join(sorted(run.target_names))
    if run.goal.summarizes:
        settings["partitions"] = run.partition_count
    if run.parallelism.pipelines:
        settings["device_map"] = run.device_map
    return {
        "technique": "lora" if run.method.has_adapters else "full",  # `lora` stands for any adapters
        "parallel": run.parallel,
        "loop": "trainer" if run.loop == "trainer" else "plain",
        "ranks": run.world_size,
        "rows_per_step": run.effective_batch_size,
        "rows": rows,
        "seed": run.seed,
        "order": GROUPED if run.groups_by_length else "random",
        "settings": settings,
        "data": dict(data or {}),
        "model": f"random weights of {run.model}" if run.weights == "random" else digest_of_model(run),
        "steps": run.total_steps(rows),
        "peak_learning_rate": run.peak_learning_rate,
    }


def digests_of(splits: Splits) -> dict[str, str]:
    """Return how many rows a run learns from and chooses by, with digests of these in their order."""
    parts = {"training": splits.train, "validation": splits.validation}
    return {name: f"{len(rows):,} rows, digest {digest_of_rows(rows)}" for name, rows in parts.items()}


def check_checkpoint(run: RunConfig, launcher: str, rows: int, data: Mapping[str, str]) -> None:
    """Refuse a checkpoint that cannot be resumed, by its list alone: its bytes are read when training begins.

    `rows`, `data`: as for `about_run`.

    Raises:
        BadInputError: see `check_resumable`; or nothing is left to train, or this run would move its folder away.
    """
    own_name = run.run_name or default_run_name(run, launcher)
    own = run.results_folder(own_name)
    if run.resume_from_checkpoint == LAST:
        # a damaged one is named, and kept aside, when training begins
        for newest in list(filter(_has_full_state, found_in(own / "checkpoints")))[:1]:
            _check_listed(newest, run, rows, data)
        return
    folder = Path(run.resume_from_checkpoint).expanduser()
    steps = run.total_steps(_check_listed(folder, run, rows, data))
    if steps_at(folder) >= steps:
        raise BadInputError(
            f"resume_from_checkpoint is {folder}, a checkpoint after step {steps_at(folder)}, and this run has "
            f"{steps}: nothing is left to train; raise --num_train_epochs or --max_steps."
        )
    if folder.resolve().is_relative_to(own.resolve()):
        raise BadInputError(
            f"resume_from_checkpoint lies in the results of a run called {own_name}, as this one would be: pass "
            f"--resume_from_checkpoint {LAST} to resume that run, or another --run_name."
        )


def _check_listed(folder: Path, run: RunConfig, rows: int, data: Mapping[str, str]) -> int:
    """Refuse what cannot be resumed, and return how many rows are trained on: rows may be left out, or divided."""
    about = read_manifest(folder)["about"]
    known = run.max_truncated_fraction or (data and about.get("data"))
    rows = about["rows"] if known else rows
    check_resumable(run, rows, folder, about, data, trainer_takes_steps(run))
    return rows


def check_resumable(
    run: RunConfig,
    rows: int,
    folder: Path,
    about: Mapping[str, Any],
    data: Mapping[str, str],
    by_trainer: bool,
) -> None:
    """Refuse a checkpoint that this run, of so many training rows, cannot resume from.

    What an older checkpoint does not say is not compared. `by_trainer`: whether the Trainer takes the steps, and reads
    its own files.

    Raises:
        BadInputError: what it is of, and what the run is.
    """
    own = about_run(run, rows, data)
    about = {"order": GROUPED, **about}  # the only one that older checkpoints had
    form = () if run.loop != "trainer" else _of_another_form(folder, by_trainer)
    reasons = chain(_of_another_kind(run, own, about), form, _of_other_settings(own, about))
    for reason in reasons:
        raise BadInputError(f"resume_from_checkpoint is {folder}, a checkpoint {reason}.")


def _of_another_kind(run: RunConfig, own: Mapping[str, Any], about: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a checkpoint's parts or rows are not this run's."""
    changed = "make them equal, or rows would be skipped or repeated"
    parallelisms = [PARALLELISMS[name] for name in (about["parallel"], run.parallel)]
    are_whole = all(each.is_single or each.replicates for each in parallelisms)
    differs = {name: about[name] != own[name] for name in own if name in about}
    problems = [
        (
            about.get(HOLDS) == WEIGHTS,
            f"with the best weights alone: pass one with a full state, or --resume_from_checkpoint {LAST}",
        ),
        (
            differs["parallel"] and not are_whole,
            f"of {about['parallel']}, but parallel is {run.parallel}: pass --parallel {about['parallel']}",
        ),
        (
            differs["loop"],
            f"of another loop ({about['loop']}), which this workflow cannot read: pass another --run_name, or take the "
            "workflow that wrote it",
        ),
        (
            differs["technique"],
            f"of {about['technique']}, but technique is {run.technique}: pass --technique {about['technique']}",
        ),
        (
            differs["ranks"] and not run.parallelism.resumes_on_other_ranks,
            f"of {about['ranks']} ranks, but there are {own['ranks']}, and the parts of {run.parallel} fit no other "
            f"number: pass --devices {about['ranks']}",
        ),
        (
            differs["rows_per_step"],
            f"of steps of {about['rows_per_step']} rows, but this run's have {own['rows_per_step']} "
            f"(per_device_train_batch_size {run.per_device_train_batch_size} x gradient_accumulation_steps "
            f"{run.gradient_accumulation_steps} x {run.data_parallel_ranks} ranks): {changed}",
        ),
        (differs["rows"], f"with {about['rows']} training rows, but this run has {own['rows']}: {changed}"),
        (differs["seed"], f"with {about['seed']} as seed, but this run has {run.seed}: {changed}"),
        (
            differs["order"],
            f"whose rows came in the order {about['order']}, but this run's order is {own['order']}: pass "
            f"--train_sampling_strategy {about['order']}",
        ),
    ]
    yield from (problem for is_one, problem in problems if is_one)


def _of_another_form(folder: Path, by_trainer: bool) -> Iterator[str]:
    """Yield why a checkpoint of one device or of DDP cannot be read: the Trainer's and the loop's have other files."""
    files = read_manifest(folder)["files"]
    if by_trainer and any(name.startswith(LOOPS_FOLDER) for name in files):
        yield (
            "which the training loop of 2.6 wrote, and this workflow trains by Transformers' Trainer, which reads "
            "other files: resume it in its own run folder"
        )
    if not by_trainer and TRAINERS_FILE in files:
        yield (
            "which Transformers' Trainer wrote, and this workflow trains by a loop of its own, which reads other "
            "files: resume it in its own run folder"
        )


def _of_other_settings(own: Mapping[str, Any], about: Mapping[str, Any]) -> Iterator[str]:
    """Yield in what a checkpoint's run differs from this one, which goes on from it as the same run."""
    anew = "leave --resume_from_checkpoint out to begin anew"
    settings = own["settings"]
    for name, was in about.get("settings", {}).items():
        if name in settings and settings[name] != was:
            yield f"with {name} {was}, but this run's is {settings[name]}: pass --{name} {was}, or {anew}"
    if about.get("model", own["model"]) != own["model"]:
        yield (
            f"of another model or tokenizer ({about['model']}) than this run's ({own['model']}): pass the --model that "
            f"it was trained on, or {anew}"
        )
    for split, digest in about.get("data", {}).items():
        if own["data"].get(split, digest) != digest:
            yield (
                f"with other {split} rows ({digest}) than this run's ({own['data'][split]}): give it the same "
                f"rows in the same order, or {anew}"
            )
    rate, schedule = own["peak_learning_rate"], settings["lr_scheduler_type"]
    rate_was = about.get("peak_learning_rate", rate)
    if rate_was != rate and schedule in BY_MEASUREMENT:
        yield (
            f"with the learning rate {rate_was:g}, but this run's is {rate:g}, and the schedule {schedule} sets it "
            f"by what was measured: pass the rate as it was, or {anew}"
        )


def say_changes(run: RunConfig, rows: int, folder: Path, about: Mapping[str, Any]) -> list[str]:
    """Return lines of what a run that resumes does otherwise than before, or what could not be compared."""
    if "settings" not in about:
        return [f"note: {folder.name} is of an older version, and does not say its settings and rows: compare them"]
    step, rate, steps = steps_at(folder), run.peak_learning_rate, run.total_steps(rows)
    lines, rate_was, steps_were = [], about.get("peak_learning_rate", rate), about.get("steps", steps)
    if rate_was != rate:
        lines.append(f"note: the peak learning rate is {rate:g} from here, and was {rate_was:g}")
    if steps_were != steps and not run.lr_scheduler_type.startswith("constant"):
        lines.append(
            f"note: after step {step} the schedule {run.lr_scheduler_type} goes on as over {steps} steps; before, it "
            f"was over {steps_were}"
        )
    return lines
