"""A watch over a run's ranks: none outlives its launcher, and one that hangs is named and ended.

Each rank writes where it is into a file of the results folder, once a second, from a thread of its own. A rank that was
stopped writes nothing; one that sleeps has passed fewer points than those that wait for it.
"""

import contextlib
import ctypes
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import psutil

from common.base.signals import END_SIGNALS
from common.runtime.world import Rank

HUNG_EXIT_CODE = 4
ANSWER_S = 2.0  # how long a rank that is told to end may take to stop its work, before its thread ends it
BEAT_S = 1.0
SILENT_S = 5.0  # a rank whose thread has said nothing for so long was stopped, or its machine is gone
SLOW_FACTOR = 10  # what stands between steps, and an exchange between ranks, may take so many times as long as a step
# between steps: a batch of validation, or a checkpoint; what comes before and after training may take any time
SLOW_POINTS = ("validation", "saving", "verifying")
# of a step: rows are asked for, and there; gradients are there; a rank that hangs in a pass keeps others waiting in it
STEP_POINTS = ("load", "batch", "update")
LINE_BYTES = 1024
BEATS = "ranks"  # folder of a run's results with a file of each rank
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # found now: after a fork nothing may be looked up
_imported_by, _imported_under = os.getpid(), os.getppid()


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, however that is killed; only Linux can."""
    if _libc:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def parent_is_gone() -> bool:
    """Return whether the process that started this one, or forked it, has ended already."""
    expected = _imported_under if os.getpid() == _imported_by else _imported_by
    return os.getppid() != expected


def start_of(pid: int) -> str:
    """Return when a process started: on Linux in ticks since the machine's start, which no set clock changes."""
    if sys.platform != "linux":
        return f"{psutil.Process(pid).create_time()}"
    # field 22 of proc_pid_stat(5); the name, field 2, may have spaces and ends with the last parenthesis
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def identity_of(pid: int) -> str:
    """Return what tells a process from all others that ever have its number, anywhere; empty where there is none."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        if sys.platform != "linux":
            return start_of(pid)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {start_of(pid)}"
    return ""


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        identity: Which process it is, see `identity_of`; only that one may be killed.
        passed: Points that it has passed since its start; ranks that work together pass as many.
        point, step: The last of these points, and the step that it belongs to.
        said_at: When it last said so: in its file in seconds since the epoch by its own clock; once another rank has
            read it, by that one's monotonic clock, as the clocks of two machines may differ.
    """

    rank: int
    host: str
    pid: int
    identity: str = ""
    passed: int = 0
    point: str = "start"
    step: int = 0
    said_at: float = 0.0

    def allowed_s(self, step_timeout_s: float) -> float:
        """Return how many seconds it may stay there."""
        if self.point in STEP_POINTS:
            return step_timeout_s
        return SLOW_FACTOR * step_timeout_s if self.point in SLOW_POINTS else math.inf

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host}), in step {self.step} at '{self.point}'"

    def is_process_here(self) -> bool:
        """Return whether its process still runs on this machine."""
        is_known = self.identity != "" and self.host == socket.gethostname()
        return is_known and self.identity == identity_of(self.pid)


def place_in(path: Path, rank: int) -> Place | None:
    """Return where a rank is by its file; None where that is not there yet, or not whole."""
    with contextlib.suppress(OSError, ValueError, TypeError), path.open("rb") as file:
        place = Place(**json.loads(file.read(LINE_BYTES)))
        if place.rank == rank and all(type(getattr(place, each.name)) is each.type for each in fields(place)):
            return place
    return None


class _Beat:
    """What this process says of itself, in a file that is written over in place: a step creates no file."""

    def __init__(self, rank: int = 0, path: Path | None = None) -> None:
        self.place = Place(rank, socket.gethostname(), os.getpid(), identity_of(os.getpid()))
        self.moved_s = time.monotonic()  # when it came there, by a clock that nobody sets
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC) if path else None
        self.lock = threading.Lock()
        self.say()

    def say(self, **changes: object) -> None:
        with self.lock:
            self.place = replace(self.place, said_at=time.time(), **changes)
            if self.file is not None:
                os.pwrite(self.file, json.dumps(asdict(self.place)).ljust(LINE_BYTES).encode(), 0)


_beat = _Beat()


