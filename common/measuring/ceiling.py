"""The upper bound that a machine sets on any speed-up by data-parallel ranks, measured beside the speed-up itself."""

import time
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from itertools import islice
from statistics import median

import torch
from accelerate.utils import gather_object, wait_for_everyone

from common.data.rows import IGNORED_LABEL
from common.training.answer_logits import Batch
from common.training.loop import TrainingLoop
from common.training.optimizers import make_optimizer

MOST_S = 60  # of the rounds together


def measure_machine_ceiling(
    loop: TrainingLoop,
    model: torch.nn.Module | None = None,
    replica: torch.nn.Module | None = None,
    steps: int = 8,
    rounds: int = 3,
) -> dict[str, float]:
    """Measure how much faster this machine's ranks are than one when they need not agree: the most that DDP can reach.

    Times bare steps on the same rows in turn: rank 0 with the global batch, rank 0 with its share, and all ranks with
    theirs, without synchronising; with `replica`, DDP's own module, also with it. Trained weights are put back
    afterwards. `model` stands in for the loop's own, where that is divided. A round has fewer `steps` where all rounds
    would take more than about `MOST_S` seconds, at least one.

    Returns:
        `strong`: time of one rank with the global batch over time of all ranks, each with its share.
        `weak`: rows per second of all ranks over rows per second of one, at the same rows per rank.
        The seconds per step of each (medians of the rounds).
        With a `replica`, `reached`: the share of the upper bound that is left with synchronization.
    """
    model, rank, part = (model or loop.model).train(), loop.rank, copy(loop.part)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    before = [weight.detach().clone() for weight in trained]
    optimizer = make_optimizer(model, loop.run)
    at_once = list(islice(loop.batches.global_batches(), steps))
    wholes = [_batch(loop, rows) for rows in at_once]
    shares = [_batch(loop, loop.batches.own(rows)) for rows in at_once]
    timed = {
        "one_rank_global_batch_step_s": (model, wholes if rank.is_main else []),
        "one_rank_share_step_s": (model, shares if rank.is_main else []),
        "all_ranks_share_step_s": (model, shares),
    }
    if replica is not None:
        timed["synchronised_share_step_s"] = (replica, shares)

    def step(batch: Batch) -> None:
        part.loss(batch, int((batch["labels"] != IGNORED_LABEL).sum())).backward()
        optimizer.step()
        optimizer.zero_grad()

    def step_s(module: torch.nn.Module, batches: list[Batch], count: int) -> float:
        part.module = module
        return slowest_s(loop, batches[:count], step) / count

    of_each = [partial(step_s, *each) for each in timed.values()]
    times_s = dict(zip(timed, median_step_s(of_each, len(at_once), rounds), strict=True))
    with torch.no_grad():
        torch._foreach_copy_(trained, before)
    one_global_s, one_share_s, all_shares_s, *synchronised_s = times_s.values()
    return {
        **({"reached": all_shares_s / synchronised_s[0]} if synchronised_s else {}),
        "strong": one_global_s / all_shares_s,
        "weak": rank.world_size * one_share_s / all_shares_s,
        **times_s,
    }


def median_step_s(timed: Sequence[Callable[[int], float]], steps: int, rounds: int = 3) -> list[float]:
    """Return the median seconds of a step of each, timed in turn.

    Each is called with a number of steps, `steps`, or fewer where all rounds would take more than about `MOST_S`.
    """
    first_s = sum(each(1) for each in timed)  # memory that is new to a process costs its first step much
    count = max(1, min(steps, int(MOST_S / rounds / first_s)))
    taken_s = [[each(count) for each in timed] for _ in range(rounds)]
    return list(map(median, zip(*taken_s, strict=True)))


def slowest_s(loop: TrainingLoop, batches: list[Batch], work: Callable[[Batch], object]) -> float:
    """Return the seconds that the slowest rank takes to `work` on its `batches`, begun together."""
    wait_for_everyone()
    start_s = time.perf_counter()
    for batch in batches:
        work(batch)
    if loop.rank.device != "cpu":
        torch.accelerator.synchronize()
    taken_s = time.perf_counter() - start_s
    loop.optimizer.zero_grad()
    return max(gather_object([taken_s]))


def _batch(loop: TrainingLoop, rows: list[int]) -> Batch:
    return loop.batch_of([loop.train_rows[row] for row in rows])
