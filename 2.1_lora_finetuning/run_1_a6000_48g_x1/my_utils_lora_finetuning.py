"""What only LoRA fine-tuning on one device needs: its device map, and a look at one collated batch."""

import pandas as pd
import torch
from transformers import PreTrainedTokenizerBase

from common.data.rows import IGNORED_LABEL
from common.planning.device_maps import whole_model_on
from common.runtime.world import Rank


def device_map(rank: Rank) -> dict[str, str]:
    """Every layer on the one device."""
    return whole_model_on(rank.device)


def batch_table(batch: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase, row: int = 0) -> pd.DataFrame:
    """One row of a collated batch, token by token: its text, whether it is seen, and whether it is learnt.

    `batch` holds `input_ids`, `attention_mask` and `labels` of shape (rows, tokens).
    """
    ids, seen, labels = (batch[name][row].tolist() for name in ("input_ids", "attention_mask", "labels"))
    return pd.DataFrame({
        "token": [tokenizer.decode([token]) for token in ids],
        "id": ids,
        "attention": seen,
        "label": ["ignored" if label == IGNORED_LABEL else tokenizer.decode([label]) for label in labels],
    })  # fmt: skip
