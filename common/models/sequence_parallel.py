"""Sequence parallel (Ulysses): ranks share the tokens of each row, and in attention they share its heads instead.

Outside attention a token needs no other. Within it each rank exchanges its part of the tokens, with all heads, for a
part of the heads, with all tokens, and the results back (Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509).
"""

from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.models.separate_rows import separate_rows
from common.planning.architectures import sp_sizes
from common.runtime.rank import exchange_timeout

EXCHANGED_HEADS = "exchanged_heads"  # its name as an attention implementation


def divide_rows(model: PreTrainedModel | PeftModel, run: RunConfig) -> None:
    """Let attention exchange tokens for heads with the ranks that share this one's rows; called on every rank.

    `attend` returns the attention of this rank's tokens to those of all ranks, shape (1, tokens, heads, width). Query,
    key and value have shape (1, heads, tokens, width). `cu_seq_lens_q`: where the rows of all ranks' tokens begin and
    end; None: rows are whole on each rank, as where it answers questions.
    """
    if run.attention == "sdpa":
        separate_rows(model)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    name = base.config._attn_implementation
    attend_to_all = AttentionInterface()[name]
    group, _ = dist.new_subgroups(run.sp_size, timeout=exchange_timeout(run))  # of ranks that follow each other

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cu_seq_lens_q: torch.Tensor | None = None,
        **about: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if cu_seq_lens_q is None:
            return attend_to_all(module, query, key, value, attention_mask, **about)
        about |= {"cu_seq_lens_q": cu_seq_lens_q, "position_ids": None}  # those are of this rank's tokens alone
        query, key, value = tokens_for_heads(group, query, key, value)
        result, _ = attend_to_all(module, query, key, value, attention_mask, **about)
        return heads_for_tokens(group, result), None

    AttentionInterface.register(EXCHANGED_HEADS, attend)
    AttentionMaskInterface.register(EXCHANGED_HEADS, AttentionMaskInterface()[name])
    base.set_attn_implementation(EXCHANGED_HEADS)


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
        ctx.group = group
        return _sent(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradients of what this rank has sent."""
        return _sent(gradients, ctx.group), None


def _sent(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def check_divides_rows(model: torch.nn.Module) -> None:
    """Refuse a model that was to divide rows, but whose attention sees this rank's tokens alone."""
    if model.config._attn_implementation != EXCHANGED_HEADS:
        raise RuntimeError("Ranks share the tokens of each row (sp_size), but `divide_rows` was not called.")


def check_shares_heads(config: PretrainedConfig, ranks: int) -> None:
    """Refuse a model whose heads so many ranks cannot share evenly."""
    heads = config.get_text_config().num_attention_heads
    groups = getattr(config.get_text_config(), "num_key_value_heads", None) or heads
    possible = sp_sizes(heads, groups)[1:]
    if ranks > 1 and ranks not in possible:
        instead = f"pass --sp {', '.join(map(str, possible))}" if possible else "pass --parallel fsdp without --sp"
        raise BadInputError(
            f"sp_size is {ranks}, but so many ranks cannot share the model's {heads} attention heads and {groups} "
            f"key-value heads evenly: {instead}."
        )
