"""Models that ranks load in parts: what each holds meanwhile and afterwards, and that it computes as a whole one."""

from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from common.base.run_config import RunConfig
from common.models.loading import load_tokenizer
from common.models.shards import byte_count
from tests.unit.divided_worker import BERT, CASES, LLAMA
from tests.unit.ranks import found_by_ranks

NOISE = 12 * 2**20
"""Bytes that a process may allocate beside tensors while it loads."""


def save_models(folder: Path) -> int:
    """Write a decoder and an encoder, each much larger than the noise; return the bytes of their largest layer."""
    torch.manual_seed(0)
    tokenizer, widths = load_tokenizer(RunConfig()), {"hidden_size": 512, "intermediate_size": 2048}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=7, tie_word_embeddings=True, **widths, **heads)
    )
    bert = BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), num_hidden_layers=4, num_attention_heads=8, **widths))
    for model, name in ((llama, LLAMA), (bert, BERT)):
        model.save_pretrained(folder / name, max_shard_size="60MB")
        tokenizer.save_pretrained(folder / name)
    return max(byte_count(layer.parameters()) for layer in (llama.model.layers[0], bert.bert.encoder.layer[0]))


@pytest.mark.slow
def test_no_rank_ever_holds_more_than_its_part_and_a_layer_and_computes_as_one_device(tmp_path: Path) -> None:
    layer = save_models(tmp_path)
    found = found_by_ranks("divided_worker.py", 2, tmp_path)
    for case, of_ranks in found.items():
        for of_rank in of_ranks:
            assert of_rank["growth"] <= of_rank["held"] + layer + NOISE, (case, of_rank)
            assert max(of_rank["loaded"], of_rank["held"]) <= of_rank["whole"] / 2 + layer, (case, of_rank)
            assert all(of_rank[name] for name in ("drawn alike", "names", "trained", "buffers")), (case, of_rank)
            assert of_rank["logits"] <= (0 if "tp" not in case else 1e-5), (case, of_rank)
            assert of_rank["gradients"] < 1e-5, (case, of_rank)
    assert found.keys() == CASES.keys()
