"""A watch over a run's ranks: none outlives its launcher, and one that hangs is named and ended.

Each rank says in a file of the results folder where it is, once a second, from a thread of its own. A rank that was
stopped says nothing any more; one that sleeps has passed fewer points than those that wait for it.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.launch import Rank

HUNG_EXIT_CODE = 4
BEAT_S = 1.0
SILENT_S = 5.0
"""A rank whose thread has said nothing for so long was stopped, or its machine is gone."""
SLOW_FACTOR = 10
"""What is no training step (loading, saving, validation, evaluation) may take so many times as long."""
STEP_POINTS = ("batch", "update")
"""The points of a training step, where the time-out is that of a step."""
BEATS = "ranks"
"""Folder of a run's results with a file of each rank."""
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Found now: between a fork and what follows it nothing may be looked up."""


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent goes, however that is killed; Linux alone can."""
    if _libc:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    rank: int
    host: str
    pid: int
    passed: int = 0
    """Points that it has passed since its start; ranks that work together pass as many."""
    point: str = "start"
    step: int = 0
    moved_at: float = 0.0
    """When it came there, in seconds since the epoch; as the next one."""
    said_at: float = 0.0

    def allowed_s(self, step_timeout_s: float) -> float:
        """How long it may stay there."""
        return step_timeout_s * (1 if self.point in STEP_POINTS else SLOW_FACTOR)

    def __str__(self) -> str:
        """For a sentence."""
        return f"rank {self.rank} (process {self.pid} on {self.host}), in step {self.step} at '{self.point}'"


_here = Place(0, socket.gethostname(), os.getpid())


def reached(point: str, step: int) -> None:
    """This rank has come to a point of its work."""
    global _here
    _here = Place(_here.rank, _here.host, os.getpid(), _here.passed + 1, point, step, time.time())


def hung_ones(places: list[Place], now_s: float) -> list[Place]:
    """Of ranks that do not go on, those that keep the others waiting: silent ones, else those behind, else all."""
    silent = [place for place in places if now_s - place.said_at > SILENT_S]
    behind = [place for place in places if place.passed < max(place.passed for place in places)]
    return silent or behind or places


class Watch:
    """The thread of one rank that says where it is, and looks at the others."""

    def __init__(self, folder: Path, rank: "Rank", step_timeout_s: float, tell: Callable[[str], None]) -> None:
        """`folder`: of the results; `tell` keeps what is said of a hang before everything ends."""
        global _here
        _here = Place(rank.rank, socket.gethostname(), os.getpid(), moved_at=time.time())
        self.folder, self.rank, self.step_timeout_s, self.tell = folder / BEATS, rank, step_timeout_s, tell
        self.ended = threading.Event()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._say()
        threading.Thread(target=self._watch, daemon=True, name="watch").start()

    def end(self) -> None:
        """The work is done; idle time is nobody's hang."""
        self.ended.set()

    def _watch(self) -> None:
        while not self.ended.wait(BEAT_S):
            with contextlib.suppress(OSError):  # a full disk ends the run where it writes
                self._say()
            waited_s = time.time() - _here.moved_at
            if waited_s > _here.allowed_s(self.step_timeout_s):
                self._end_all(waited_s)

    def _say(self) -> None:
        path = self.folder / f"rank{self.rank.rank}.json"
        written = path.with_suffix(".new")
        written.write_text(json.dumps({**asdict(_here), "said_at": time.time()}))
        written.replace(path)

    def _others(self) -> list[Place]:
        found = []
        for number in range(self.rank.world_size):
            with contextlib.suppress(OSError, ValueError):
                found.append(Place(**json.loads((self.folder / f"rank{number}.json").read_text())))
        return found

    def _end_all(self, waited_s: float) -> None:
        """Name who hangs, kill it where it is on this machine, and leave: the launcher ends the rest."""
        hung = hung_ones(self._others(), time.time())
        named = "; ".join(map(str, hung))
        said = (
            f"Nothing moved for {waited_s:.0f} s (step_timeout_s is {self.step_timeout_s:g}): {named} "
            f"{'hangs' if len(hung) == 1 else 'hang'}. All ranks are ended. Look at that machine, or pass a longer "
            "--step_timeout_s; --resume_from last goes on from the newest checkpoint."
        )
        self.tell(said)
        print(f"error: {said}", file=sys.stderr, flush=True)
        for place in hung:
            if place.host == socket.gethostname() and place.pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(place.pid, signal.SIGKILL)
        os._exit(HUNG_EXIT_CODE)
