"""Models of many equal layers, at their random start, beside which embeddings and one layer are little."""

import string
from pathlib import Path

import torch
from transformers import AutoTokenizer, BertConfig, BertModel, BertTokenizer, LlamaConfig, LlamaForCausalLM

from tests.fixtures import NO_DROPOUT
from tests.recipes.folders import BASE

LAYERS = 12
FILE_SIZE = "100MB"
"""Of a model's files: a large one has several."""


def save_deep_decoder(folder: Path, **shape: int) -> None:
    """Write a Llama with the embedded base's tokenizer and chat template; `shape` are its config's sizes."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=512, num_hidden_layers=LAYERS, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **shape,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=FILE_SIZE)
    tokenizer.save_pretrained(folder)


def save_deep_encoder(folder: Path, **shape: int) -> None:
    """Write a BERT whose tokens are letters: of a large vocabulary each rank of tensor parallel would hold all rows."""
    letters = string.ascii_lowercase + string.digits + string.punctuation
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    config = BertConfig(
        vocab_size=len(tokens), max_position_embeddings=64, pad_token_id=0, num_hidden_layers=LAYERS, **NO_DROPOUT,
        **shape,
    )  # fmt: skip
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder, max_shard_size=FILE_SIZE)
    BertTokenizer(vocab={token: number for number, token in enumerate(tokens)}).save_pretrained(folder)
