"""What only sequence parallel needs: how fast ranks that share rows can be on this machine."""

from itertools import islice
from statistics import median
from unittest.mock import patch

import torch
import torch.distributed as dist

from common.data.batches import lay_end_to_end
from common.data.rows import IGNORED_LABEL
from common.measuring.ceiling import slowest_s
from common.models.separate_rows import separate_rows, without_mask
from common.models.sequence_parallel import divide_rows
from common.training.answer_logits import Batch, tell_of_answers
from common.training.loop import TrainingLoop

STEPS, ROUNDS = 2, 3


def measure_ceiling(loop: TrainingLoop) -> dict[str, float] | None:
    """Measure how much faster ranks that share rows are than one rank with whole rows, and could be at most.

    Times bare passes of the same rows in turn: rank 0 with all tokens; all ranks with their parts, without a word to
    each other (a copy stands in for each exchange); and as in training. On CPU, of replicas that all share one batch.

    Returns:
        `strong`: time of one rank with all tokens over time of all ranks without exchanges; the seconds of each;
        `reached`: the share of that upper bound that is left with exchanges.
    """
    run, rank, model, part = loop.run, loop.rank, loop.model, loop.part
    if run.device != "cpu" or not run.parallelism.replicates or run.data_parallel_ranks > 1 or run.sp_size == 1:
        return None
    at_once = [[loop.train_rows[row] for row in rows] for rows in islice(loop.batches.global_batches(), STEPS)]
    own, replica = list(map(loop.batch_of, at_once)), part.module
    whole = [tell_of_answers(without_mask(lay_end_to_end(rows)), model) for rows in at_once] if rank.is_main else []

    def step(batch: Batch) -> None:
        part.loss(batch, max(1, int((batch["labels"] != IGNORED_LABEL).sum()))).backward()

    def whole_rows_s() -> float:
        separate_rows(model)
        part.module = model
        return slowest_s(loop, whole, step)

    def without_exchange_s() -> float:
        divide_rows(model, run)
        with patch.object(dist, "all_to_all_single", lambda received, sent, group: received.copy_(sent)):
            return slowest_s(loop, own, step)

    def synchronised_s() -> float:
        part.module = replica
        return slowest_s(loop, own, step)

    timed = (whole_rows_s, without_exchange_s, synchronised_s)
    with loop.log.phase("upper bound"), torch.random.fork_rng():
        rounds = [[each() / len(at_once) for each in timed] for _ in range(ROUNDS + 1)]
    one_s, alone_s, synchronised = map(median, zip(*rounds[1:], strict=True))  # in the first one memory is new
    return {
        "strong": one_s / alone_s,
        "reached": alone_s / synchronised,
        "one_rank_global_batch_step_s": one_s,
        "all_ranks_share_step_s": alone_s,
        "synchronised_share_step_s": synchronised,
    }
