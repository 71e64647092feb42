"""Memory of training's phases on a CPU, where no allocator knows a peak: tensors are counted in a step of each.

The steps come after training, are not timed, and leave nothing behind. Loading is not counted: what libraries hold
while they load, and quantize, is another thing on a GPU.
"""

import heapq

import torch

from common.data.rows import Tokens, tokens_in
from common.models.shards import tensors_of
from common.planning.phases import TRAINING
from common.runtime.memory_tracker import watch_gradients
from common.runtime.recorder import PeakMemory
from common.training.trainer import AuditedTrainer
from common.training.usage import state_tensors


def resting(trainer: AuditedTrainer) -> dict[str, list[torch.Tensor]]:
    """Return what training keeps between steps on this rank, by part."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # without Accelerate's wrapper
    return {
        "weights": list(tensors_of(trainer.model)),
        "optimizer": state_tensors(optimizer),
        "buffers": trainer.kept_buffers(),
    }


def count_steps(trainer: AuditedTrainer, memory: PeakMemory) -> None:
    """Count what saving, a step, and a batch of validation hold, with the longest rows; called on every rank."""
    if memory.rank.device != "cpu":
        return
    rows = _longest(trainer.train_dataset, trainer.strategy.run.rows_per_rank)
    with torch.random.fork_rng():
        trainer.back_propagate(rows)  # buffers of this shape are there from now on
        with memory.counting("saving", resting(trainer)):
            pass
        with memory.counting(TRAINING, resting(trainer)) as tracker:
            trainer.forget_gradients()
            handles = watch_gradients(trainer.model, tracker)
            trainer.back_propagate(rows)
    for handle in handles:
        handle.remove()
    with memory.counting("validation", resting(trainer)):
        trainer.forget_gradients()
        trainer.validate(_longest(trainer.eval_dataset, trainer.args.per_device_eval_batch_size))


def _longest(rows: list[Tokens], count: int) -> list[Tokens]:
    return heapq.nlargest(count, rows, key=tokens_in)
