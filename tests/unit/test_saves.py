"""When a run saves what, what is kept of it, and that no large file is read again for its digest."""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch
from transformers import TrainerControl, TrainerState

from common.base.errors import AskedToEndError
from common.base.run_config import RunConfig
from common.hardware.devices import GIB
from common.runtime.rank import end_rank
from common.training import checkpoints, saves
from common.training.checkpoints import (
    BEST,
    FULL_STATE,
    HOLDS,
    WEIGHTS,
    UnfinishedCheckpoint,
    read_manifest,
    rotate,
    to_keep,
    verify,
)
from common.training.part import SHARDS, Part
from common.training.saves import MEET_S, CheckpointSize, SaveSchedule, describe_saves
from tests.unit.ranks import found_by_ranks

ROWS = 64
LARGE = CheckpointSize(weights_bytes=14 * GIB, state_bytes=84 * GIB)


@pytest.fixture(autouse=True)
def _no_state_left() -> Iterator[None]:
    yield
    end_rank()


# -- when a full state is due


@pytest.fixture
def steps_saved(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """After which of so many steps a full state is saved, of a run whose `step_s(step)` says how long each takes.

    `other_rank`: how many times as long the other rank has been at it; `asked_at`: the step in which it is asked to
    save; `met`: gets the seconds of each meeting, from the start.
    """
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(saves, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))

    def saved(
        minutes: float,
        steps: int,
        step_s: Callable[[int], float],
        other_rank: float = 1,
        asked_at: float = math.inf,
        met: list[float] | None = None,
        **state: float,
    ) -> list[int]:
        def gather(own: list) -> list:
            if isinstance(own[0], bool):  # before the first step
                return [*own, asked_at == 0]
            if met is not None:
                met.append(clock.now_s - 1000)
            lost_s, pace_s, _ = own[0]
            return [*own, (other_rank * lost_s, other_rank * pace_s, state.global_step >= asked_at)]

        monkeypatch.setattr(saves, "gather_object", gather)
        schedule, found = SaveSchedule(minutes), []
        state = TrainerState(**{"save_steps": 0, **state})
        schedule.on_train_begin(None, state, TrainerControl())
        for step in range(1, steps + 1):
            control = TrainerControl(should_training_stop=step == steps)
            clock.now_s += step_s(step)
            state.global_step = step
            schedule.on_step_end(None, state, control)
            if control.should_save:
                found.append(step)
                schedule.saved(step)
            if schedule.is_asked:
                break
        return found

    return saved


@pytest.mark.parametrize(
    ("minutes", "steps", "step_s", "others", "expected"),
    [
        (1, 20, lambda _: 10.0, {}, [6, 12, 18]),
        (10, 20, lambda _: 10.0, {}, []),
        (1, 3, lambda _: 100.0, {}, [1, 2, 3]),  # a step that takes longer is all that is lost
        (1, 20, lambda _: 10.0, {"other_rank": 2}, [3, 6, 9, 12, 15, 18]),
        (4, 200, lambda step: 60.0 if step == 1 else 1.0, {}, [181]),  # a minute of compiling, then a second a step
        (1, 7, lambda _: 1000.0, {"save_steps": 3}, [3, 6, 7]),
    ],
    ids=["every sixth", "none", "each", "the slowest rank decides", "a slow first step is no pace", "an interval"],
)
def test_a_full_state_is_saved_before_more_minutes_than_allowed_are_lost(
    steps_saved: Callable, minutes: float, steps: int, step_s: Callable, others: dict, expected: list[int]
) -> None:
    assert steps_saved(minutes, steps, step_s, **others) == expected


# -- where a scheduler asks for it


@pytest.mark.parametrize("save_steps", [0, 10**6])
@pytest.mark.parametrize(
    ("step_s", "steps", "other_rank", "longest_s"),
    [
        (lambda _: 0.05, 6000, 1, MEET_S),
        (lambda _: 1.5, 200, 1, MEET_S),
        (lambda _: 1.5, 200, 4, MEET_S / 4),
        (lambda _: 70.0, 4, 1, 70.0),
        (lambda step: 60.0 if step == 1 else 0.25, 900, 1, MEET_S),
    ],
    ids=["short steps", "steps", "a slow rank", "long steps", "a slow first step"],
)
def test_ranks_meet_often_enough_to_hear_that_one_was_asked_to_save(
    steps_saved: Callable, step_s: Callable, steps: int, other_rank: float, longest_s: float, save_steps: int
) -> None:
    """At the pace of the slowest, and however far apart full states are; but seldom."""
    met: list[float] = []
    steps_saved(10**6, steps, step_s, other_rank=other_rank, met=met, save_steps=save_steps)
    assert max(later - earlier for earlier, later in pairwise(met)) <= longest_s + 1e-6
    assert len(met) <= 8 + 300 / longest_s * 1.2


