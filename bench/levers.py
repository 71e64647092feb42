"""What may make a step on a GPU faster, each as a context to train in: trials of the bench, before the loop has it."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from common.models import chunked_loss, separate_rows
from common.planning import memory_plan, phases
from common.planning.gpu_overhead import memory_of_step
from common.training.loop import TrainingLoop

# Of a chunk, on a card with room for about 4 GiB of them: a head's product of 261 tokens (2^25 logits) is too thin
MANY_LOGITS = 2**28


def without_wait_for_norm() -> AbstractContextManager[Any]:
    """Start the update without a look at the gradients' norm, for which the host waits until all of them are there.

    A trial waits for the GPU after each step: what is gained from one step to the next is not seen.
    """
    return mock.patch.object(TrainingLoop, "_check_finite", _goes_on)


def _goes_on(*given: object) -> None:
    """Do nothing, and keep nothing that is given, as a mock would."""


@contextmanager
def many_logits_at_once() -> Iterator[None]:
    """Compute the loss in chunks of `MANY_LOGITS`, and plan it so."""
    with ExitStack() as patches:
        for module in (chunked_loss, memory_plan, phases):
            patches.enter_context(mock.patch.object(module, "LOGITS_AT_ONCE", MANY_LOGITS))
        memory_of_step.cache_clear()  # of plans with the other size
        patches.callback(memory_of_step.cache_clear)
        yield


@contextmanager
def cudnn_attention() -> Iterator[None]:
    """Attend to rows of one length as a batch, with cuDNN's kernel alone: it fails where it cannot be used."""
    with mock.patch.object(separate_rows, "attend_within_rows", attend_in_a_batch), sdpa_kernel(CUDNN):
        yield


# A CPU, on which parts are rehearsed, has no cuDNN
CUDNN = SDPBackend.CUDNN_ATTENTION if torch.cuda.is_available() else SDPBackend.MATH


def attend_in_a_batch(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return what `attend_within_rows` does, of rows that all have `max_length_q` tokens; arguments as there."""
    rows = (each.squeeze(0).unflatten(1, (-1, max_length_q)).transpose(0, 1) for each in (query, key, value))
    heads_share = query.shape[1] != key.shape[1]
    attended = scaled_dot_product_attention(*rows, is_causal=True, scale=scaling, enable_gqa=heads_share)
    return attended.transpose(1, 2).flatten(0, 1).unsqueeze(0), None


LEVERS = {
    "no wait for the norm": without_wait_for_norm,
    "2^28 logits at once": many_logits_at_once,
    "cuDNN's attention": cudnn_attention,
}


@contextmanager
def pulled(names: Sequence[str]) -> Iterator[None]:
    """Train with the levers of these names."""
    with ExitStack() as levers:
        for name in names:
            levers.enter_context(LEVERS[name]())
        yield
