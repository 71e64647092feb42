"""Whether a batch is padded, known from its copy on the host: Transformers would wait for the GPU to read its mask."""

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
    """Have forward passes take from a batch whether some row is padded; on a GPU or without values it says nothing."""
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
    if attention_mask is not None and is_padded:
        asked |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(attention_mask=None if is_padded is False else attention_mask, **asked)


AttentionMaskInterface.register("sdpa", sdpa_mask_of_known_padding)
