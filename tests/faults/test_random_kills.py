"""Runs that are killed again and again, at random, and end where a straight one does."""

import os
import random
import time
from collections.abc import Callable

import pytest

from common.training.checkpoints import BAD, newest_whole, steps_at
from tests.faults.cases import STEPS, cases
from tests.faults.compare import largest_difference

KILLS = int(os.environ.get("KILLS", "10"))
"""Of all techniques together; `make soak` does 100."""
SEED = int(os.environ["KILLS_SEED"])
"""A failing test says it, so that the failure can be had again."""
FAST, SLOW = ("single",), ("ddp", "fsdp", "pp", "machines")
ENDED_S, FINISHED_S = 5, 120


@pytest.mark.parametrize("technique", cases(FAST, SLOW))
def test_a_run_survives_any_kill(start: Callable, straight: Callable, outcomes: object, technique: str) -> None:
    print(f"KILLS_SEED={SEED}")
    chance = random.Random(f"{SEED} {technique}")
    ended_s, lost, number = 0.0, 0, 0
    kills = -(-KILLS // len(FAST + SLOW))
    for kill in range(kills):
        run = start(technique, "--resume_from_checkpoint", "last", name=f"run{number}")
        checkpoints = run.results / "checkpoints"
        run.wait_until(lambda run=run: run.place(0)["step"] > 0 or run.process.poll() is not None, 90)
        time.sleep(chance.random())
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
    last.finish()
    ends = [results / "checkpoints" / f"checkpoint-{STEPS}" for results in (straight(technique), last.results)]
    assert largest_difference(*ends) == 0
    outcomes.keep(
        1, technique, f"{kills} random kills (seed {SEED}): ends as a straight run", ended_s=ended_s, lost_steps=lost
    )
