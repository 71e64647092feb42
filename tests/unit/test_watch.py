"""Who keeps the others waiting, and for how long a rank may stay where it is."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from unittest.mock import Mock

import pytest

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.runtime import watch
from common.runtime.faults import VARIABLE, asked_fault, fault_at
from common.runtime.watch import (
    SLOW_FACTOR,
    SLOW_POINTS,
    STEP_POINTS,
    Place,
    Watch,
    hung_ones,
    identity_of,
    parent_is_gone,
    reached,
)
from common.runtime.world import Rank
from tests.pace import patient

HERE = Place(0, "a", 1, passed=7, point="batch", step=3, said_at=104.0)
OTHER = replace(HERE, rank=1, pid=2)


def test_a_silent_rank_hangs_and_where_all_are_as_far_all_are_named() -> None:
    stopped = replace(OTHER, said_at=90.0, passed=9)
    assert hung_ones([HERE, stopped], now_s=104.5) == [stopped]
    assert hung_ones([HERE, OTHER], now_s=104.5) == [HERE, OTHER]


def test_of_ranks_that_speak_those_behind_keep_the_others_waiting() -> None:
    behind = replace(OTHER, passed=6, point="load")
    assert hung_ones([HERE, behind], now_s=104.5) == [behind]


@pytest.mark.parametrize(
    ("point", "factor"),
    [*((point, 1) for point in STEP_POINTS), *((point, SLOW_FACTOR) for point in SLOW_POINTS), ("load model", inf)],
)
def test_what_is_no_step_may_take_longer(point: str, factor: float) -> None:
    assert replace(HERE, point=point).allowed_s(60.0) == 60.0 * factor


def test_a_rank_says_where_it_is_at_once_and_ends_when_nothing_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, said = Mock(), Mock()
    monkeypatch.setattr(watch.os, "_exit", ended)
    monkeypatch.setattr(watch, "BEAT_S", 0.05)
    looks = Watch(tmp_path, Rank(0, 1, "cpu", "python"), 0.3, said)
    reached("batch", 5)
    place = json.loads((tmp_path / "ranks" / "rank0.json").read_text())
    assert (place["step"], place["point"]) == (5, "batch")
    time.sleep(0.1)
    assert not ended.called
    time.sleep(0.5)
    looks.end()
    ended.assert_called_with(watch.HUNG_EXIT_CODE)
    assert "rank 0 (process" in said.call_args.args[0]
    assert "in step 5 at 'batch' hangs" in capsys.readouterr().err
    reached("done", 5)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Ranks speak, and are silent, within a moment; what ends this process, if it were not kept."""
    ended = Mock()
    monkeypatch.setattr(watch.os, "_exit", ended)
    monkeypatch.setattr(watch, "BEAT_S", 0.02)
    monkeypatch.setattr(watch, "SILENT_S", 0.15)
    return ended


def watched(folder: Path, other: Callable[[float], dict[str, object]], for_s: float = 0.4) -> str:
    """What rank 0 of two says, in whose results `other` writes as rank 1, by the seconds so far."""
    (folder / "ranks").mkdir(exist_ok=True)
    path, said, start_s = folder / "ranks" / "rank1.json", Mock(), time.monotonic()
    path.write_text(json.dumps(other(0.0)))
    looks = Watch(folder, Rank(0, 2, "cpu", "torchrun"), 0.25, said)
    reached("batch", 5)
    while (so_far_s := time.monotonic() - start_s) < for_s:
        path.write_text(json.dumps(other(so_far_s)).ljust(watch.LINE_BYTES))
        time.sleep(0.01)
    looks.end()
    reached("done", 5)
    return said.call_args.args[0]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("clock_s", "is_stopped", "named"), [(-60, False, 0), (60, True, 1)])
def test_a_clock_that_is_wrong_makes_no_rank_silent_and_none_speak(
    tmp_path: Path, clock_s: float, is_stopped: bool, named: int
) -> None:
    now = time.time()
    place = {"rank": 1, "host": "elsewhere", "pid": 7, "passed": 10**6, "point": "batch", "step": 5}
    said = watched(tmp_path, lambda so_far_s: place | {"said_at": now + clock_s + (not is_stopped) * so_far_s})
    assert f"rank {named} (process" in said
    assert f"rank {1 - named} (process" not in said


