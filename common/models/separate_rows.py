"""Attention of rows packed without padding: each has its own, on CUDA by PyTorch's `varlen_attn`.

Transformers' SDPA attention separates them by a mask of all tokens times all tokens, which no flash kernel takes.
"""

from inspect import signature
from typing import Any

import torch
from peft import PeftModel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SEPARATE_ROWS = "separate_rows"  # its name as an attention implementation; rows that are padded have SDPA's with it
EXCHANGED_HEADS = "exchanged_heads"  # of 2.8, where ranks share rows and exchange tokens for heads
# decoders that are tested; of others some put more into the mask, which is not made here, than into the arguments
KINDS = {
    "gemma3_text", "gemma4_text", "gpt2", "llama", "ministral3", "mistral", "mixtral", "olmo2", "opt", "phi3", "qwen2",
    "qwen3", "qwen3_moe", "smollm3",
}  # fmt: skip
WIDEST_HEAD = 256  # that `varlen_attn` takes (aten/.../flash_attn/flash_api.cpp)
# before PyTorch 2.12 `varlen_attn` accepts grouped-query attention without `enable_gqa`
ASKED_TO_SHARE_HEADS = "enable_gqa" in signature(varlen_attn).parameters


def separates_rows(config: PretrainedConfig) -> bool:
    """Return whether a decoder's attention is told all that its mask would say, and mixes tokens nowhere else."""
    return config.get_text_config().model_type in KINDS


def separate_rows(model: PreTrainedModel | PeftModel) -> None:
    """Let a model that has SDPA attention take rows packed without padding; `without_mask` says how they are given."""
    AttentionInterface.register(SEPARATE_ROWS, attend_within_rows)
    AttentionMaskInterface.register(SEPARATE_ROWS, sdpa_mask)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    base.set_attn_implementation(SEPARATE_ROWS)


def without_mask(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a packed batch with a mask of four dimensions, which Transformers takes for a finished one.

    Without it the library looks for the rows in all tokens' positions, for which the CPU waits for the GPU.
    """
    return {**inputs, "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=inputs["input_ids"].device)}


def attend_within_rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return the causal attention of each row's tokens to those of its own row, shape (1, tokens, heads, width).

    Query, key and value have shape (1, heads, tokens, width). `cu_seq_lens_q`: where rows begin and end, shape
    (rows + 1,), int32; None: the rows are padded, and `attention_mask` is what `sdpa_mask` made of that.
    `max_length_q`: tokens of the longest row. `sliding_window`: how many tokens, its own included, each attends to.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if not dropout and _kernel_takes(query, value):
        # rotated under autocast, queries and keys are fp32
        tokens_first = (each.squeeze(0).transpose(0, 1).to(value.dtype) for each in (query, key, value))
        window = (sliding_window - 1 if sliding_window else -1, 0)  # none of the later tokens
        heads = {"enable_gqa": query.shape[1] != key.shape[1]} if ASKED_TO_SHARE_HEADS else {}
        about = {"scale": scaling, "window_size": window, **heads}
        borders = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        return varlen_attn(*tokens_first, *borders, **about).unsqueeze(0), None
    return _row_by_row(query, key, value, dropout, scaling, sliding_window, cu_seq_lens_q), None


@torch.compiler.disable  # it would be compiled anew for each number of rows
def _row_by_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    borders: torch.Tensor,
) -> torch.Tensor:
    lengths = borders.diff().tolist()
    heads_share = query.shape[1] != key.shape[1]
    results = []
    for of_row in zip(*(each.split(lengths, dim=2) for each in (query, key, value)), strict=True):
        mask = _window(of_row[0], sliding_window)
        # not Transformers' function around it, which takes a ninth of the attention's time with rows of 50 tokens
        results.append(
            scaled_dot_product_attention(
                *of_row, mask, dropout, is_causal=mask is None, scale=scaling, enable_gqa=heads_share
            )
        )
    return torch.cat(results, dim=2).transpose(1, 2)


def _kernel_takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    width = value.shape[-1]
    fits = query.shape[-1] == width <= WIDEST_HEAD and width % 8 == 0 and value.element_size() == 2
    return fits and query.is_cuda and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _window(query: torch.Tensor, size: int | None) -> torch.Tensor | None:
    """Return the mask of a row with more tokens than the window, shape (1, 1, tokens, tokens); None: causal."""
    length = query.shape[2]
    if size is None or length <= size:
        return None
    places = torch.arange(length, device=query.device)
    behind = places[:, None] - places
    return ((behind >= 0) & (behind < size))[None, None]
