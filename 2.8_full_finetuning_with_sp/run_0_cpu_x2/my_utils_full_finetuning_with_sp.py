"""Sequence parallel (Ulysses): ranks share the tokens of each row, and in attention they share its heads instead.

Outside attention a token needs no other. Within it each rank exchanges its part of the tokens, with all heads, for a
part of the heads, with all tokens, and the results back (Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509).
"""

from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from common.base.run_config import RunConfig
from common.data.batches import lay_end_to_end
from common.data.rows import IGNORED_LABEL
from common.measuring.ceiling import median_step_s, slowest_s
from common.models.separate_rows import EXCHANGED_HEADS, attend_within_rows, separate_rows, without_mask
from common.runtime.rank import exchange_timeout
from common.training.answer_logits import Batch, PeftModel, tell_of_answers
from common.training.ddp import exchanging
from common.training.loop import TrainingLoop

STEPS = 8  # of a round, by which the upper bound is measured; fewer where they take long


def divide_rows(model: PreTrainedModel | PeftModel, run: RunConfig) -> None:
    """Let attention exchange tokens for heads with the ranks that share this one's rows; called on every rank."""
    group, _ = dist.new_subgroups(run.sp_size, timeout=exchange_timeout(run))  # of ranks that follow each other
    AttentionInterface.register(EXCHANGED_HEADS, partial(attend, group))
    AttentionMaskInterface.register(EXCHANGED_HEADS, sdpa_mask)
    model.set_attn_implementation(EXCHANGED_HEADS)


def attend(
    group: dist.ProcessGroup,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **about: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of this rank's tokens to those of all ranks, shape (1, tokens, heads, width).

    Query, key and value have shape (1, heads, tokens, width). `cu_seq_lens_q`: where the rows of all ranks' tokens
    begin and end; None: rows are whole on each rank, as where it answers questions.
    """
    if cu_seq_lens_q is None:
        return attend_within_rows(module, query, key, value, attention_mask, **about)
    of_heads = tokens_for_heads(group, query, key, value)
    result, _ = attend_within_rows(module, *of_heads, attention_mask, cu_seq_lens_q=cu_seq_lens_q, **about)
    return heads_for_tokens(group, result), None


def tokens_for_heads(
    group: dist.ProcessGroup, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Give away tokens, and get heads: from shape (1, heads, tokens / n, width) to (1, heads / n, tokens, width)."""
    ranks, (_, _, tokens, width) = group.size(), query.shape
    copies = max(1, ranks // key.shape[1])  # of grouped heads that are fewer than the ranks
    each = [query, *(shared.repeat_interleave(copies, dim=1) for shared in (key, value))]
    # rotated under autocast, queries and keys are fp32
    parts = [heads.to(value.dtype).view(ranks, -1, tokens, width) for heads in each]
    received = AllToAll.apply(torch.cat(parts, dim=1), group)  # (rank whose tokens they are, heads, its tokens, width)
    in_order = received.transpose(0, 1).reshape(1, -1, ranks * tokens, width)
    return in_order.split([part.shape[1] for part in parts], dim=1)


def heads_for_tokens(group: dist.ProcessGroup, result: torch.Tensor) -> torch.Tensor:
    """Give away heads, and get tokens: from shape (1, tokens, heads / n, width) to (1, tokens / n, heads, width)."""
    _, tokens, heads, width = result.shape
    received = AllToAll.apply(result.view(group.size(), -1, heads, width), group)  # (rank whose heads they are, tokens)
    return received.transpose(0, 1).reshape(1, tokens // group.size(), -1, width)


class AllToAll(torch.autograd.Function):
    """Send the n-th part along the first dimension to the group's rank n; gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return what all ranks have sent to this one, in their order; `parts` has shape (ranks, ...)."""
        ctx.group, parts = group, parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradients of what this rank has sent."""
        return AllToAll.forward(ctx, gradients, ctx.group), None


def summing(model: torch.nn.Module, is_last: bool) -> AbstractContextManager[object]:
    """Return a context for the passes of a batch: copies of the model sum gradients in the last one of a step alone."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(is_last)  # of sharded gradients; whole ones would take a model's memory
    return exchanging(model, is_last)


# -- how fast it can be on this machine


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
    rows_at_once = [[loop.train_rows[row] for row in rows] for rows in islice(loop.batches.global_batches(), STEPS)]
    own, replica = list(map(loop.batch_of, rows_at_once)), part.module
    whole = [tell_of_answers(without_mask(lay_end_to_end(rows)), model) for rows in rows_at_once]

    def step(batch: Batch) -> None:
        part.loss(batch, max(1, int((batch["labels"] != IGNORED_LABEL).sum()))).backward()

    def whole_rows_s(count: int) -> float:
        separate_rows(model)
        part.module = model
        return slowest_s(loop, whole[:count] if rank.is_main else [], step) / count

    def without_exchange_s(count: int) -> float:
        model.set_attn_implementation(EXCHANGED_HEADS)
        with patch.object(dist, "all_to_all_single", lambda received, sent, group: received.copy_(sent)):
            return slowest_s(loop, own[:count], step) / count

    def synchronised_s(count: int) -> float:
        part.module = replica
        return slowest_s(loop, own[:count], step) / count

    timed = (whole_rows_s, without_exchange_s, synchronised_s)
    with loop.log.phase("upper bound"), torch.random.fork_rng():
        one_s, alone_s, shared_s = median_step_s(timed, len(own))
    return {
        "strong": one_s / alone_s,
        "reached": alone_s / shared_s,
        "one_rank_global_batch_step_s": one_s,
        "all_ranks_share_step_s": alone_s,
        "synchronised_share_step_s": shared_s,
    }
