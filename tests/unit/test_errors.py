"""What went wrong here is told from what went wrong with another rank."""

import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from common.base.command_line import ASKED_TO_END_EXIT_CODE, FAULT, SPEAK_FIRST_S, refused_in_one_sentence
from common.base.errors import AskedToEndError, BadInputError, is_full_disk, is_lost_peer, reading, status_of
from common.base.paths import is_embedded
from common.base.signals import END_SIGNALS, end_signals_deferred, on_end_signal

NCCL = "NCCL error in: ProcessGroupNCCL.cpp:1\n"


@pytest.mark.parametrize(
    ("error", "is_lost_rank", "status"),
    [
        (DistBackendError(f"{NCCL}ncclRemoteError: A call failed possibly due to a network error"), True, "failed"),
        (DistBackendError("NCCL communicator was aborted on rank 1."), True, "failed"),
        (DistBackendError("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(...)"), True, "failed"),
        (DistBackendError(f"{NCCL}ncclUnhandledCudaError: Cuda failure 2 'out of memory'"), False, "oom"),
        (DistBackendError(f"{NCCL}ncclSystemError: Error while creating shared memory segment"), False, "failed"),
        (DistBackendError(f"{NCCL}ncclInvalidUsage: Duplicate GPU detected : rank 1 and 0"), False, "failed"),
        (DistNetworkError("Connection closed by peer"), True, "failed"),
        (DistStoreError("wait timeout"), True, "failed"),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True, "failed"),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] no error"), True, "failed"),
        (RuntimeError("Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error"), True, "failed"),
        (RuntimeError("weights of /data/igloo/model have another shape"), False, "failed"),
        (RuntimeError("[/data/igloo/rows.py:3] no such row"), False, "failed"),
        (OSError("[Errno 2] No such file or directory: '/home/me/gloo/transport/tcp/pair.cc:534]'"), False, "failed"),
        (
            BadInputError("3: '[../gloo/transport/tcp/pair.cc:534] Connection closed' has no answer"),
            False,
            "failed",
        ),
        (ValueError("backend gloo does not take bf16"), False, "failed"),
        (RuntimeError("expected scalar type Float"), False, "failed"),
        (torch.OutOfMemoryError("CUDA out of memory"), False, "oom"),
        (KeyboardInterrupt(), False, "interrupted"),
        (AskedToEndError("saved after step 40"), False, "interrupted"),
    ],
)
def test_a_lost_rank_is_told_from_an_error_of_this_one(error: BaseException, is_lost_rank: bool, status: str) -> None:
    assert (is_lost_peer(error), status_of(error)) == (is_lost_rank, status)


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (OSError(errno.EACCES, os.strerror(errno.EACCES)), False),
        (ValueError("28 rows"), False),
    ],
)
def test_a_full_disk_is_known_by_the_systems_number(error: BaseException, is_full: bool) -> None:
    assert is_full_disk(error) == is_full


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_too_little_memory_is_no_fault_of_what_was_read(error: Exception) -> None:
    with pytest.raises(type(error)), reading("The model"):
        raise error


@pytest.fixture
def pythons_own_pipes() -> Iterator[None]:
    """A write that nobody reads is an error, whatever command ran in this process before (the planner's changes it)."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGPIPE, before)


@pytest.mark.usefixtures("pythons_own_pipes")
@pytest.mark.parametrize("is_read", [True, False])
def test_what_nobody_reads_any_more_ends_silently_and_another_broken_pipe_does_not(
    is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        if not is_read:
            os.close(reader)
            with pytest.raises(SystemExit, match="141"), refused_in_one_sentence():
                print("not flushed before the end")
            return
        with pytest.raises(SystemExit, match="BrokenPipeError"), refused_in_one_sentence():
            raise BrokenPipeError
    os.close(reader)


ASKED = """
import signal, sys
from common.base.command_line import ended_by_one_sentence
from common.base.errors import AskedToEndError

with ended_by_one_sentence():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: told to end"))  # as a rank has it
    print("is there", flush=True)
    raise AskedToEndError("saved after step 40")
"""


OF_TWO = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def catches_sigterm(process: int) -> bool:
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize(
    ("local_rank", "said", "code"),
    [("0", "error: saved after step 40\n", ASKED_TO_END_EXIT_CODE), ("1", "", -signal.SIGTERM)],
)
def test_a_run_that_ends_as_it_was_asked_is_told_once_for_each_machine(local_rank: str, said: str, code: int) -> None:
    """Whoever is told to end because another rank has gone says nothing more."""
    with subprocess.Popen(
        [sys.executable, "-c", ASKED],
        env={**os.environ, **OF_TWO, "RANK": local_rank, "LOCAL_RANK": local_rank},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as rank:
        assert rank.stdout.readline() == "is there\n"
        if local_rank != "0":
            deadline_s = time.monotonic() + SPEAK_FIRST_S / 2
            while catches_sigterm(rank.pid) and time.monotonic() < deadline_s:
                time.sleep(0.02)
            rank.terminate()
        assert rank.stderr.read() == said
    assert rank.returncode == code


@pytest.fixture
def usual_ends() -> Iterator[None]:
    """Signals to end do what they do in a new process, whoever started this one (nohup has one ignored)."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in END_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("usual_ends")
@pytest.mark.parametrize("number", END_SIGNALS)
def test_whatever_tells_a_process_to_end_waits_until_a_failure_is_recorded(number: signal.Signals) -> None:
    heard = []
    on_end_signal(lambda number, _: heard.append(number))
    with end_signals_deferred():
        signal.raise_signal(number)
        assert not heard
    assert heard == [number]


@pytest.mark.usefixtures("usual_ends")
def test_a_signal_that_is_ignored_stays_so() -> None:
    """As `nohup` has it: the terminal may be closed."""
    heard = []
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    on_end_signal(lambda number, _: heard.append(number))
    with end_signals_deferred():
        signal.raise_signal(signal.SIGHUP)
    on_end_signal(signal.SIG_DFL)
    signal.raise_signal(signal.SIGHUP)
    assert not heard


def test_a_fault_of_ours_is_reported_with_its_place_and_its_trace_in_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as left, refused_in_one_sentence():
        is_embedded(3)
    (file,) = tmp_path.iterdir()
    assert FAULT in left.value.code
    assert "common/base/paths.py, line " in left.value.code
    assert str(file) in left.value.code
    assert "TypeError" in file.read_text()