def reached(point: str, step: int) -> None:
    """Say that this rank has come to a point of its work."""
    _beat.moved_s = time.monotonic()
    _beat.say(point=point, step=step, passed=_beat.place.passed + 1)


def hung_ones(places: list[Place], now_s: float) -> list[Place]:
    """Return the ranks that keep the others waiting: silent ones, else those behind, else all."""
    silent = [place for place in places if now_s - place.said_at > SILENT_S]
    behind = [place for place in places if place.passed < max(place.passed for place in places)]
    return silent or behind or places


class Watch:
    """The thread of one rank that says where it is, and looks at the others."""

    def __init__(self, folder: Path, rank: Rank, step_timeout_s: float, tell: Callable[[str], None]) -> None:
        """Watch the ranks of the results in `folder`; `tell` records a hang before everything ends."""
        global _beat
        self.folder, self.rank, self.step_timeout_s, self.tell = folder / BEATS, rank, step_timeout_s, tell
        self.ended = threading.Event()
        self.heard: dict[int, tuple[float, float]] = {}  # of each rank what it said last, and when that was new here
        self.folder.mkdir(parents=True, exist_ok=True)
        _beat = _Beat(rank.rank, self.folder / f"rank{rank.rank}.json")
        threading.Thread(target=self._watch, daemon=True, name="watch").start()
        self.signals: socket.socket | None = None
        if rank.world_size > 1 and threading.current_thread() is threading.main_thread():
            heard, self.signals = socket.socketpair()
            self.signals.setblocking(False)
            signal.set_wakeup_fd(self.signals.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._listen, args=(heard,), daemon=True, name="told to end").start()

    def end(self) -> None:
        """Stop watching, as the work is done."""
        self.ended.set()
        if self.signals and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            self.signals.close()  # the listening thread ends
            self.signals = None

    def _listen(self, heard: socket.socket) -> None:
        """End this rank when it is told to and does not answer.

        Python's handlers run between two of Python's instructions: a rank that waits in NCCL for one that is gone comes
        to none. The number of a signal is written into a socket at once.
        """
        with heard:
            while received := heard.recv(1):
                if received[0] in END_SIGNALS and not self.ended.wait(ANSWER_S):
                    said = (
                        f"Rank {self.rank.rank} was told to end, and did not answer within {ANSWER_S:g} s: it waits "
                        "for another rank, whose output says why, or is in a long operation."
                    )
                    self.tell(said)
                    print(f"error: {said}", file=sys.stderr, flush=True)
                    os._exit(1)

    def _watch(self) -> None:
        while not self.ended.wait(BEAT_S):
            with contextlib.suppress(OSError):  # a full disk ends the run where it writes
                _beat.say()
            here, places = _beat.place, self._places()
            waited_s = time.monotonic() - _beat.moved_s
            # who does not see all of them, on disks apart, lets their exchange run into its own time-out first
            patience_s = 0 if len(places) == self.rank.world_size else 2 * SILENT_S
            if waited_s > here.allowed_s(self.step_timeout_s) + patience_s:
                self._end_all(waited_s, places)

    def _places(self) -> list[Place]:
        """Return where the ranks are that speak, each `said_at` by this rank's clock: what is new, a beat ago."""
        found = []
        for number in range(self.rank.world_size):
            if place := place_in(self.folder / f"rank{number}.json", number):
                if self.heard.get(number, (None, 0.0))[0] != place.said_at:
                    self.heard[number] = (place.said_at, time.monotonic() - BEAT_S)
                found.append(replace(place, said_at=self.heard[number][1]))
        return found

    def _end_all(self, waited_s: float, places: list[Place]) -> None:
        """Name who hangs, kill it where it is on this machine, and leave: the launcher ends the rest."""
        hung = hung_ones(places, time.monotonic())
        named = "; ".join(map(str, hung))
        said = (
            f"Nothing moved for {waited_s:.0f} s (step_timeout_s is {self.step_timeout_s:g}): {named} "
            f"{'hangs' if len(hung) == 1 else 'hang'}. All ranks are ended. Look at that machine, or pass a longer "
            "--step_timeout_s; --resume_from_checkpoint last resumes from the newest checkpoint."
        )
        self.tell(said)
        print(f"error: {said}", file=sys.stderr, flush=True)
        for place in hung:
            if place.pid != os.getpid() and place.is_process_here():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(place.pid, signal.SIGKILL)
        os._exit(HUNG_EXIT_CODE)
