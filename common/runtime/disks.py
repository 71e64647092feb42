"""Files of ranks that may run on machines with a disk each, or share one: who writes, and how all get the same."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import nullcontext, suppress
from fnmatch import fnmatch
from itertools import chain, count
from pathlib import Path
from uuid import uuid4

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, wait_for_everyone
from filelock import FileLock, Timeout

from common.base.errors import BadInputError
from common.base.run_config import LAST, PREVIOUS, UNFINISHED
from common.records.store import RECORD_NAME, load_record
from common.runtime.watch import BEATS, start_of
from common.runtime.world import Rank, may_start_again

LAUNCHERS = ".launchers"  # of a run's results: a file for each process that started ranks of it
MARK = ".run.json"  # of a run's results: says that a run made the folder, and at its end what it wrote there, by name
OF_RUNS = (
    *(RECORD_NAME, MARK, LAUNCHERS, BEATS, "checkpoints", "tensorboard", "adapter", "model", "merged*"),
    *("predictions_*.csv", "gallery.png", "log_probs.png", "compare.png", "levels.png", "losses.png", "scores.png"),
    *("memory.png", "accuracy.png", "confusion.png", "held.png", "timeline.png"),
)
"""Patterns of names: what runs wrote before they had a mark, and what notebooks draw afterwards."""
SENT_BYTES = 64 * 2**20  # of a file, at once


def first_on_disk(folder: Path, rank: Rank) -> bool:
    """Make `folder`, and return whether this rank is the first of those that see the same one; call it on all ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f".rank-{rank.rank}-{uuid4().hex}"
    mark.touch()
    before = gather_object([mark.name])[: rank.rank]
    is_first = not any((folder / name).exists() for name in before)
    wait_for_everyone()
    mark.unlink()
    return is_first


def started_before(folder: Path) -> tuple[bool, bool]:
    """Return whether this launcher (a process) has started ranks of the run before, and some of them on this disk."""
    own = _own_mark(folder) if may_start_again() else None
    marks = gather_object([own.name] if own and own.exists() else [])
    return bool(marks), any((folder / LAUNCHERS / mark).exists() for mark in marks)


def may_be_restarted_in(folder: Path) -> bool:
    """Return whether a launcher that may start ranks again has written into a run's results on this disk."""
    return may_start_again() and (folder / LAUNCHERS).is_dir()


def leave_mark(folder: Path) -> None:
    """Mark a run's results, for ranks that this rank's launcher may start again."""
    if may_start_again():
        _own_mark(folder).parent.mkdir(exist_ok=True)
        _own_mark(folder).touch()


def _own_mark(folder: Path) -> Path:
    return folder / LAUNCHERS / f"{socket.gethostname()}-{os.getppid()}-{start_of(os.getppid())}"


def broadcast_folder(folder: Path, source: int, lacks: bool) -> None:
    """Send the files of rank `source`'s folder to each rank that `lacks` them; call it on all ranks."""
    if not any(gather_object([lacks])):
        return
    is_source = PartialState().process_index == source
    paths = sorted(path for path in folder.rglob("*") if path.is_file()) if is_source else []
    found = [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths]
    for name, size in broadcast_object_list([found], source)[0]:
        if lacks:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb" if lacks else "rb") if lacks or is_source else nullcontext() as file:
            for _ in range(0, size, SENT_BYTES):
                (part,) = broadcast_object_list([file.read(SENT_BYTES) if is_source else None], source)
                if lacks:
                    file.write(part)
    wait_for_everyone()


def is_of_a_run(folder: Path) -> bool:
    """Return whether a run has made a folder: by its mark, a rank's file, or a record."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    if (folder / MARK).is_file() or (folder / BEATS / "rank0.json").is_file():
        return True
    with suppress(OSError, ValueError, RecursionError):
        record = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
        return isinstance(record, dict) and "schema_version" in record
    return False


def others_in(folder: Path) -> list[str]:
    """Return the names of what is in a run's results and was written by no run, such as exports and notes."""
    written: list[str] = []
    with suppress(OSError, ValueError, TypeError):  # from before runs had a mark, or cut short by a full disk
        content = (folder / MARK).read_text(encoding="utf-8")
        if not content:  # a run that was killed could not say what it had written: all is taken for its own
            return []
        written = list(json.loads(content))
    names = sorted(path.name for path in folder.iterdir())
    return [name for name in names if name not in written and not any(fnmatch(name, known) for known in OF_RUNS)]


def check_free_for_run(results: Path) -> None:
    """Refuse to write a run's results into what no run has made; an empty folder may be taken."""
    if results.is_symlink():
        found = "is a link to elsewhere"
    elif results.exists() and not results.is_dir():
        found = "is a file"
    elif results.is_dir() and any(results.iterdir()) and not is_of_a_run(results):
        found = f"has {min(path.name for path in results.iterdir())}, and no mark of a run"
    else:
        return
    raise BadInputError(
        f"The results folder {results} {found}, and what no run has made is neither moved nor removed: pass another "
        "--run_name, or move it away."
    )


