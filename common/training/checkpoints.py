"""Checkpoints that are there whole or not at all: written aside, flushed, listed with their digests, then renamed.

A checkpoint is a full state, which a training resumes from, or the best weights alone. What is read again is first
compared with its list: PyTorch, safetensors and DCP all load a file with a wrong byte without an error.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object, wait_for_everyone

from common.base.errors import BadInputError, RunStoppedError, first_sentence, is_lost_peer
from common.base.run_config import BAD, LAST
from common.hardware.devices import GIB
from common.runtime.disks import set_aside
from common.runtime.faults import fault_at
from common.runtime.watch import reached

CHECKPOINT = re.compile(r"checkpoint-(\d+)")  # the folder's name, as Transformers gives it: with the steps taken
# what a checkpoint is of (`about`), its files with bytes and SHA-256, and a digest of the list itself
MANIFEST_FILE = "manifest.json"
STATE_FILE = "trainer_state.json"
PARTIAL = ".partial"  # beside the checkpoints: the one that is being written, and those that are being removed
# of what a checkpoint says: `FULL_STATE` or `WEIGHTS`; and the best step so far, 0 where there is none
HOLDS, BEST = "holds", "best"
FULL_STATE, WEIGHTS = "full state", "weights"


class DamagedCheckpointError(BadInputError):
    """A checkpoint is not as it was written."""


class UnfinishedCheckpoint:
    """A checkpoint that is being written, aside, until it is committed; a process has one at a time.

    Attributes:
        written: Where it is written while training goes on: what returns `digests` when that is done.
        digests: Of the files that this rank has written, by their names in the folder; others are read for theirs.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], commits: bool) -> None:
        """Make a fresh folder to write into; on every rank. `commits`: this rank lists and renames on its disk."""
        self.folder, self.about, self.commits = folder, about, commits
        self.step, self.partial = steps_at(folder), folder.parent / PARTIAL / folder.name
        self.digests: dict[str, str] = {}
        self.written: Future[dict[str, str]] | None = None
        reached("saving", self.step)
        if commits:
            shutil.rmtree(self.partial.parent, ignore_errors=True)
            self.partial.mkdir(parents=True)
        wait_for_everyone()

    @contextmanager
    def being_written(self) -> Iterator[Path]:
        """Yield the folder to write into; a RunStoppedError says why it cannot be written."""
        try:
            yield self.partial
        except BaseException as error:  # DCP's own derives from it, and has what each rank met
            if isinstance(error, KeyboardInterrupt | SystemExit | RunStoppedError) or is_lost_peer(error):
                raise
            causes = [cause for cause, _ in getattr(error, "failures", {}).values()] or [error]
            if lost := next(filter(is_lost_peer, causes), None):
                raise lost from error
            root = self.folder.parent
            raise RunStoppedError(
                f"The checkpoint after step {self.step} could not be written ({first_sentence(causes[0])}; "
                f"{shutil.disk_usage(root).free / GIB:.2f} GiB are free in {root}): make room there, or pass another "
                f"--results_root; the checkpoint before is whole, and --resume_from_checkpoint {LAST} resumes from it."
            ) from error

    def write_and_hash(self, write: Callable[[], list[Path]]) -> dict[str, str]:
        """Call `write`, and return the digests of the files that it has written, which are then on the disk."""
        digests = {}
        for path in write():
            digests[path.relative_to(self.partial).as_posix()] = digest_of(path)
            flush_file(path)
        return digests

    def is_written(self) -> bool:
        """Return whether nothing is being written any more on any rank; called on every rank."""
        return all(gather_object([self.written is None or self.written.done()]))

    def commit(self) -> None:
        """Wait until all is written, list it, and give it its name; called on every rank."""
        reached("saving", self.step)
        with self.being_written():
            if self.written:
                self.digests = self.written.result()
            fault_at("written", self.step)
            of_ranks = gather_object([self.digests])  # every rank has written its part
            if self.commits:
                # where disks are apart each has a file of the same name, whose bytes may differ
                self._rename({name: digest for each in (*of_ranks, self.digests) for name, digest in each.items()})
        wait_for_everyone()

    def _rename(self, known: Mapping[str, str]) -> None:
        for path in [*self.partial.rglob("*"), self.partial]:
            flush_file(path)
        fault_at("flushed", self.step)
        write_manifest(self.partial, self.about, known)
        fault_at("listed", self.step)
        if _is_listed(self.folder):  # of the same step, from an earlier start
            remove(self.folder)
        elif self.folder.exists():
            set_aside(self.folder, BAD, _is_listed)
        self.partial.rename(self.folder)
        flush_file(self.folder.parent)
        fault_at("renamed", self.step)


