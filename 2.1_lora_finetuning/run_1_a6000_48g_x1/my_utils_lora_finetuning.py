"""What only LoRA fine-tuning on one device needs: a batch, token by token, and TRL's trainer beside the loop."""

import pandas as pd
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from common.base.run_config import RunConfig
from common.data.rows import IGNORED_LABEL
from common.data.splits import tokenized
from common.measuring.beside import trained_beside
from common.models.trained_weights import add_lora
from common.runtime.recorder import Trial
from common.runtime.world import Rank
from common.training.optimizers import training_arguments
from common.training.steps import load


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


def train_by_trl(log: Trial) -> None:
    """Train the same adapters with TRL's SFTTrainer, which has the loop inside."""
    from transformers import PrinterCallback  # here, like TRL: it imports PEFT, which `common` is to come before
    from trl import SFTConfig, SFTTrainer

    model, tokenizer, data = load(log)
    rows = Dataset.from_list(list(tokenized(data, tokenizer, log.run).train))
    config = training_arguments(log.run, log.folder, keeps=False, kind=SFTConfig, max_length=None)
    adapted, told = add_lora(model, log.run), log.callbacks
    trainer = SFTTrainer(adapted, config, train_dataset=rows, processing_class=tokenizer, callbacks=told)
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def compare_with_trl(run: RunConfig, rank: Rank) -> pd.DataFrame:
    """Return losses, time and memory of this folder's loop, and of TRL's trainer."""
    from my_workflow_lora_finetuning import train  # here: a notebook imports that first

    return trained_beside(run, rank, {"this loop": lambda log: train(log, *load(log)), "SFTTrainer": train_by_trl})
