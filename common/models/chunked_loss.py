"""A loss without its whole logits: the head and the cross-entropy go over chunks of answer tokens.

2 x 4,096 tokens x 152,000 words of logits are 4.6 GiB in fp32, and a loss holds several such. Here a chunk's gradients
are computed right after its loss, before the next chunk's logits come (as in Liger-Kernel's fused cross-entropy).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
from peft import PeftModel
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from common.data.rows import IGNORED_LABEL
from common.planning.job import LOGITS_AT_ONCE

Head = Callable[[torch.Tensor], torch.Tensor]  # hidden states, shape (..., hidden size), to logits, (..., vocabulary)
# by which a family changes what comes out of its head (those that TRL's `add_fused_lm_head` knows)
SCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")
# encoder-decoders whose logits are what their head gives and an untrained bias; T5 has no model of the head's input
BART_LIKE = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "led", "marian", "mbart", "mvp", "pegasus", "plbart",
)  # fmt: skip


@dataclass
class _ChunkedOutput(ModelOutput):
    """The summed loss over `num_items_in_batch`; without gradients each position's, fp32, shape (rows, positions)."""

    loss: torch.Tensor | None = None
    token_losses: torch.Tensor | None = None


def takes_chunks(config: PretrainedConfig) -> bool:
    """Return whether a model's logits are what its head gives, and its loss is theirs alone."""
    if config.is_encoder_decoder:
        return config.model_type in BART_LIKE
    config = config.get_text_config()
    is_scaled = any(getattr(config, name, None) not in (None, 1, 1.0) for name in SCALED_LOGITS)
    return not is_scaled and not getattr(config, "output_router_logits", False)


def compute_loss_in_chunks(model: PreTrainedModel | PeftModel, in_training: bool = True) -> None:
    """Let a model that is given `shift_labels` compute its loss in chunks, a decoder at the positions `logits_to_keep`.

    Without `in_training` its own loss is used where gradients are enabled (Liger's kernels have chunks of their own).
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    head, whole = base.get_output_embeddings(), base.forward

    @wraps(type(base).forward)  # `generate` looks at the arguments
    def forward(
        self: PreTrainedModel,
        *args: Any,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> ModelOutput:
        if shift_labels is None:
            return whole(*args, **kwargs)
        if torch.is_grad_enabled() and not in_training:
            return whole(*args, shift_labels=shift_labels, num_items_in_batch=num_items_in_batch, **kwargs)
        kwargs.pop("labels", None)
        positions = kwargs.pop("logits_to_keep", None)
        hidden = self.base_model(*args, **{**kwargs, "use_cache": False}).last_hidden_state
        if positions is not None:
            hidden = hidden[:, positions.to(hidden.device)]
        losses = head(hidden, shift_labels)
        if not torch.is_grad_enabled():
            return _ChunkedOutput(losses.sum(), losses)
        divisor = (shift_labels != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
        return _ChunkedOutput((losses / divisor).to(shift_labels.device))

    base.forward = MethodType(forward, base)
    head.forward = losses_or_logits(base)


def losses_or_logits(base: PreTrainedModel) -> Callable[..., torch.Tensor]:
    """Return the forward pass of the model's head, which computes losses in chunks where it is given labels.

    All chunks are within one call: what gathers the head's weights (FSDP, ZeRO-3) does so as often on every rank.
    `in_backward`: losses and gradients come in the backward pass, and until then `hidden` alone is kept.
    """
    head, vocabulary = base.get_output_embeddings(), base.config.get_text_config().vocab_size
    own_forward = head.forward

    def logits_of(hidden: torch.Tensor) -> torch.Tensor:
        logits = own_forward(hidden)
        return logits + base.final_logits_bias if base.config.is_encoder_decoder else logits

    def forward(hidden: torch.Tensor, labels: torch.Tensor | None = None, in_backward: bool = False) -> torch.Tensor:
        if labels is None:
            return own_forward(hidden)
        if in_backward and torch.is_grad_enabled():
            # the reentrant kind calls this without gradients first: without a second implementation, sums of chunks
            # are in fp32 here, too
            return checkpoint(summed, hidden, labels, use_reentrant=True)
        tokens, targets = hidden.flatten(0, -2), labels.flatten()
        count = max(1, math.ceil(len(targets) * vocabulary / LOGITS_AT_ONCE))
        if torch.is_grad_enabled():
            trained = [weight for weight in head.parameters() if weight.requires_grad]  # FSDP has others here
            return _SummedLoss.apply(logits_of, count, targets, tokens, *trained)
        chunks = zip(tokens.tensor_split(count), targets.tensor_split(count), strict=True)
        return torch.cat([chunk_losses(logits_of, *chunk) for chunk in chunks]).view(labels.shape)

    def summed(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return forward(hidden, labels).sum()

    return forward


def chunk_losses(logits_of: Head, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return each token's loss in fp32, shape (tokens,), 0 without a label; on the head's device."""
    logits = logits_of(hidden).float()
    return cross_entropy(logits, labels.to(logits.device), ignore_index=IGNORED_LABEL, reduction="none")


class _SummedLoss(torch.autograd.Function):
    # its gradients are there with it: no logits are kept for them

    @staticmethod
    def forward(
        ctx: Any, logits_of: Head, count: int, labels: torch.Tensor, hidden: torch.Tensor, *trained: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros((), device=hidden.device)
        of_hidden = torch.empty_like(hidden)
        of_trained: list[torch.Tensor] = []
        parts = [each.tensor_split(count) for each in (hidden, labels, of_hidden)]
        for tokens, targets, of_tokens in zip(*parts, strict=True):
            with torch.enable_grad():
                tokens = tokens.detach().requires_grad_()
                loss = chunk_losses(logits_of, tokens, targets).sum()
            of_trained = _sums(of_trained, of_tokens, torch.autograd.grad(loss, [tokens, *trained]), count)
            total += loss.detach().to(total.device)
        ctx.gradients = [of_hidden, *of_trained]
        ctx.dtypes = [hidden.dtype, *(weight.dtype for weight in trained)]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # scaled only now: a token's share of a large step would be too small for fp16
        gradients = [
            gradient.mul_(of_loss.to(gradient.device)).to(dtype)
            for gradient, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
        ]
        del ctx.gradients
        return None, None, None, *gradients


def _sums(
    of_trained: list[torch.Tensor], of_tokens: torch.Tensor, gradients: tuple[torch.Tensor, ...], chunks: int
) -> list[torch.Tensor]:
    """Put a chunk's first gradient into `of_tokens`, add the others to the sums, and return these.

    Sums of several chunks are in fp32: in 16 bits they would lose what is small beside them. (A loop's names would hold
    the gradients while those of the next chunk come.)
    """
    of_tokens.copy_(gradients[0])
    if not of_trained:
        return [gradient.float() if chunks > 1 else gradient for gradient in gradients[1:]]
    return [before.add_(gradient) for before, gradient in zip(of_trained, gradients[1:], strict=True)]