@pytest.mark.parametrize("save_steps", [0, 1000])
def test_all_save_after_the_same_step_where_another_rank_was_asked(steps_saved: Callable, save_steps: int) -> None:
    assert steps_saved(10**6, 99, lambda _: 10.0, asked_at=41, save_steps=save_steps) == [42], "they meet every 2 steps"
    assert steps_saved(10**6, 99, lambda _: 0.001, asked_at=98, save_steps=save_steps) == [99], "after the last, too"


def test_who_is_asked_before_the_first_step_ends_there(steps_saved: Callable) -> None:
    with pytest.raises(AskedToEndError, match="ended before step 1 of training, as asked by SIGUSR1"):
        steps_saved(1, 10, lambda _: 1.0, asked_at=0)


# -- what is kept


def test_two_full_states_are_kept_and_the_weights_that_each_resume_needs(tmp_path: Path) -> None:
    """Who resumes after step 3 begins with the weights of step 2 as the best."""
    kept = {}
    for step, holds, best in (
        (1, WEIGHTS, 1), (2, WEIGHTS, 2), (3, FULL_STATE, 2), (4, WEIGHTS, 4), (5, FULL_STATE, 4),
        (6, FULL_STATE, 6), (7, FULL_STATE, 6), (8, FULL_STATE, 6),
    ):  # fmt: skip
        about = {HOLDS: holds, BEST: best}
        UnfinishedCheckpoint(tmp_path / f"checkpoint-{step}", about, commits=True).commit()
        rotate(tmp_path, to_keep(tmp_path, best))
        kept[step] = {int(path.name[11:]): read_manifest(path)["about"][HOLDS] for path in tmp_path.glob("check*")}
    del kept[1], kept[3], kept[6]
    assert kept == {
        2: {2: WEIGHTS},
        4: {2: WEIGHTS, 3: FULL_STATE, 4: WEIGHTS},
        5: {3: FULL_STATE, 4: WEIGHTS, 5: FULL_STATE},
        7: {6: FULL_STATE, 7: FULL_STATE},
        8: {6: FULL_STATE, 8: FULL_STATE},  # a full state with the best weights is the second one
    }


# -- digests


def test_files_that_were_hashed_once_they_were_written_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    own = checkpoints.digest_of
    monkeypatch.setattr(checkpoints, "digest_of", lambda path: read.append(path.name) or own(path))
    unfinished = UnfinishedCheckpoint(tmp_path / "checkpoint-3", {}, commits=True)
    weights, config = (unfinished.partial / name for name in ("__0_0.distcp", "config.json"))
    for file in (weights, config):
        file.write_bytes(b"w" * 5000)
    unfinished.digests = unfinished.write_and_hash(lambda: [weights])
    unfinished.commit()
    assert read == [weights.name, config.name]
    assert verify(unfinished.folder) == {}


# -- what is said before


@pytest.mark.parametrize(
    ("settings", "size", "waits", "expected"),
    [
        ({}, LARGE, True, [
            "a full state (84.0 GiB) every 15 minutes;",
            "the best weights (14.0 GiB) after at most 4 validations; 280.0 GiB on the disk at most",
        ]),
        ({"save_steps": 0.3}, LARGE, True, ["4 full states (84.0 GiB each), one after every 30 steps"]),
        ({}, LARGE, False, ["4 validations; training goes on meanwhile; 280.0 GiB"]),
        ({}, CheckpointSize(GIB // 2, GIB), True, ["at the end"]),
    ],
    ids=["by minutes", "by steps", "in the background", "small"],
)  # fmt: skip
def test_a_run_says_how_often_it_saves_and_how_much(
    settings: dict[str, float], size: CheckpointSize, waits: bool, expected: list[str]
) -> None:
    state = TrainerState(max_steps=100, eval_steps=25, save_steps=100 * settings.get("save_steps", 0))
    said = describe_saves(RunConfig(**settings), state, size, waits)
    assert [words for words in expected if words not in said] == []


# -- while training goes on


@pytest.mark.slow
def test_shards_are_those_of_the_step_after_which_they_were_asked_for(tmp_path: Path) -> None:
    found = found_by_ranks("background_save_worker.py", 2, tmp_path)
    assert found == {"has_name": [False] * 2, "differs": [True] * 2, "equal": [True] * 2}


def test_a_copy_on_the_host_is_written_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For a thread that writes the GPU is the first one, where each rank's process would take memory for nothing."""

    def touched(*_: object) -> NoReturn:
        raise AssertionError("a GPU was asked for its stream")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", touched)
    files = Part.write(SimpleNamespace(is_whole=True), tmp_path, {"weight": torch.ones(3)})
    assert files == [tmp_path / SHARDS / "__0_0.distcp"]