def set_aside(folder: Path, suffix: str, may_go: Callable[[Path], bool]) -> Path:
    """Rename a folder to `NAME<suffix>`, or `-2`, `-3` and so on, where nothing is but what `may_go`; return it."""
    names = chain([folder.name + suffix], (f"{folder.name}{suffix}-{number}" for number in count(2)))
    aside = next(place for place in map(folder.with_name, names) if not os.path.lexists(place) or may_go(place))
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


class ResultsFolder:
    """A run's results folder, which one run owns at a time; every rank of the run makes one.

    An earlier run of the same name moves to `<run name>.previous`, replacing what was there; one that did not complete
    replaces nothing: it moves to `<run name>.unfinished`, or is removed if it has no checkpoints. What no run has made
    or written is neither moved nor removed: a run does not begin in such a folder, and an earlier run with files of
    others stays where it was set aside.

    Attributes:
        writes: Whether this rank writes what all ranks have: one does on each disk.
        hosts: The machines of the ranks that write: several, where each has a disk of its own.
    """

    def __init__(
        self, path: Path, rank: Rank, is_resumed: bool, nodes: int, why_one_disk: str, lock_timeout_s: float
    ) -> None:
        """Take and make the folder, or raise a BadInputError; a resumed run keeps what its last start left there.

        `why_one_disk`: why the run's machines (`nodes`) must share a disk; empty where each may have its own.
        `lock_timeout_s`: how long another run may still own the folder.
        """
        self.path, self.writes = path, first_on_disk(path.parent, rank)
        self.hosts = [host for host, writes in gather_object([(socket.gethostname(), self.writes)]) if writes]
        if len(self.hosts) < nodes:
            why_one_disk = why_one_disk or f"Of {nodes} machines some share a disk"
        if why_one_disk and len(self.hosts) > 1:
            raise BadInputError(
                f"{why_one_disk}, but {' and '.join(self.hosts)} each see another disk at {path.parent}: pass "
                "--results_root with a folder that all machines share."
            )
        self._aside: Path | None = None  # where the run before went
        # a lock of the system's, which goes with its process
        self.lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=lock_timeout_s, is_singleton=True)
        self._others: list[str] = []
        refusals = []
        try:
            if self.writes:
                self.lock.acquire()
                check_free_for_run(path)
        except Timeout:
            said = f"Another run is writing to the results folder {path.name}: "
            refusals = [said + "wait for it, end it, or pass another --run_name."]
        except BadInputError as refused:
            refusals = [str(refused)]
        if refusals := gather_object(refusals):
            self.lock.release(force=True)
            raise BadInputError(refusals[0])
        if self.writes:
            if is_of_a_run(path) and is_resumed:
                self._others = others_in(path)
            elif is_of_a_run(path):
                self._aside = _make_way(path)
            path.mkdir(exist_ok=True)
            (path / MARK).write_text("", encoding="utf-8")
            (path / RECORD_NAME).unlink(missing_ok=True)
            shutil.rmtree(path / BEATS, ignore_errors=True)  # of ranks that are gone
        wait_for_everyone()
        leave_mark(path)

    def release(self) -> None:
        """Say what the run has written, and let another one own the folder."""
        if self.writes:
            with suppress(OSError):  # the disk is full, or the folder is gone
                written = {path.name for path in self.path.iterdir()}.difference(self._others)
                (self.path / MARK).write_text(json.dumps(sorted(written)), encoding="utf-8")
        self.lock.release(force=True)

    def discard(self) -> None:
        """Leave nothing of a run that was refused: the folder goes, and the run before comes back."""
        if not self.writes:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        if self._aside:
            self._aside.rename(self.path)


def _make_way(folder: Path) -> Path | None:
    """Move an earlier run aside, and return where it is; a failed one does not push out a completed one."""
    suffix, others = PREVIOUS, others_in(folder)
    if folder.with_name(folder.name + PREVIOUS).exists() and not _completed(folder):
        checkpoints = sorted(path.name for path in folder.glob("checkpoints/checkpoint-*"))
        if not checkpoints and not others:
            shutil.rmtree(folder)
            return None
        suffix = UNFINISHED
        resumes = f"; with --resume_from_checkpoint {LAST} this run would have resumed it" if checkpoints else ""
        held = ", ".join([*checkpoints, *others])
        print(f"an unfinished run of this name ({held}) is kept as {folder.name}{suffix}{resumes}")
    aside = set_aside(folder, suffix, lambda place: is_of_a_run(place) and not others_in(place))
    if aside.name != folder.name + suffix:
        print(f"{folder.name}{suffix} has files that no run wrote, and stays: the run before is kept as {aside.name}")
    elif others:
        print(f"the run before is kept as {aside.name}, with what no run wrote ({', '.join(others)})")
    return aside


def _completed(folder: Path) -> bool:
    try:
        return load_record(folder / RECORD_NAME)["status"] == "completed"
    except BadInputError:
        return False
