"""What recipes share: tiny models at their random start, for what must be equal and need not be good."""

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
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
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "initializer_range": 0.1}  # fmt: skip
"""Of matrices that 4 bits can hold in whole blocks of 64; two layers, for two stages. With the libraries' own 0.02 for
the weights nearly all would go past layers of this size, and a mistake in them would hardly be seen."""
TINY_ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
                "initializer_range": 0.2}  # fmt: skip
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
def strong_summarizer(tmp_path_factory: pytest.TempPathFactory, tiny_summarizer: str) -> str:
    """The tiny BART with weights as large as the other tiny models have, for the same reason."""
    model, folder = AutoModelForSeq2SeqLM.from_pretrained(tiny_summarizer), tmp_path_factory.mktemp("strong-bart")
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module is not model.lm_head:
                module.weight *= TINY_ENCODER["initializer_range"] / model.config.init_std
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_summarizer).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_models(tiny_chat_model: str, encoders: dict[str, str], strong_summarizer: str) -> dict[str, str]:
    """By task, the folder of a tiny model; and by its name, of another one."""
    of_tasks = {"chat": tiny_chat_model, "classification": encoders["bert"], "summarization": strong_summarizer}
    return {**of_tasks, "roberta": encoders["roberta"]}