def write_manifest(folder: Path, about: Mapping[str, Any], known: Mapping[str, str] | None = None) -> None:
    """List the files of a folder, with what they are of; `known`: digests by name, of files that were hashed before."""
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


def to_keep(checkpoints: Path, best: int | None) -> set[str]:
    """Return the names of the checkpoints that are still needed: best weights, and up to two full states.

    The weights that were the best when the newest full state was written are those that a resumed run begins with. The
    second full state is there in case the newest is damaged.
    """
    states = [folder for folder in found_in(checkpoints) if has_full_state(folder)]
    best_ones = {best, *(read_manifest(newest)["about"].get(BEST) for newest in states[:1])}
    kept = {f"checkpoint-{step}" for step in best_ones if step} | {newest.name for newest in states[:1]}
    spare = [state.name for state in states if state.name not in kept]
    return kept | set(spare[: max(0, 2 - (len(states) - len(spare)))])


def has_full_state(folder: Path) -> bool:
    """Return whether a training can resume from a checkpoint, by its list; from a damaged one none can."""
    with suppress(DamagedCheckpointError):
        return holds(folder) == FULL_STATE
    return False


def rotate(checkpoints: Path, keep: set[str]) -> None:
    """Remove every checkpoint but those named `keep`."""
    for folder in found_in(checkpoints):
        if folder.name not in keep and _is_listed(folder):
            remove(folder)
    fault_at("rotated", max((steps_at(checkpoints / name) for name in keep), default=0))


def remove(folder: Path) -> None:
    """Remove a checkpoint: first its name, at once, so that no half of it is left under that."""
    going = folder.parent / PARTIAL / f"removed {folder.name}"
    going.parent.mkdir(exist_ok=True)
    shutil.rmtree(going, ignore_errors=True)  # some network file systems keep files that are open
    folder.rename(going)
    shutil.rmtree(going, ignore_errors=True)


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
    """Return the manifest of a checkpoint; a DamagedCheckpointError says that it is missing, or was changed."""
    try:
        content = (folder / MANIFEST_FILE).read_bytes()
    except OSError as error:
        raise DamagedCheckpointError(
            f"{folder} has no {MANIFEST_FILE} that can be read ({first_sentence(error)}): pass a folder "
            "checkpoint-<step> that a run of this folder wrote."
        ) from None
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        listed = json.loads(content)
        del listed["sha256"]
        if _as_bytes(listed) == content:
            return listed
    raise _damaged(folder, f"{MANIFEST_FILE} was changed")


def holds(folder: Path) -> str:
    """Return what a checkpoint is, by its list (`read_manifest`): a `FULL_STATE`, as all were once, or `WEIGHTS`."""
    return read_manifest(folder)["about"].get(HOLDS, FULL_STATE)


def verify(folder: Path) -> dict[str, Any]:
    """Read every byte of a checkpoint, and return what it is of (`about`), or raise a DamagedCheckpointError."""
    listed = read_manifest(folder)
    files = listed["files"]
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    for name in sorted(there - {MANIFEST_FILE, *files}):
        raise _damaged(folder, f"{name} was put beside its files")
    for name, file in files.items():
        if name not in there:
            raise _damaged(folder, f"{name} is missing")
        size = (folder / name).stat().st_size
        if size != file["bytes"]:
            raise _damaged(folder, f"{name} has {size:,} of {file['bytes']:,} bytes")
        if digest_of(folder / name) != file["sha256"]:
            raise _damaged(folder, f"{name} has other bytes than were written")
    return listed["about"]


def _damaged(folder: Path, reason: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"The checkpoint {folder} is damaged: {reason}. Resume from another one: --resume_from_checkpoint {LAST} takes "
        "the newest whole one of a run."
    )


def verify_once(folder: Path, is_main: bool) -> dict[str, Any]:
    """Verify a checkpoint on one rank for all; every rank returns or raises the same as `verify`."""
    reached("verifying", steps_at(folder))
    try:
        found = [verify(folder)] if is_main else []
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
            print(f"It is kept as {set_aside(folder, BAD, _is_listed).name}; the one before is tried.")
        else:
            return folder
    return None


def _is_listed(folder: Path) -> bool:
    """Return whether a checkpoint was written by a run: others of such a name are the user's."""
    return (folder / MANIFEST_FILE).is_file()


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def flush_file(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the disk now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
