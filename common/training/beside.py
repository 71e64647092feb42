"""The same few steps by a workflow's loop and by a library's trainer: losses, time and memory of both."""

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import pandas as pd
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed
from typing_extensions import override

from common.base.run_config import RunConfig
from common.models.shards import tensors_of
from common.planning.phases import TRAINING
from common.runtime.recorder import PeakMemory, Trial
from common.runtime.world import Rank
from common.training.usage import state_tensors

ROWS, STEPS = 4, 20


class ShortRun(Trial):
    """Stands in for a run's recorder where ranks divide the rows, and nothing is kept."""

    repeats = False


class StepMeter(TrainerCallback):
    """Keeps loss and time of each step, and the memory of the last one, on a CPU of its tensors."""

    def __init__(self, rank: Rank) -> None:
        """Measure on this rank's device."""
        self.memory, self.losses, self.ends_s = PeakMemory(rank), [], []
        self.memory.enter(TRAINING)

    @override
    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        **kwargs: object,
    ) -> None:
        if state.global_step == state.max_steps - 1:
            parts = {"weights": tensors_of(model), "optimizer": state_tensors(optimizer)}
            self.counting = self.memory.counting(TRAINING, parts)
            self.counting.__enter__()

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        control.should_log = True
        if state.global_step < state.max_steps:  # counting takes time
            self.ends_s.append(time.perf_counter())
        else:
            self.counting.__exit__(None, None, None)
            self.memory.enter("done")

    @override
    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        **kwargs: object,
    ) -> None:
        self.losses += [logs["loss"]] if "loss" in logs else []

    def figures(self) -> dict[str, float]:
        """Return the losses of the first and the last step, the median step's time, and the peak of the last one."""
        step_s = median(end - start for start, end in zip(self.ends_s, self.ends_s[1:], strict=False))
        peak_gib = max(self.memory.by_phase[TRAINING].values())
        return {
            "loss, first step": self.losses[0],
            "loss, last step": self.losses[-1],
            "a step (ms)": 1e3 * step_s,
            "peak (MiB)": 2**10 * peak_gib,
        }


def trained_beside(run: RunConfig, rank: Rank, ways: dict[str, Callable[[Trial], object]]) -> pd.DataFrame:
    """Train a few steps in each of several ways, and return what `StepMeter` found of each; called on every rank.

    Each step has the same `ROWS` rows per rank, so that all ways divide them alike, and no dropout, whose masks no two
    ways draw alike.
    """
    rows = {"per_device_train_batch_size": ROWS, "train_rows": ROWS * run.data_parallel_ranks}
    run = replace(run, **rows, gradient_accumulation_steps=1, max_steps=STEPS)
    if run.method.has_adapters:
        run = replace(run, lora_dropout=0.0)
    found = {}
    for name, train in ways.items():
        meter = StepMeter(rank)
        set_seed(run.seed)
        with TemporaryDirectory() as folder:
            train(ShortRun(run, rank, Path(folder), [meter]))
        gc.collect()
        found[name] = meter.figures()
    return pd.DataFrame.from_dict(found, orient="index")
