"""Tiny models of the families that people bring, with random weights and a tokenizer of the assets."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer

from common.models.loading import EMBEDDED_BASE, EMBEDDED_SUMMARIZER
from common.models.real_models import minilm_folder

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}  # fmt: skip
"""Multiples of bitsandbytes' blocks of 64; two layers, one for each stage."""
GPT2_SIZES = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
FALCON_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT_SIZES = {"hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "word_embed_proj_dim": 64, "max_position_embeddings": 512}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
          "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 64.0, "original_max_position_embeddings": 8,
        "llama_4_scaling_beta": 0.1}  # fmt: skip
"""Queries grow with their places: as Ministral 3's, but from the eighth token on."""
GEMMA4_LAYERS = ["sliding_attention", "full_attention"]
GEMMA4 = {"num_hidden_layers": 4, "layer_types": 2 * GEMMA4_LAYERS, "num_kv_shared_layers": 2, "global_head_dim": 32,
          "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 1536,
          "final_logit_softcapping": 30.0}  # fmt: skip
"""As the small ones of the family: embeddings for each layer, and a second half that has no keys of its own."""
LARGER_START = {"initializer_range": 0.2}
"""As `tests.recipes.conftest.TINY` has it: with 0.02 a tiny encoder's classes are the same for every text."""
ENCODER_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 512,
                 **LARGER_START}  # fmt: skip
DISTILBERT_SIZES = {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4, **LARGER_START}
DEBERTA_V3 = {"relative_attention": True, "position_buckets": 32, "pos_att_type": ["p2c", "c2p"],
              "norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False,
              "type_vocab_size": 0}  # fmt: skip
"""What sets the third version apart, by the config.json of microsoft/deberta-v3-base."""
MODERNBERT = {"global_attn_every_n_layers": 2, "local_attention": 8, "cls_token_id": None, "sep_token_id": None}
BART_SIZES = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
              "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
              "max_position_embeddings": 256}  # fmt: skip
T5_SIZES = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
FLAN = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
"""By the config.json of google/flan-t5-base."""


@dataclass(frozen=True)
class TinyFamily:
    """A family, by the `model_type` of its configs, or by `key` where it shares that with another one."""

    name: str
    model_type: str
    sizes: dict[str, object] = field(default_factory=lambda: SIZES, hash=False)
    chats: bool = True
    """Its published tokenizers have a chat template."""
    key: str = ""


def by_key(families: Iterable[TinyFamily]) -> dict[str, TinyFamily]:
    return {family.key or family.model_type: family for family in families}


DECODERS = by_key(
    (
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
        TinyFamily("Ministral 3", "ministral3", {**SIZES, "rope_parameters": YARN}),
        TinyFamily("Gemma 4", "gemma4_text", {**SIZES, **GEMMA4}),
        TinyFamily("Qwen3.5", "qwen3_5_text", {**SIZES, **LINEAR}),
        TinyFamily("OLMo Hybrid", "olmo_hybrid", {**SIZES, **LINEAR}),
        TinyFamily("LFM2", "lfm2", {**SIZES, "layer_types": ["conv", "full_attention"], "block_multiple_of": 64}),
        TinyFamily("GPT-2", "gpt2", GPT2_SIZES, chats=False),
        TinyFamily("OPT", "opt", OPT_SIZES, chats=False),
        TinyFamily("Falcon", "falcon", FALCON_SIZES, chats=False),
    )
)  # fmt: skip
ENCODERS = by_key(
    (
        TinyFamily("BERT", "bert", ENCODER_SIZES),
        TinyFamily("RoBERTa", "roberta", ENCODER_SIZES),
        TinyFamily("XLM-RoBERTa", "xlm-roberta", ENCODER_SIZES),
        TinyFamily("DistilBERT", "distilbert", DISTILBERT_SIZES),
        TinyFamily("ELECTRA", "electra", {**ENCODER_SIZES, "embedding_size": 32}),
        TinyFamily("DeBERTa-v2, v3", "deberta-v2", {**ENCODER_SIZES, **DEBERTA_V3}),
        TinyFamily("ModernBERT", "modernbert", {**ENCODER_SIZES, **MODERNBERT}),
    )
)
ENCODER_DECODERS = by_key(
    (
        TinyFamily("BART", "bart", BART_SIZES),
        TinyFamily("mBART", "mbart", BART_SIZES),
        TinyFamily("Pegasus", "pegasus", BART_SIZES),
        TinyFamily("T5", "t5", T5_SIZES),
        TinyFamily("FLAN-T5, T5 1.1", "t5", {**T5_SIZES, **FLAN}, key="flan-t5"),
        TinyFamily("mT5", "mt5", {**T5_SIZES, **FLAN}),
    )
)
FAMILIES = {**DECODERS, **ENCODERS, **ENCODER_DECODERS}


def make_tiny(family: str, folder: Path, **changes: object) -> str:
    """Save a tiny model of the family with a tokenizer, and return the folder; an encoder has no head for labels.

    `changes`: of its config.
    """
    if family in ENCODERS:
        return _save(FAMILIES[family], folder, "AutoModelForMaskedLM", minilm_folder(), changes)
    if family in ENCODER_DECODERS:
        return _save(FAMILIES[family], folder, "AutoModelForSeq2SeqLM", EMBEDDED_SUMMARIZER, changes)
    return _save(FAMILIES[family], folder, "AutoModelForCausalLM", EMBEDDED_BASE, changes)


def _save(family: TinyFamily, folder: Path, auto_class: str, tokenizer_folder: Path, changes: dict[str, object]) -> str:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    start = {"decoder_start_token_id": tokenizer.pad_token_id} if auto_class == "AutoModelForSeq2SeqLM" else {}
    config = AutoConfig.for_model(
        family.model_type, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **{**start, **family.sizes, **changes},
    )  # fmt: skip
    torch.manual_seed(0)
    getattr(transformers, auto_class).from_config(config).save_pretrained(folder)
    if not family.chats:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return str(folder)
