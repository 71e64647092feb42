"""Step times of one world of ranks that takes turns with another, and its ceiling; `bench.scaling` starts both.

    torchrun --nproc_per_node 2 -m bench.scaling_trial lora 16 --turns 12 --steps 6 --folder some_folder

A machine's speed may change by a third within a minute. So both worlds are there at once and take a few steps in turn,
and the ceiling is measured within the same seconds. Rank 0 prints the figures of its turns as its last line, as JSON.
"""

import argparse
import faulthandler
import json
import os
import tempfile
import time
from pathlib import Path

from accelerate.utils import wait_for_everyone
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from bench.recipe import Technique, TrialOfEpochs, load_material, load_model
from common.base.run_config import RunConfig
from common.models.families import suited_to_model
from common.runtime.rank import end_rank, start_rank
from common.training.ceiling import measure_machine_ceiling
from common.training.ddp import data_parallel, exchanging
from common.training.loop import TrainingLoop

WARM_UP_STEPS = 3
STUCK_AFTER_S = 240
"""A rank that waits for another for so long says where, and ends."""
POLL_S = 0.002


class Turns(TrainerCallback):
    """Times `steps` optimizer steps in each of this world's turns, and lets the other world take its own between them.

    A turn has one step more, at its beginning, that is not timed: the caches are the other world's then.
    """

    def __init__(self, folder: Path, loop: TrainingLoop, steps: int) -> None:
        self.folder, self.loop, self.rank, self.steps = folder, loop, loop.rank, steps
        self.step_times_s: list[float] = []
        self.ceilings: list[float] = []
        loop.handler.add_callback(self)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Begin to time, or end the turn."""
        step = state.global_step - WARM_UP_STEPS
        place = step % (self.steps + 1)
        if step > 0 and place == 0:
            self._end_turn()
        if step >= 0 and place == 0:
            self._hand_over(len(self.step_times_s), is_last=state.global_step == args.max_steps)
        if place == 1:
            self.start_s = time.perf_counter()

    def _end_turn(self) -> None:
        self.step_times_s.append((time.perf_counter() - self.start_s) / self.steps)
        if self.rank.world_size > 1:
            ceiling = measure_machine_ceiling(self.loop, steps=self.steps, rounds=1)
            self.ceilings.append(ceiling["strong"])

    def _hand_over(self, turns: int, is_last: bool) -> None:
        """Say that this world has had its `turns`, and wait until the other one has; one rank begins.

        The world of one rank waits after its last turn, too: its end would take the time of the other's last turn.
        """
        is_one = self.rank.world_size == 1
        if self.rank.is_main:
            (self.folder / f"{'one' if is_one else 'several'} {turns}").touch()
            before = self.folder / (f"several {turns}" if is_one else f"one {turns + 1}")
            while not before.exists() and (is_one or not is_last):
                time.sleep(POLL_S)
        wait_for_everyone()


def measure(
    technique: Technique, global_batch_rows: int, turns: int, steps: int, folder: Path
) -> dict[str, list[float]]:
    """Seconds per optimizer step of this world (`step_times_s`) by turn, and of several ranks their `ceilings`."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    asked = RunConfig(
        technique=technique,
        parallel="ddp" if world_size > 1 else "single",
        devices=world_size,
        per_device_train_batch_size=global_batch_rows // world_size,
        max_steps=WARM_UP_STEPS + turns * (steps + 1),
    )
    run = suited_to_model(asked)  # rows end to end, as in the run folders
    rank = start_rank(run)
    with tempfile.TemporaryDirectory() as results:
        clock = _train(TrialOfEpochs(run, rank, Path(results)), folder, steps)
    figures = {"step_times_s": clock.step_times_s, "ceilings": clock.ceilings}
    if rank.is_main:
        print(json.dumps(figures), flush=True)
    wait_for_everyone()
    end_rank()
    return figures


def _train(log: TrialOfEpochs, folder: Path, steps: int) -> Turns:
    """Train as 2.2 does, in turns; the clock needs the loop, whose ceiling it measures between them."""
    material, replica = load_material(log.run), data_parallel(load_model(log.run), log.rank)
    loop = TrainingLoop(replica, material.tokenizer, material.splits, log)
    clock = Turns(folder, loop, steps)
    for step in loop.steps():
        for batch, is_last in step:
            with exchanging(replica, is_last):
                (loop.loss(batch, step.label_count) * log.rank.world_size).backward()
        loop.update()
    return clock


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("technique", choices=["lora", "full"])
    parser.add_argument("global_batch_rows", type=int)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps of a turn")
    parser.add_argument("--folder", type=Path, required=True, help="where both worlds say whose turn it is")
    faulthandler.dump_traceback_later(STUCK_AFTER_S, exit=True)
    measure(**vars(parser.parse_args()))
