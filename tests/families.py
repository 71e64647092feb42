"""Tiny models of the families that people bring, with random weights and the embedded base's tokenizer."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from common.models.loading import EMBEDDED_BASE

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}  # fmt: skip
"""Multiples of bitsandbytes' blocks of 64; two layers, one for each stage."""
GPT2_SIZES = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
FALCON_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT_SIZES = {"hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "word_embed_proj_dim": 64, "max_position_embeddings": 512}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class TinyFamily:
    """A family, by the `model_type` of its configs."""

    name: str
    model_type: str
    sizes: dict[str, int] = field(default_factory=lambda: SIZES, hash=False)
    chats: bool = True
    """Its published tokenizers have a chat template."""


FAMILIES = {
    each.model_type: each
    for each in (
        TinyFamily("Llama", "llama"),
        TinyFamily("Mistral", "mistral"),
        TinyFamily("Qwen2", "qwen2"),
        TinyFamily("Qwen3", "qwen3"),
        TinyFamily("Gemma 3", "gemma3_text"),
        TinyFamily("Phi-3, Phi-4", "phi3"),
        TinyFamily("SmolLM3", "smollm3"),
        TinyFamily("OLMo 2", "olmo2"),
        TinyFamily("Mixtral", "mixtral", {**SIZES, **EXPERTS}),
        TinyFamily("Qwen3-MoE", "qwen3_moe",
                   {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
        TinyFamily("gpt-oss", "gpt_oss", {**SIZES, **EXPERTS}),
        TinyFamily("GPT-2", "gpt2", GPT2_SIZES, chats=False),
        TinyFamily("OPT", "opt", OPT_SIZES, chats=False),
        TinyFamily("Falcon", "falcon", FALCON_SIZES, chats=False),
    )
}  # fmt: skip


def make_tiny(model_type: str, folder: Path) -> str:
    """Save a tiny model of the family with its tokenizer, and return the folder."""
    family, tokenizer = FAMILIES[model_type], AutoTokenizer.from_pretrained(EMBEDDED_BASE)
    config = AutoConfig.for_model(
        model_type, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None, **family.sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    if not family.chats:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return str(folder)
