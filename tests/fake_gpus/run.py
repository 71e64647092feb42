"""Run a workflow as if this machine had several GPUs: `python -m tests.fake_gpus.run my_workflow_....py --device cuda`.

With `torchrun` each rank has its own; what they send each other goes through gloo.
"""

import json
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tests.fake_gpus.machine import KIND, compiled_guard, start, waits

NAME = "NVIDIA RTX A6000"
"""What the driver calls each of them; the catalogue knows it."""
WAITS = "waits-rank{}.json"
"""File of a run's results with what the host would have waited for, by optimizer step."""


def become_a_machine_with_gpus() -> None:
    """Have libraries and this project find the fake GPUs where they look for NVIDIA's."""
    start(compiled_guard())
    count = torch.accelerator.device_count()
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    # Accelerate's, and the Trainer's, own way to a device that they do not know
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{KIND}:{rank}"
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # threads of the library's own do not see the fake GPUs
    from common.hardware import devices
    from common.runtime import rank as rank_room, world

    ours = {"gpus": lambda: ("fake", [NAME] * count), "device_name": _device_name}
    every = {torch.cuda: {"device_count": lambda: count}, devices: ours, rank_room: ours}
    world.BACKENDS["cuda"] = "gloo"
    if ranks > 1:  # Accelerate has gloo for ranks on CPUs alone
        world.DISTRIBUTED_TYPES["cuda"] = "MULTI_CPU"
        begin = PartialState.__init__

        def begin_with_gloo(self: PartialState, cpu: bool = False, **settings: Any) -> None:
            begin(self, cpu=True, **settings)
            send_by_gloo()

        PartialState.__init__ = begin_with_gloo
    count_waits()
    for module, values in every.items():
        for name, value in values.items():
            patch.object(module, name, value).start()


class WaitsByStep(TrainerCallback):
    """What the host waits for from the end of one optimizer step to that of the next, but for what reporting does."""

    def __init__(self) -> None:
        self.by_step: dict[int, list[str]] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        waits.operations = []

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.by_step[state.global_step], waits.operations = waits.operations, []

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        path = Path(args.output_dir).with_name(WAITS.format(os.environ.get("RANK", "0")))
        path.write_text(json.dumps(self.by_step))


def count_waits() -> None:
    """Have every loop write down what each of its steps waited for."""
    from common.training.loop import TrainingLoop

    made, reporting = TrainingLoop.__init__, TrainingLoop._reporting

    def with_counts(self: TrainingLoop, *given: Any, **settings: Any) -> None:
        made(self, *given, **settings)
        self.handler.add_callback(WaitsByStep())

    @contextmanager
    def without_counts(self: TrainingLoop) -> Iterator[None]:
        waits.counts = False
        with reporting(self):
            yield
        waits.counts = True

    TrainingLoop.__init__, TrainingLoop._reporting = with_counts, without_counts


def send_by_gloo() -> None:
    """Have the process group take tensors of fake GPUs; it is given those of the CPU that they wrap."""
    group = dist.distributed_c10d._get_default_group()
    gloo = group._get_backend(torch.device("cpu"))
    group._register_backend(torch.device(KIND), dist.ProcessGroup.BackendType.GLOO, gloo)


def _device_name(kind: str, local_rank: int) -> str:
    return f"{KIND if kind == 'cuda' else kind}:{local_rank}"


if __name__ == "__main__":
    become_a_machine_with_gpus()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.getcwd())
    runpy.run_path(sys.argv[0], run_name="__main__")
