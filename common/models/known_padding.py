"""Attention masks without a wait for the GPU: whether a batch is padded is known on the host, from its own copy.

Transformers reads it from the mask on the GPU in every forward pass, for which the host waits.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils import is_tracing

_is_padded: ContextVar[bool | None] = ContextVar("is_padded", default=None)


@contextmanager
def padding_known(batch: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Have forward passes take from a batch on the host whether some row of theirs is padded.

    A batch that is on a GPU (or has no values) says nothing.
    """
    masks = [tensor for name, tensor in batch.items() if name.endswith("attention_mask")]
    is_on_host = bool(masks) and all(mask.device.type == "cpu" and not is_tracing(mask) for mask in masks)
    before = _is_padded.set(not all(bool(mask.all()) for mask in masks) if is_on_host else None)
    try:
        yield
    finally:
        _is_padded.reset(before)


def sdpa_mask_of_known_padding(*, attention_mask: torch.Tensor | None = None, **asked: Any) -> torch.Tensor | None:
    """Return Transformers' own mask for SDPA, or None where attention needs none; see `sdpa_mask`."""
    is_padded = _is_padded.get()
    if attention_mask is None or is_padded is None:
        return sdpa_mask(attention_mask=attention_mask, **asked)
    if not is_padded:
        return sdpa_mask(attention_mask=None, **asked)
    never_skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(attention_mask=attention_mask, **{**asked, **never_skips})


AttentionMaskInterface.register("sdpa", sdpa_mask_of_known_padding)
