"""What a run will write, by its model's shape: refused before anything is loaded where the disk has no room for it."""

import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.hardware.devices import GIB
from common.models.loading import add_lora, train_own_weights
from common.planning.job import OPTIMIZER_BYTES
from common.training.placement import model_without_weights

CHECKPOINTS_AT_ONCE = 4
"""The best, the two newest, and the one that is being written (`CheckpointedTrainer._save_checkpoint`)."""


@dataclass(frozen=True)
class DiskNeed:
    """What a run writes, in bytes; records, logs and pictures, which are small, left out."""

    checkpoint_bytes: int
    checkpoints: int
    """There at the same time."""
    models_bytes: int
    """Saved at the end."""

    @property
    def total_bytes(self) -> int:
        """The most that is there at the same time."""
        return self.checkpoints * self.checkpoint_bytes + self.models_bytes

    def __str__(self) -> str:
        """For a sentence."""
        checkpoints = f"{self.checkpoints} checkpoints of {size_text(self.checkpoint_bytes)}"
        return f"{checkpoints} and {size_text(self.models_bytes)} of tuned models"


def size_text(byte_count: float) -> str:
    """Bytes for a reader, such as `14.2 GiB` or `4.0 MiB`."""
    gib = byte_count / GIB
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{gib * 1024:.1f} MiB"


def disk_need(run: RunConfig) -> DiskNeed:
    """What `run` writes, by the shape of its model.

    Raises:
        BadInputError: no shape is known of the model.
    """
    model = model_without_weights(run)
    saved_bytes = sum(weight.nbytes for weight in model.parameters())
    models_bytes = run.method.merged_models * saved_bytes
    with torch.random.fork_rng(devices=[]):  # adapters draw their start, which the run's own are to draw
        model = _with_trained_weights(model, run)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if run.method.has_adapters:  # checkpoints have adapters alone, and so has what is saved beside the merged model
        saved_bytes = sum(weight.nbytes for weight in trained)
        models_bytes += saved_bytes
    states = sum(weight.numel() * _state_bytes(run, weight.itemsize) for weight in trained)
    checkpoints = min(CHECKPOINTS_AT_ONCE, math.ceil(1 / run.eval_steps))
    return DiskNeed(saved_bytes + math.ceil(states), checkpoints, models_bytes)


def _with_trained_weights(model: PreTrainedModel, run: RunConfig) -> PreTrainedModel | PeftModel:
    if run.method.has_adapters:
        return add_lora(model, run)
    train_own_weights(model, run)
    return model


def _state_bytes(run: RunConfig, weight_bytes: int) -> float:
    """Of the optimizer, per trained weight; of one that the planner does not know, Adam's."""
    if run.parallelism.uses_deepspeed:
        return 3 * 4  # DeepSpeed's bf16 has momentum, variance and a copy of the weights in fp32
    known = OPTIMIZER_BYTES.get(run.optim)
    return 2 * weight_bytes if known is None else known


def check_disk(run: RunConfig) -> None:
    """Refuse a run whose checkpoints and models the disk of its results cannot hold.

    Raises:
        BadInputError: with what it needs, what is free, and what takes less.
    """
    try:
        need = disk_need(run)
    except BadInputError:  # of an unknown shape: writing a checkpoint looks at the space again
        return
    folder = run.results_folder("any")
    there = next(each for each in folder.parents if each.exists())
    free = shutil.disk_usage(there).free
    if free < need.total_bytes:
        fewer = ", or --eval_steps 0.5 for two checkpoints at a time" if need.checkpoints > 2 else ""
        raise BadInputError(
            f"This run would write up to {size_text(need.total_bytes)} ({need}), but {size_text(free)} are free in "
            f"{there}: make room there, or pass --results_root with a folder on another disk{fewer}."
        )


def check_room_to_save(run: RunConfig, folder: Path | None = None) -> None:
    """Refuse to save one model into `folder` (the system's temporary one), as a preflight does, without room for it.

    Raises:
        BadInputError: with its size and what is free.
    """
    folder = folder or Path(tempfile.gettempdir())
    try:
        size = sum(weight.nbytes for weight in model_without_weights(run).parameters())
    except BadInputError:
        return
    free = shutil.disk_usage(folder).free
    if not run.method.has_adapters and free < size:
        raise BadInputError(
            f"The preflight saves the model once, {size_text(size)}, but {size_text(free)} are free in {folder}: set "
            "TMPDIR to a folder on another disk."
        )
