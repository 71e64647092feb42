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
from common.training.loop import TrainingLoop
from common.training.usage import state_tensors


def resting(loop: TrainingLoop) -> dict[str, list[torch.Tensor]]:
    """Return what training keeps between steps on this rank, by part."""
    return {
        "weights": list(tensors_of(loop.model)),
        "optimizer": state_tensors(loop.optimizer),
        "buffers": loop.part.kept_buffers(),
    }


def count_steps(loop: TrainingLoop) -> None:
    """Count what saving, a step, and a batch of validation hold, with the longest rows; called on every rank."""
    memory, part = loop.log.memory, loop.part
    if loop.rank.device != "cpu":
        return
    batch = loop.batch_of([{**row, "row": 0} for row in _longest(loop.train_rows.rows, loop.run.rows_per_rank)])
    label_count = max(1, sum(map(loop.objective.labels_in, loop.train_rows.rows[:1])))
    with torch.random.fork_rng():
        part.back_propagate(batch, label_count)  # buffers of this shape are there from now on
        with memory.counting("saving", resting(loop)):
            pass
        with memory.counting(TRAINING, resting(loop)) as tracker:
            part.forget_gradients()
            handles = watch_gradients(loop.model, tracker)
            part.back_propagate(batch, label_count)
    for handle in handles:
        handle.remove()
    with memory.counting("validation", resting(loop)):
        part.forget_gradients()
        part.sums(loop.collated(_longest(loop.validation_rows, loop.args.per_device_eval_batch_size)))


def _longest(rows: list[Tokens], count: int) -> list[Tokens]:
    return heapq.nlargest(count, rows, key=tokens_in)
