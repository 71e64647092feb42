"""The training tools: each trains the same model on the same rows by the same recipe, as its users would set it up.

A tool's function returns when its clock says that the trial is over, or the epochs are.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from bench.clock import Clock, ClockCallback
from bench.recipe import (
    MAX_GRAD_NORM,
    MOST_EPOCHS,
    SCHEDULER,
    WARMUP_STEPS,
    WEIGHT_DECAY,
    DataSet,
    TrialOfEpochs,
    base_folder,
    load_model,
    padded,
)
from common.models.trained_weights import train_linear_layers

PACKED_TOKENS: dict[DataSet, int] = {"short": 512, "long": 1024}
"""Tokens of a block of packed rows: those of about a batch, or at least of the longest row."""


def _trainer_settings(clock: Clock, folder: str) -> dict[str, Any]:
    """What every tool that is a Trainer is given: the recipe, and no work of its own beside training."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": clock.trial.batch_size,
        "num_train_epochs": MOST_EPOCHS,
        "learning_rate": clock.trial.learning_rate,
        "lr_scheduler_type": SCHEDULER,
        "warmup_steps": WARMUP_STEPS,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "seed": clock.trial.seed,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }


def _train_ours(clock: Clock, **settings: Any) -> None:
    from common.checks.folder_training import trained_by_folder
    from common.models.families import suited_to_model
    from common.runtime.world import Rank

    run, material = suited_to_model(replace(clock.trial.run_config(), **settings)), clock.material
    set_seed(run.seed)
    with tempfile.TemporaryDirectory() as folder:
        log = TrialOfEpochs(run, Rank(0, 1, "cpu", "python"), Path(folder), [ClockCallback(clock)])
        trained_by_folder(log, material.splits, material.tokenizer)


def train_ours(clock: Clock) -> None:
    """The `train` of the technique's run folder: rows in random order, end to end."""
    _train_ours(clock)


def train_ours_grouped(clock: Clock) -> None:
    """The same with rows of like length in one batch."""
    _train_ours(clock, train_sampling_strategy="group_by_length")


def _train_sft(clock: Clock, **settings: Any) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in clock.material.train]
    with tempfile.TemporaryDirectory() as folder:
        SFTTrainer(
            load_model(clock.trial.run_config()),
            args=SFTConfig(**{**_trainer_settings(clock, folder), **settings}),
            train_dataset=Dataset.from_list(rows),
            processing_class=clock.material.tokenizer,
            callbacks=[ClockCallback(clock)],
        ).train()


def train_sft_default(clock: Clock) -> None:
    """TRL's SFTTrainer with its defaults: bf16 and gradient checkpointing."""
    _train_sft(clock)


def train_sft_best(clock: Clock) -> None:
    """TRL's SFTTrainer, set as well as a user can on this machine."""
    _train_sft(clock, bf16=False, gradient_checkpointing=False)


def train_sft_grouped(clock: Clock) -> None:
    """The same with rows of like length in one batch."""
    _train_sft(clock, bf16=False, gradient_checkpointing=False, train_sampling_strategy="group_by_length")


def train_sft_packed(clock: Clock) -> None:
    """The same with rows packed into blocks, as many rows a step as the others have.

    One block at a time: the rows of a step would be one sequence otherwise, whose attention scores PyTorch computes on
    a CPU although most are masked.
    """
    block = PACKED_TOKENS[clock.trial.data]
    tokens_per_step = clock.material.train_tokens * clock.trial.batch_size / len(clock.material.train)
    _train_sft(
        clock,
        bf16=False,
        gradient_checkpointing=False,
        packing=True,
        max_length=block,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=max(1, round(tokens_per_step / block)),
    )


def _train_trainer(clock: Clock, **settings: Any) -> None:
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            load_model(clock.trial.run_config()),
            args=TrainingArguments(**_trainer_settings(clock, folder), **settings),
            train_dataset=clock.material.train,
            data_collator=DataCollatorForSeq2Seq(clock.material.tokenizer),
            callbacks=[ClockCallback(clock)],
        ).train()


def train_trainer(clock: Clock) -> None:
    """Transformers' Trainer; batches are padded to their longest row."""
    _train_trainer(clock)


def train_trainer_grouped(clock: Clock) -> None:
    """The same with rows of like length in one batch."""
    _train_trainer(clock, train_sampling_strategy="group_by_length")


def train_bare(clock: Clock) -> None:
    """A plain PyTorch loop over rows sorted by length; the order of the batches is shuffled in each epoch."""
    trial = clock.trial
    model = load_model(trial.run_config()).train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=trial.learning_rate, weight_decay=WEIGHT_DECAY)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / WARMUP_STEPS))
    rows = sorted(clock.material.train, key=lambda row: -len(row["input_ids"]))
    starts = range(0, len(rows), trial.batch_size)
    batches = [padded(rows[start : start + trial.batch_size]) for start in starts]
    shuffle = torch.Generator().manual_seed(trial.seed)
    clock.start()
    for _ in range(MOST_EPOCHS):
        for number in torch.randperm(len(batches), generator=shuffle).tolist():
            clock.step_begins(model, optimizer)
            model(**batches[number], use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, MAX_GRAD_NORM)
            optimizer.step()
            warm_up.step()
            optimizer.zero_grad()
            if clock.step_done(model):
                return


def train_llama_factory(clock: Clock) -> None:
    """LLaMA-Factory, set as well as a user can; it reads rows as tokens from its cache of them, and the base itself."""
    from datasets import Dataset, DatasetDict
    from llamafactory.train.tuner import run_exp
    from transformers import TrainerCallback

    class _LinearLayersOnly(TrainerCallback):
        def on_init_end(self, *args: object, model: torch.nn.Module, **kwargs: object) -> None:
            train_linear_layers(model)

    run = clock.trial.run_config()
    lora = {
        "finetuning_type": "lora",
        "lora_rank": run.lora_r,
        "lora_alpha": run.lora_alpha,
        "lora_dropout": run.lora_dropout,
        "use_rslora": True,
        "lora_target": "all",
    }
    is_lora = clock.trial.technique == "lora"
    with tempfile.TemporaryDirectory() as folder:
        DatasetDict({"train": Dataset.from_list(clock.material.train)}).save_to_disk(f"{folder}/tokens")
        run_exp(
            {
                **_trainer_settings(clock, f"{folder}/out"),
                **(lora if is_lora else {"finetuning_type": "full"}),
                "stage": "sft",
                "do_train": True,
                "model_name_or_path": str(base_folder(run)),
                "template": "empty",
                "dataset": "unused",
                "tokenized_path": f"{folder}/tokens",
                "flash_attn": "sdpa",
                "disable_gradient_checkpointing": True,
            },
            callbacks=[ClockCallback(clock), *([] if is_lora else [_LinearLayersOnly()])],
        )


TOOLS: dict[str, Callable[[Clock], None]] = {
    "ours": train_ours,
    "ours-grouped": train_ours_grouped,
    "sft-default": train_sft_default,
    "sft-best": train_sft_best,
    "sft-grouped": train_sft_grouped,
    "sft-packed": train_sft_packed,
    "trainer": train_trainer,
    "trainer-grouped": train_trainer_grouped,
    "llama-factory": train_llama_factory,
    "bare": train_bare,
}
