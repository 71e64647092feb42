"""Whatever happens while a checkpoint is written or lies on the disk: what was complete stays, what is bad is named."""

import errno
import os
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import StackSummary

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.distributed import DistNetworkError
from torch.distributed.checkpoint.api import CheckpointException

from common.base.errors import RunStoppedError
from common.runtime.faults import VARIABLE
from common.runtime.rank import end_rank
from common.training.checkpoints import (
    BAD,
    MANIFEST_FILE,
    PARTIAL,
    DamagedCheckpointError,
    UnfinishedCheckpoint,
    newest_whole,
    read_manifest,
    rotate,
    verify,
    write_manifest,
)
from common.training.safe_loading import SafeReader

ABOUT = {"technique": "full", "parallel": "single", "ranks": 1, "rows_per_step": 16, "rows": 64, "seed": 42}
FILES = {"model.safetensors": b"w" * 5_000, "optimizer.pt": b"o" * 9_000, "shards/.metadata": b"m" * 300}


@pytest.fixture(autouse=True)
def _no_state_left() -> Iterator[None]:
    yield
    end_rank()


def _write(folder: Path) -> None:
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


def _commit(root: Path, step: int, write: Callable[[Path], None] = _write) -> Path:
    folder = root / f"checkpoint-{step}"
    unfinished = UnfinishedCheckpoint(folder, ABOUT, commits=True)
    with unfinished.being_written() as partial:
        write(partial)
    unfinished.commit()
    return folder


def test_what_is_committed_is_whole_and_says_what_it_is_of(tmp_path: Path) -> None:
    folder = _commit(tmp_path, 3)
    assert verify(folder) == ABOUT
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {
        MANIFEST_FILE,
        *FILES,
    }
    assert newest_whole(tmp_path) == folder
    rotate(tmp_path, {_commit(tmp_path, 4).name})
    assert [path.name for path in tmp_path.glob("checkpoint*")] == ["checkpoint-4"]
    _commit(tmp_path, 4)  # a run that goes on may come to a step once more
    assert newest_whole(tmp_path) == tmp_path / "checkpoint-4"


@pytest.mark.parametrize(
    ("met", "raised", "said"),
    [
        (DistNetworkError("Connection closed by peer"), DistNetworkError, "closed by peer"),  # rank 0's machine is gone
        (OSError(errno.ENOSPC, "No space left on device"), RunStoppedError, "No space left on device; .* make room"),
    ],
)
def test_what_a_rank_met_inside_pytorchs_own_error_is_told(
    tmp_path: Path, met: Exception, raised: type[Exception], said: str
) -> None:
    def write(_: Path) -> None:
        raise CheckpointException("gather", {0: (met, StackSummary())})

    with pytest.raises(raised, match=said):
        _commit(tmp_path, 3, write)


# -- killed while it is written


def _in_a_process_of_its_own(work: Callable[[], None]) -> int:
    """By which signal it ended."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


POINTS = ("written", "flushed", "listed", "renamed", "rotated")


@pytest.mark.parametrize("files_before", range(len(FILES)))
def test_killed_at_any_write_the_checkpoint_before_is_used(tmp_path: Path, outcomes: object, files_before: int) -> None:
    before = _commit(tmp_path, 3)

    def write_some(folder: Path) -> None:
        for name, content in list(FILES.items())[: files_before + 1]:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    assert _in_a_process_of_its_own(lambda: _commit(tmp_path, 4, write_some)) == -signal.SIGKILL
    assert newest_whole(tmp_path) == before
    assert verify(_commit(tmp_path, 4)) == ABOUT, "what was left lies in nobody's way"
    assert not list((tmp_path / PARTIAL).iterdir())
    outcomes.keep(2, "all", "the checkpoint before, or the new one, is used")


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_boundary_one_of_both_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    before = _commit(tmp_path, 3)
    monkeypatch.setenv(VARIABLE, f"kill step=4 point={point}")

    def commit_and_rotate() -> None:
        rotate(tmp_path, {_commit(tmp_path, 4).name})

    assert _in_a_process_of_its_own(commit_and_rotate) == -signal.SIGKILL
    monkeypatch.delenv(VARIABLE)
    renamed = point in ("renamed", "rotated")
    assert newest_whole(tmp_path) == (tmp_path / "checkpoint-4" if renamed else before)
    assert (tmp_path / "checkpoint-3").exists() == (point != "rotated"), "removed only after the commit"


def test_written_in_place_a_half_would_be_used(tmp_path: Path) -> None:
    """The negative control: what Transformers' own search would go on from."""
    from transformers.trainer_utils import get_last_checkpoint

    _commit(tmp_path, 3)
    half = tmp_path / "checkpoint-4"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"w" * 2_500)
    assert get_last_checkpoint(str(tmp_path)) == str(half)
    assert newest_whole(tmp_path) == tmp_path / "checkpoint-3"
    assert (tmp_path / f"checkpoint-4{BAD}").exists()


# -- damaged on the disk


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = _commit(tmp_path_factory.mktemp("whole"), 3)
    end_rank()
    return folder


def _copy(whole: Path) -> Path:
    copy = whole.parent.parent / "copy" / whole.name
    shutil.rmtree(copy.parent, ignore_errors=True)
    shutil.copytree(whole, copy)
    return copy


