"""The training tools: each trains the same model on the same rows by the same recipe, as its users would set it up.

A tool's function returns when its clock says that the trial is over, or the epochs are.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments, set_seed
from trl import SFTConfig, SFTTrainer

from bench.clock import Clock
from bench.recipe import TrialOfEpochs, load_model
from common.checks.folder_training import trained_by_folder
from common.models.families import suited_to_model
from common.runtime.world import Rank

RECIPE = (
    "per_device_train_batch_size", "num_train_epochs", "learning_rate", "lr_scheduler_type", "warmup_steps",
    "weight_decay", "max_grad_norm", "seed",
)  # fmt: skip
# Tokens of a block of packed rows: those of about a batch, or at least of the longest row
PACKED_TOKENS = {"short": 512, "long": 1024}


def train_ours(clock: Clock) -> None:
    """The `train` of the technique's run folder: rows in random order, packed without padding."""
    run, material = suited_to_model(clock.trial.run), clock.material
    set_seed(run.seed)
    with tempfile.TemporaryDirectory() as folder:
        log = TrialOfEpochs(run, Rank(0, 1, "cpu", "python"), Path(folder), [clock])
        trained_by_folder(log, material.splits, material.tokenizer)


def trainer_settings(clock: Clock, folder: str) -> dict[str, Any]:
    """What every tool that is a Trainer is given: the recipe, and no work of its own beside training."""
    alone = {"save_strategy": "no", "logging_strategy": "no", "report_to": "none", "disable_tqdm": True}
    recipe = {name: getattr(clock.trial.run, name) for name in RECIPE}
    return {**recipe, **alone, "output_dir": folder, "use_cpu": True}


def train_trainer(clock: Clock, **settings: Any) -> None:
    """Transformers' Trainer; batches are padded to their longest row."""
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            load_model(clock.trial.run),
            args=TrainingArguments(**trainer_settings(clock, folder), **settings),
            train_dataset=clock.material.train,
            data_collator=DataCollatorForSeq2Seq(clock.material.tokenizer),
            callbacks=[clock],
        ).train()


def train_sft(clock: Clock, **settings: Any) -> None:
    """TRL's SFTTrainer, set as well as a user can on this machine: its defaults recompute, in bf16."""
    rows = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in clock.material.train]
    best = {"bf16": False, "gradient_checkpointing": False}
    with tempfile.TemporaryDirectory() as folder:
        SFTTrainer(
            load_model(clock.trial.run),
            args=SFTConfig(**{**trainer_settings(clock, folder), **best, **settings}),
            train_dataset=Dataset.from_list(rows),
            processing_class=clock.material.tokenizer,
            callbacks=[clock],
        ).train()


def train_sft_packed(clock: Clock) -> None:
    """The same with rows packed into blocks, as many rows a step as the others have.

    One block at a time: the rows of a step would be one sequence otherwise, whose attention scores PyTorch computes on
    a CPU although most are masked.
    """
    block, rows = PACKED_TOKENS[clock.trial.data], clock.trial.run.per_device_train_batch_size
    blocks = max(1, round(clock.material.train_tokens * rows / len(clock.material.train) / block))
    at_once = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": blocks}
    train_sft(clock, packing=True, max_length=block, **at_once)


def train_bare(clock: Clock) -> None:
    """A plain PyTorch loop over rows sorted by length; the order of the batches is shuffled in each epoch."""
    run = clock.trial.run
    model = load_model(run).train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=run.learning_rate, weight_decay=run.weight_decay)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / run.warmup_steps))
    rows = sorted(clock.material.train, key=lambda row: -len(row["input_ids"]))
    size = run.per_device_train_batch_size
    padded = DataCollatorForSeq2Seq(clock.material.tokenizer)
    batches = [padded(rows[start : start + size]) for start in range(0, len(rows), size)]
    shuffle = torch.Generator().manual_seed(run.seed)
    clock.start()
    for _ in range(int(run.num_train_epochs)):
        for number in torch.randperm(len(batches), generator=shuffle).tolist():
            model(**batches[number], use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, run.max_grad_norm)
            optimizer.step()
            warm_up.step()
            optimizer.zero_grad()
            if clock.step_done(model):
                return


GROUPED = {"train_sampling_strategy": "group_by_length"}
TOOLS: dict[str, Callable[[Clock], None]] = {
    "ours": train_ours,
    "sft-best": train_sft,
    "sft-grouped": partial(train_sft, **GROUPED),
    "sft-packed": train_sft_packed,
    "trainer": train_trainer,
    "trainer-grouped": partial(train_trainer, **GROUPED),
    "bare": train_bare,
}
