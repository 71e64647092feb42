"""Files of ranks that may run on machines with a disk each, or share one: who writes, and how all get the same."""

import os
import shutil
import socket
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from uuid import uuid4

import psutil
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, wait_for_everyone
from filelock import FileLock, Timeout

from common.base.errors import BadInputError
from common.base.run_config import LAST
from common.records.store import PREVIOUS, RECORD_NAME, UNFINISHED, load_record
from common.runtime.watch import BEATS
from common.runtime.world import RAY_RUN, Rank, may_start_again

LAUNCHERS = ".launchers"
"""Of a run's results: a file for each process that started ranks of it."""
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


def marks_of_launchers(folder: Path) -> set[str]:
    """Return the marks of launchers that have started ranks of this run before; call it on all ranks.

    A launcher is known by its process, so that one which starts the ranks through a new process each time, such as a
    shell script, leaves a new mark each time.
    """
    own = _own_mark(folder) if may_start_again() else None
    return set(gather_object([own.name] if own and own.exists() else []))


def has_mark(folder: Path, marks: Iterable[str]) -> bool:
    """Return whether a run's results, on this disk, have one of these marks."""
    return any((folder / LAUNCHERS / mark).exists() for mark in marks)


def may_be_restarted_in(folder: Path) -> bool:
    """Return whether a launcher that may start ranks again has written into a run's results on this disk."""
    return may_start_again() and (folder / LAUNCHERS).is_dir()


def leave_mark(folder: Path) -> None:
    """Leave a file in a run's results, for ranks that this rank's launcher may start again."""
    if may_start_again():
        _own_mark(folder).parent.mkdir(exist_ok=True)
        _own_mark(folder).touch()


def _own_mark(folder: Path) -> Path:
    name = os.environ.get(RAY_RUN) or f"{socket.gethostname()}-{os.getppid()}-{_start_of(os.getppid())}"
    return folder / LAUNCHERS / name


def _start_of(pid: int) -> str:
    """Return when a process started: on Linux in ticks since the machine's start, which no set clock changes."""
    stat = Path(f"/proc/{pid}/stat")
    # field 22 of proc_pid_stat(5); the name, field 2, may have spaces and ends with the last parenthesis
    return stat.read_text().rpartition(")")[2].split()[19] if stat.is_file() else f"{psutil.Process(pid).create_time()}"


def broadcast_folder(folder: Path, source: int, lacks: bool) -> None:
    """Send the files of rank `source`'s folder to each rank that `lacks` them; call it on all ranks."""
    if not any(gather_object([lacks])):
        return
    is_source = PartialState().process_index == source
    found = [(path.name, path.stat().st_size) for path in sorted(folder.iterdir())] if is_source else None
    if lacks:
        folder.mkdir(parents=True, exist_ok=True)
    for name, size in broadcast_object_list([found], source)[0]:
        mode = "wb" if lacks else "rb"
        with (folder / name).open(mode) if lacks or is_source else nullcontext() as file:
            for _ in range(0, size, SENT_BYTES):
                (part,) = broadcast_object_list([file.read(SENT_BYTES) if is_source else None], source)
                if lacks:
                    file.write(part)
    wait_for_everyone()


class ResultsFolder:
    """A run's results folder, which one run owns at a time; every rank of the run makes one.

    An earlier run of the same name moves to `<run name>.previous`, replacing what was there, unless it did not
    complete: then what was there stays, and the unfinished run moves to `<run name>.unfinished` if it has checkpoints,
    and is removed if it has none.

    Attributes:
        path: The folder.
        writes: Whether this rank writes what all ranks have: one does on each disk.
        hosts: The machines of the ranks that write: several, where each has a disk of its own.
    """

    def __init__(
        self,
        path: Path,
        rank: Rank,
        is_resumed: bool,
        nodes: int = 1,
        why_one_disk: str = "",
        lock_timeout_s: float = 0.0,
    ) -> None:
        """Take and make the folder; a resumed run keeps what its last start left there, on this disk.

        `nodes`: the run's machines. `why_one_disk`: why they must share a disk; empty where each may have its own.
        `lock_timeout_s`: how long another run may still own the folder.

        Raises:
            BadInputError: If another run owns it, or machines do not share a disk that they need; on every rank.
        """
        self.path, self.writes = path, first_on_disk(path.parent, rank)
        self.hosts = [host for host, writes in gather_object([(socket.gethostname(), self.writes)]) if writes]
        if len(self.hosts) < nodes:
            why_one_disk = why_one_disk or f"Of {nodes} machines some share a disk"
        if why_one_disk:
            self.check_shared(why_one_disk)
        self._aside: Path | None = None  # where the run before went
        # a lock of the system's, which goes with its process
        self.lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=lock_timeout_s, is_singleton=True)
        self._own()
        if self.writes:
            if path.exists() and not is_resumed:
                self._aside = _make_way(path)
            path.mkdir(exist_ok=is_resumed)
            (path / RECORD_NAME).unlink(missing_ok=True)
            shutil.rmtree(path / BEATS, ignore_errors=True)  # of ranks that are gone
        wait_for_everyone()
        leave_mark(path)

    def check_shared(self, why: str) -> None:
        """Refuse machines that each have a disk of their own.

        Raises:
            BadInputError: With `why`, and the machines.
        """
        if len(self.hosts) > 1:
            raise BadInputError(
                f"{why}, but {' and '.join(self.hosts)} each see another disk at {self.path.parent}: pass "
                "--results_root with a folder that all machines share."
            )

    def _own(self) -> None:
        taken = False
        if self.writes:
            try:
                self.lock.acquire()
            except Timeout:
                taken = True
        if any(gather_object([taken])):
            raise BadInputError(
                f"Another run is writing to the results folder {self.path.name}: wait for it, end it, or pass "
                "another --run_name."
            )

    def release(self) -> None:
        """Let another run own the folder."""
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
    aside = folder.with_name(folder.name + PREVIOUS)
    if aside.exists() and not _completed(folder):
        checkpoints = sorted(path.name for path in folder.glob("checkpoints/checkpoint-*"))
        if not checkpoints:
            shutil.rmtree(folder)
            return None
        aside = folder.with_name(folder.name + UNFINISHED)
        print(
            f"an unfinished run of this name ({', '.join(checkpoints)}) is kept as {aside.name}; with "
            f"--resume_from_checkpoint {LAST} this run would have resumed it"
        )
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def _completed(folder: Path) -> bool:
    try:
        return load_record(folder / RECORD_NAME)["status"] == "completed"
    except BadInputError:
        return False