def flipped(content: bytes, place: int, other: int) -> bytes:
    return content[:place] + bytes([content[place] ^ other]) + content[place + 1 :]


def truncated(content: bytes, place: int, _: int) -> bytes:
    return content[:place]


@given(
    damage=st.sampled_from([flipped, truncated]),
    name=st.sampled_from([MANIFEST_FILE, *FILES]),
    place=st.integers(0, 99_999),
    other=st.integers(1, 255),
)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flipped_byte_and_any_truncation_is_caught(
    whole: Path, outcomes: object, damage: Callable, name: str, place: int, other: int
) -> None:
    path = _copy(whole) / name
    content = path.read_bytes()
    path.write_bytes(damage(content, place % len(content), other))
    with pytest.raises(DamagedCheckpointError, match=path.name):
        verify(whole.parent.parent / "copy" / whole.name)
    outcomes.keep(5, "all", "caught by its SHA-256, wherever it is")
    outcomes.keep(4, "all", "named and kept aside, the one before is used")


def test_a_cut_a_missing_and_a_further_file_are_caught(whole: Path) -> None:
    copy = _copy(whole)
    written = (copy / "optimizer.pt").read_bytes()
    (copy / "optimizer.pt").write_bytes(written[:100])
    with pytest.raises(DamagedCheckpointError, match=rf"optimizer\.pt has 100 of {len(written):,} bytes"):
        verify(copy)
    (copy / "optimizer.pt").write_bytes(written)
    (copy / "rng_state.pth").write_bytes(b"put here by somebody")
    with pytest.raises(DamagedCheckpointError, match=r"rng_state\.pth was put beside"):
        verify(copy)
    (copy / "rng_state.pth").unlink()
    (copy / "optimizer.pt").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"optimizer\.pt is missing"):
        verify(copy)


def test_a_damaged_one_is_named_and_kept_aside_and_the_one_before_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, newest = _commit(tmp_path, 3), _commit(tmp_path, 4)
    (newest / "optimizer.pt").write_bytes(b"o" * 8_999 + b"p")
    assert newest_whole(tmp_path) == before
    said = capsys.readouterr().out
    assert "checkpoint-4 is damaged: optimizer.pt has other bytes than were written" in said
    assert "kept as checkpoint-4.bad" in said
    assert (tmp_path / "checkpoint-4.bad" / "optimizer.pt").exists()


# -- no space


def test_no_space_leaves_the_checkpoint_before(
    tmp_path: Path, outcomes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _commit(tmp_path, 3)
    monkeypatch.setenv(VARIABLE, "full step=4 point=written")
    with pytest.raises(RunStoppedError, match=r"step 4 could not be written .*No space left on device.*make room"):
        _commit(tmp_path, 4)
    assert newest_whole(tmp_path) == before
    outcomes.keep(7, "all", "seen before, or the checkpoint before is whole")


# -- hostile


class Hostile:
    """What runs code where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.canary,)


def test_a_hostile_pickle_runs_nowhere(tmp_path: Path, outcomes: object) -> None:
    """Even with a manifest that its author has made anew."""
    canary = tmp_path / "canary"
    folder = tmp_path / "checkpoint-3" / "shards"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(canary)))
    torch.save(Hostile(canary), folder.parent / "optimizer.pt")
    write_manifest(folder.parent, ABOUT)
    assert read_manifest(folder.parent)["about"] == verify(folder.parent) == ABOUT
    with pytest.raises(ValueError, match="has no place in a list of shards"):
        SafeReader(str(folder)).read_metadata()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(folder.parent / "optimizer.pt", weights_only=True)
    assert not canary.exists()
    outcomes.keep(31, "all", "its canary does not run")
    pickle.loads((folder / ".metadata").read_bytes())
    assert canary.exists(), "the negative control: DCP's own reader would have run it"


@pytest.mark.slow
@pytest.mark.usefixtures("needs_deepspeed")
def test_a_resumed_zero_runs_nothing_that_a_checkpoint_says(start: Callable, tmp_path: Path, outcomes: object) -> None:
    """DeepSpeed's own reader would: of weights, which every rank reads, and of each rank's states."""
    zero, last = ("fsdp", "--parallel", "zero2"), ("--resume_from_checkpoint", "last")
    canary = tmp_path / "canary"
    assert start(*zero, fault="raise rank=1 step=4 point=batch").end(240) != 0
    whole = tmp_path / "results" / "run" / "checkpoints" / "checkpoint-3"
    shutil.copytree(whole, tmp_path / "kept")
    (of_rank_1,) = (path.name for path in (whole / "zero").glob("*zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    for name in ("mp_rank_00_model_states.pt", of_rank_1):
        about = verify(whole)
        torch.save(Hostile(canary), whole / "zero" / name)
        (whole / MANIFEST_FILE).unlink()
        write_manifest(whole, about)
        again = start(*zero, *last)
        assert again.end(240) != 0
        assert not canary.exists()
        assert f"{name} cannot be read" in again.output
        assert "resume from another checkpoint" in again.output
        shutil.rmtree(whole)
        shutil.copytree(tmp_path / "kept", whole)
    assert start(*zero, *last).finish()["checkpoints"]["went_on_from"] == "checkpoint-3"
    outcomes.keep(31, "all", "its canary does not run")
