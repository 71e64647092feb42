"""What recipes share: tiny models at their random start, for what must be equal and need not be good."""

import pytest
import torch
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaModel,
)

from common.minilm import minilm_folder
from common.run_config import REPOSITORY

BASE = REPOSITORY / "assets" / "embedded_base"
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
"""Of matrices that 4 bits can hold in whole blocks of 64; two layers, for two stages."""
TINY_ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(scope="session")
def tiny_chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama with tied embeddings, with the embedded base's tokenizer and chat template."""
    torch.manual_seed(0)
    tokenizer, folder = AutoTokenizer.from_pretrained(BASE), tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **TINY,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny BERT and a tiny RoBERTa without heads, each with MiniLM's tokenizer; by their kind, the folder."""
    tokenizer, folders = AutoTokenizer.from_pretrained(minilm_folder()), {}
    for kind, config_class, model_class in (("bert", BertConfig, BertModel), ("roberta", RobertaConfig, RobertaModel)):
        torch.manual_seed(0)
        config = config_class(vocab_size=len(tokenizer), pad_token_id=0, **TINY_ENCODER, **NO_DROPOUT)
        folder = tmp_path_factory.mktemp(kind)
        model_class(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders[kind] = str(folder)
    return folders


@pytest.fixture(scope="session")
def tiny_models(tiny_chat_model: str, encoders: dict[str, str], tiny_summarizer: str) -> dict[str, str]:
    """By task, the folder of a tiny model."""
    return {"chat": tiny_chat_model, "classification": encoders["bert"], "summarization": tiny_summarizer}
