"""What only LoRA fine-tuning on one device needs to show: one collated batch, token by token."""

import pandas as pd
import torch
from transformers import PreTrainedTokenizerBase

from common.data.rows import IGNORED_LABEL


def batch_table(batch: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase, row: int = 0) -> pd.DataFrame:
    """Return one row of a collated batch, token by token: its text, whether it is attended to, and its label.

    `batch` holds `input_ids`, `attention_mask` and `labels` of shape (rows, tokens).
    """
    ids, seen, labels = (batch[name][row].tolist() for name in ("input_ids", "attention_mask", "labels"))
    return pd.DataFrame({
        "token": [tokenizer.decode([token]) for token in ids],
        "id": ids,
        "attention": seen,
        "label": ["ignored" if label == IGNORED_LABEL else tokenizer.decode([label]) for label in labels],
    })  # fmt: skip