OWN = identity_of(os.getpid())
STRANGERS = {
    "as before there was an identity": {"identity": None},
    "of no identity": {"identity": ""},
    "of another start": {"identity": OWN + "0"},
    "of another machine's start": {"identity": "another-boot" + OWN},
    "not as a rank writes it": {"passed": "many"},
}


@pytest.mark.parametrize("which", ["a rank", *STRANGERS])
def test_only_the_process_that_was_the_rank_is_killed(tmp_path: Path, quick: Mock, which: str) -> None:
    """Its number may be another process's by now, or be written into the results by somebody else."""
    with subprocess.Popen(["sleep", "9"]) as process:
        place = {"rank": 1, "host": socket.gethostname(), "pid": process.pid, "identity": identity_of(process.pid)}
        place |= {"passed": 0, "point": "batch", "step": 5, "said_at": 1.0, **STRANGERS.get(which, {})}
        kept = {name: value for name, value in place.items() if value is not None}
        (tmp_path / "ranks").mkdir()
        (tmp_path / "ranks" / "rank1.json").write_text(json.dumps(kept))
        looks = Watch(tmp_path, Rank(0, 2, "cpu", "torchrun"), 600, Mock())
        looks._end_all(1.0, looks._places())
        looks.end()
        time.sleep(0.02)
        is_killed = process.poll() == -signal.SIGKILL
        process.kill()
    assert quick.called
    assert is_killed == (which == "a rank")


@pytest.mark.parametrize("pid", [-1, 0, 2**22 + 1])
def test_numbers_that_stand_for_no_process_are_no_rank(pid: int) -> None:
    """By -1 a signal goes to every process, by 0 to a whole group."""
    assert replace(HERE, host=socket.gethostname(), pid=os.getpid(), identity=OWN).is_process_here()
    assert not replace(HERE, host=socket.gethostname(), pid=pid, identity=OWN).is_process_here()
    assert not replace(HERE, host=socket.gethostname(), pid=pid, identity="").is_process_here()


def test_a_parent_that_is_there_is_not_gone_not_even_of_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    child = os.fork()
    if not child:
        os._exit(int(parent_is_gone()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not parent_is_gone()
    monkeypatch.setattr(watch.os, "getppid", lambda: 1)
    assert parent_is_gone()


@pytest.mark.parametrize("text", ["kill 7", "kill step=x", "explode step=1", "kill point=nowhere", "kill stop=3"])
def test_a_fault_that_is_not_one_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises((BadInputError, ValueError)):
        asked_fault()


def test_a_fault_comes_where_it_was_asked_for_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    fault_at("batch", 3)
    monkeypatch.setenv(VARIABLE, "raise rank=0 step=3 point=batch times=2")
    for point, step in (("batch", 2), ("update", 3), ("batch", 3)):
        fault_at(point, step)
    with pytest.raises(ValueError, match="on purpose, in step 3"):
        fault_at("batch", 3)
    fault_at("batch", 3)


STUCK = """
import ctypes, sys
from pathlib import Path
from unittest.mock import Mock
from common.runtime.world import Rank
from common.runtime.watch import Watch

ranks, folder = int(sys.argv[1]), Path(sys.argv[2])
Watch(folder, Rank(0, ranks, "cpu", "torchrun"), 600, (folder / "told").write_text)
libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
signal = __import__("signal")
signal.signal(signal.SIGTERM, lambda *_: sys.exit("told in time"))
print("waits", flush=True)
if sys.argv[3] == "in C":  # as for NCCL: no handler of Python's runs meanwhile, but other threads do
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)
signal.pause()
"""


@pytest.mark.parametrize("where", ["in C", "in Python"])
def test_a_rank_that_waits_where_no_signal_is_handled_ends_when_it_is_told_to(tmp_path: Path, where: str) -> None:
    command = [sys.executable, "-c", STUCK, "2", str(tmp_path), where]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as stuck:  # fmt: skip
        try:
            assert stuck.stdout.readline() == "waits\n"
            time.sleep(0.2)
            stuck.send_signal(signal.SIGTERM)
            start_s = time.monotonic()
            assert stuck.wait(timeout=patient(3 * watch.ANSWER_S)) == 1
            took_s = time.monotonic() - start_s
        finally:
            stuck.kill()  # else one that does not end would keep this test waiting
        said = stuck.stderr.read()
    killed = ("was told to end, and did not answer" in said, (tmp_path / "told").exists(), took_s > watch.ANSWER_S)
    assert (*killed, "told in time" not in said) == (where == "in C",) * 4
