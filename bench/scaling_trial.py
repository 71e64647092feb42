"""The step time of one world of ranks, and for several the machine's ceiling; `bench.scaling` starts it.

    torchrun --nproc_per_node 2 -m bench.scaling_trial lora 16 12

Rank 0 prints the result as its last line, as JSON.
"""

import faulthandler
import json
import os
import sys
import tempfile
import time

from accelerate.utils import wait_for_everyone
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from bench.recipe import Technique, load_material, load_model
from common.base.run_config import RunConfig
from common.models.families import suited_to_model
from common.runtime.rank import end_rank, start_rank
from common.runtime.world import Rank
from common.training.ceiling import measure_machine_ceiling
from common.training.trainer import AuditedTrainer, trainer_of_rows, training_arguments

WARM_UP_STEPS = 3
CEILING_STEPS = 8
STUCK_AFTER_S = 240
"""A rank that waits for another for so long says where, and ends."""


class _StepClock(TrainerCallback):
    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.ends_s.append(time.perf_counter())

    @property
    def step_s(self) -> float:
        timed_s = self.ends_s[WARM_UP_STEPS - 1 :]
        return (timed_s[-1] - timed_s[0]) / (len(timed_s) - 1)


def measure(technique: Technique, global_batch_rows: int, steps: int) -> dict[str, float]:
    """Seconds per optimizer step of this world (`step_s`), and its `ceiling` where it has several ranks."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    asked = RunConfig(
        parallel="ddp" if world_size > 1 else "single",
        devices=world_size,
        per_device_train_batch_size=global_batch_rows // world_size,
        max_steps=WARM_UP_STEPS + steps,
    )
    run = suited_to_model(asked)  # rows end to end, as in the run folders
    rank, clock = start_rank(run), _StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(run, technique, rank, clock, folder)
        trainer.train()
    figures = {"step_s": clock.step_s}
    if world_size > 1:
        figures["ceiling"] = measure_machine_ceiling(trainer, rank, steps=CEILING_STEPS)["strong"]
    if rank.is_main:
        print(json.dumps(figures), flush=True)
    wait_for_everyone()
    end_rank()
    return figures


def _trainer(run: RunConfig, technique: Technique, rank: Rank, clock: _StepClock, folder: str) -> AuditedTrainer:
    arguments = training_arguments(run, folder)
    arguments.eval_strategy = arguments.save_strategy = arguments.logging_strategy = "no"
    arguments.load_best_model_at_end = False
    material = load_material(run)
    model = load_model(run, technique)
    rows = material.train, material.validation
    return trainer_of_rows(run, rank, model, material.tokenizer, *rows, arguments, [clock])


if __name__ == "__main__":
    faulthandler.dump_traceback_later(STUCK_AFTER_S, exit=True)
    measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
