"""Runs that are killed again and again, at random, and end where a straight one does."""

import os
import random
import time
from collections.abc import Callable

import pytest

from common.training.checkpoints import BAD, newest_whole, steps_at

KILLS = int(os.environ.get("KILLS", "0"))
"""Of all techniques together; `make soak` does 100. 0: a few, `IN_MAKE_TEST` and `IN_TEST_ALL` of each technique."""
IN_MAKE_TEST, IN_TEST_ALL = 2, 4
SEED = int(os.environ["KILLS_SEED"])
"""In the name of each test, so that a failure can be had again."""
FAST = ("single", "ddp")
TECHNIQUES = (*FAST, "fsdp", "pp", "machines")
ENDED_S, FINISHED_S = 5, 120
STEPS = 10


@pytest.mark.parametrize(
    "technique", [*FAST, *(pytest.param(each, marks=pytest.mark.slow) for each in TECHNIQUES[len(FAST) :])]
)
@pytest.mark.parametrize("seed", [SEED])
def test_a_run_survives_any_kill(
    start: Callable, straight: Callable, largest_difference: Callable, outcomes: object, technique: str, seed: int
) -> None:
    chance = random.Random(f"{seed} {technique}")
    ended_s, lost, number = 0.0, 0, 0
    kills = -(-KILLS // len(TECHNIQUES)) or (IN_MAKE_TEST if technique in FAST else IN_TEST_ALL)
    for kill in range(kills):
        run = start(technique, "--resume_from_checkpoint", "last", name=f"run{number}")
        checkpoints = run.results / "checkpoints"
        run.wait_until(lambda run=run: run.place(0)["step"] > 0 or run.process.poll() is not None, 90)
        time.sleep(chance.random() * 1.5)
        run.workers()
        complete, step = run.newest_step(), run.place(0)["step"]
        victims = [*(worker.pid for worker in run.workers().values()), run.process.pid]
        if run.process.poll() is None:
            os.kill(chance.choice(victims), 9)
        killed_s = time.monotonic()
        code = run.end(ENDED_S if run.newest_step() < STEPS else FINISHED_S)
        ended_s = max(ended_s, time.monotonic() - killed_s)
        run.wait_until(lambda run=run: not run.alive(), ENDED_S)
        kept = newest_whole(checkpoints)
        assert (steps_at(kept) if kept else 0) >= complete, f"kill {kill}: what was complete is lost"
        assert not list(checkpoints.glob(f"*{BAD}"))
        lost = max(lost, step - 1 - (steps_at(kept) if kept else 0))
        number += code == 0  # it was over before: the next one starts anew
    last = start(technique, "--resume_from_checkpoint", "last", name=f"run{number}")
    assert last.end(FINISHED_S) == 0, last.output[-3000:]
    ends = [results / "checkpoints" / f"checkpoint-{STEPS}" for results in (straight(technique), last.results)]
    assert largest_difference(*ends) == 0
    outcomes.keep(
        1, technique, f"{kills} random kills (seed {seed}): ends as a straight run", ended_s=ended_s, lost_steps=lost
    )
