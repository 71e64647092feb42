"""Text classification: full fine-tuning or LoRA, on one device, with DDP, PP or TP, at the same global batch.

From this folder:
    python my_workflow_text_classification.py --all
    python my_workflow_text_classification.py --technique lora --parallel ddp
    python my_workflow_text_classification.py --technique full --parallel pp --micro_batches 1 --schedule gpipe
    torchrun --standalone --nproc_per_node 2 my_workflow_text_classification.py --technique lora --parallel tp
    accelerate launch --config_file my_accelerate_config.yaml my_workflow_text_classification.py

`python` starts as many ranks as the setting has. A setting is this folder's run with (1) the technique's own recipe and
(2) the rows of a step given to the devices as the parallelism has it; the steps are the same for all.
"""

import sys
from functools import partial

from my_utils_text_classification import measure_parallelism, save_model, start_trainer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base.run_config import RunConfig
from common.checks.folder_runs import setting_of
from common.checks.inputs import check_inputs
from common.data.rows import Splits
from common.data.splits import load_splits
from common.data.texts import class_shares, say_balance, say_long_texts
from common.models.loading import load_base_model, load_tokenizer
from common.planning.device_maps import whole_model_on
from common.records.store import Record
from common.runtime.rank import rank_started
from common.runtime.recorder import RunRecorder
from common.tasks.classification import Classified, classify
from common.training.results import check_training, training_metrics
from common.training.trainer import AuditedTrainer
from common.variants import run_settings_from_command_line

RUN = RunConfig(
    task="classification",
    technique="full",
    parallel="ddp",
    run_folder="3.1_text_classification/run_1_a100_80g_x2",
    device="cuda",
    gpu="A100 80GB SXM",
    devices=2,
    model="FacebookAI/roberta-large",
    data="assets/visitor_messages",
    target_modules="all",
    max_length=128,
    per_device_train_batch_size=16,
    num_train_epochs=10,
    learning_rate=1e-5,
    warmup_steps=0.06,
    max_grad_norm=1.0,
    precision="bf16-mixed",
    eval_steps=0.05,
    per_device_eval_batch_size=64,
)
LORA = {"target_modules": "query,value", "num_train_epochs": 15, "learning_rate": 3e-4, "lora_alpha": 16}  # (1)
SETTINGS = [
    ["--technique", technique, "--parallel", *way]
    for technique in ("full", "lora")
    for way in (["single"], ["ddp"], ["pp", "--micro_batches", "1", "--schedule", "gpipe"], ["pp"], ["tp"])
]
"""What `--all` runs: one micro-batch is naive model parallel, as one stage works at a time."""

Tokenizer = PreTrainedTokenizerBase
Metrics = dict[str, object]
defaults_for = partial(setting_of, RUN, LORA)


def load_data(log: RunRecorder) -> tuple[Tokenizer, Splits]:
    """Tokenizer and rows; how uneven the classes are, and how many texts are too long, is said."""
    with log.phase("load data"):
        tokenizer, data = load_tokenizer(log.run), load_splits(log.run)
        if log.rank.is_main:
            print(say_balance(data))
            print(say_long_texts(data.train, tokenizer, log.run))
        return tokenizer, data


def evaluate_before(log: RunRecorder, tokenizer: Tokenizer, data: Splits) -> Classified:
    """The labels that the base finds with a head at its random start: chance."""
    with log.phase("baseline evaluation"):
        base = load_base_model(log.run, whole_model_on(log.rank.device))
        return classify(base, tokenizer, data.test, log, "before")


def build_trainer(log: RunRecorder, tokenizer: Tokenizer, data: Splits) -> AuditedTrainer:
    """The model, whole or this rank's part of it (2), with what is to be trained, and its trainer."""
    with log.phase("build trainer"):
        return start_trainer(log, tokenizer, data)


def train(log: RunRecorder, trainer: AuditedTrainer) -> Metrics:
    """Train, take the checkpoint with the highest validation accuracy, check what every rank did, and sum it up."""
    with log.phase("training"):
        trainer.train()
        world = check_training(trainer, log.rank)
    return training_metrics(trainer, world, log)


def measure(log: RunRecorder, trainer: AuditedTrainer) -> Metrics:
    """Measure what parallelism can bring on this machine, and where the rest goes."""
    if log.run.parallelism.is_single:
        return {}
    with log.phase("measure the sharing"):
        return measure_parallelism(log, trainer)


def save(log: RunRecorder, trainer: AuditedTrainer, tokenizer: Tokenizer) -> tuple[PreTrainedModel, dict[str, float]]:
    """Save the model (with LoRA the adapter, too) and load it as any user would: equal logits, or the run fails."""
    with log.phase("save and reload"):
        return save_model(log, trainer, tokenizer)


def evaluate_after(log: RunRecorder, tuned: PreTrainedModel, tokenizer: Tokenizer, data: Splits) -> Classified:
    """The labels that the tuned model finds in rows that had no part in training nor in choosing the checkpoint."""
    with log.phase("final evaluation"):
        return classify(tuned, tokenizer, data.test, log, "after")


def record(log: RunRecorder, data: Splits, before: Classified, after: Classified, **figures: object) -> Record:
    """The record of the run: what was asked, and all that was measured."""
    quality = {"before": before.summary(), "after": after.summary()}
    if log.rank.is_main:
        print(f"best validation accuracy: {figures['best_accuracy']:.4f}; the model: results/{log.folder.name}")
    return log.complete(quality=quality, class_shares=class_shares(data.train), **figures)


def workflow(run: RunConfig) -> Record:
    """The whole run, on this rank."""
    with rank_started(run) as rank:
        check_inputs(run)
        log = RunRecorder(run, rank)
        tokenizer, data = load_data(log)
        before = evaluate_before(log, tokenizer, data)
        trainer = build_trainer(log, tokenizer, data)
        trained = train(log, trainer)
        measured = measure(log, trainer)
        tuned, differences = save(log, trainer, tokenizer)
        after = evaluate_after(log, tuned, tokenizer, data)
        return record(log, data, before, after, **trained, **measured, largest_logit_differences=differences)


if __name__ == "__main__":
    run_settings_from_command_line(sys.modules[__name__])
