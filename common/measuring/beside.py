"""The same few steps by a workflow's loop and by a library's trainer: losses, time and memory of both."""

import gc
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed
from typing_extensions import override

from common.base.run_config import RunConfig
from common.models.shards import tensors_of
from common.planning.phases import TRAINING
from common.runtime.recorder import PeakMemory, Trial
from common.runtime.world import Rank
from common.training.usage import state_tensors

ROWS, STEPS = 4, 20


class StepMeter(TrainerCallback):
    """Keeps loss and time of each step, and the memory of the last one, on a CPU of its tensors."""

    def __init__(self, rank: Rank) -> None:
        self.memory, self.counting, self.ends_s = PeakMemory(rank), ExitStack(), []
        self.memory.enter(TRAINING)

    @override
    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **at: Any) -> None:
        if state.global_step == state.max_steps - 1:
            parts = {"weights": tensors_of(at["model"]), "optimizer": state_tensors(at["optimizer"])}
            self.counting.enter_context(self.memory.counting(TRAINING, parts))

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        control.should_log = True
        self.ends_s.append(time.perf_counter())
        self.counting.close()

    @override
    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.memory.enter("done")
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        *ends_s, _ = self.ends_s  # the last step was counted, which takes time
        self.figures = {
            "loss, first step": losses[0],
            "loss, last step": losses[-1],
            "a step (ms)": 1e3 * median(end - start for start, end in pairwise(ends_s)),
            "peak (MiB)": 2**10 * max(self.memory.by_phase[TRAINING].values()),
        }


def trained_beside(run: RunConfig, rank: Rank, ways: dict[str, Callable[[Trial], object]]) -> pd.DataFrame:
    """Train a few steps in each of several ways, and return what `StepMeter` found of each; called on every rank.

    Steps have the same `ROWS` rows per rank, which all ways divide alike, and no dropout, whose masks would differ.
    """
    rows = {"per_device_train_batch_size": ROWS, "train_rows": ROWS * run.data_parallel_ranks}
    dropout = {"lora_dropout": 0.0} if run.method.has_adapters else {}
    run = replace(run, **rows, **dropout, gradient_accumulation_steps=1, max_steps=STEPS)
    found = {}
    for name, train in ways.items():
        meter = StepMeter(rank)
        set_seed(run.seed)
        with TemporaryDirectory() as folder:
            trial = Trial(run, rank, Path(folder), [meter])
            trial.repeats = False  # ranks divide the rows
            train(trial)
        gc.collect()
        found[name] = meter.figures
    return pd.DataFrame.from_dict(found, orient="index")
