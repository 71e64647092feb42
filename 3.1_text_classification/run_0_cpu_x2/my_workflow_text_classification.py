r"""Text classification: full fine-tuning or LoRA, on one device, with DDP, PP or TP, at the same global batch.

From this folder:
    python my_workflow_text_classification.py --all
    python my_workflow_text_classification.py --technique lora --parallel ddp
    python my_workflow_text_classification.py --technique full --parallel pp --micro_batches 1 --schedule gpipe
    torchrun --nproc_per_node 2 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_text_classification.py --technique lora --parallel tp
    accelerate launch --config_file my_accelerate_config.yaml my_workflow_text_classification.py

`python` starts as many ranks as the setting has. A setting is this folder's run with (1) the technique's own recipe and
(2) the rows of a step given to the devices as the parallelism has it; the steps are the same for all.
"""

import sys
from functools import partial

from my_utils_text_classification import (
    class_shares,
    classify,
    measure,
    save,
    train_columns,
    train_replicas,
    train_stages,
)

from common.base.run_config import RunConfig
from common.checks.folder_runs import setting_of
from common.checks.run_start import run_started
from common.data.rows import Splits
from common.data.splits import load_splits
from common.data.texts import say_balance, say_long_texts
from common.launch import run_settings_from_command_line
from common.models.loading import load_tokenizer
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.training.loop import TrainingLoop
from common.training.steps import Tokenizer, evaluate_after, evaluate_before, record, sum_up

RUN = RunConfig(
    task="classification",
    technique="full",
    parallel="ddp",
    run_folder="3.1_text_classification/run_0_cpu_x2",
    devices=2,
    model="all-minilm-l6-v2",
    data="assets/visitor_messages",
    target_modules="all",
    max_length=128,
    per_device_train_batch_size=32,
    num_train_epochs=3,
    learning_rate=2e-4,
    warmup_steps=0.1,
    max_grad_norm=1.0,
    eval_steps=0.2,
    per_device_eval_batch_size=50,
)
LORA = {"target_modules": "query,value", "num_train_epochs": 4, "learning_rate": 2e-3, "lora_alpha": 16}  # (1)
# what `--all` runs: one micro-batch is naive model parallel, as one stage works at a time
SETTINGS = [
    ["--technique", technique, "--parallel", *parallel]
    for technique in ("full", "lora")
    for parallel in (["single"], ["ddp"], ["pp", "--micro_batches", "1", "--schedule", "gpipe"], ["pp"], ["tp"])
]

defaults_for = partial(setting_of, RUN, LORA)


def load_data(log: RunRecorder) -> tuple[Tokenizer, Splits]:
    """Load tokenizer and rows, and print how uneven the classes are, and how many texts are too long."""
    with log.phase("load data"):
        tokenizer, data = load_tokenizer(log.run), load_splits(log.run)
        if log.rank.is_main:
            print(say_balance(data))
            print(say_long_texts(data.train, tokenizer, log.run))
        return tokenizer, data


def train(log: RunRecorder, tokenizer: Tokenizer, data: Splits) -> TrainingLoop:
    """Train as the run's parallelism has it."""
    if log.run.parallelism.pipelines:
        return train_stages(log, tokenizer, data)
    return (train_columns if log.run.parallelism.splits_matrices else train_replicas)(log, tokenizer, data)


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run, on this rank; before training the head is random, and the base's labels are chance."""
    with run_started(run) as log:
        tokenizer, data = load_data(log)
        before = evaluate_before(log, tokenizer, data, classify)
        loop = train(log, tokenizer, data)
        trained = sum_up(loop)
        measured = measure(loop)
        tuned, differences = save(log, loop, tokenizer)
        after = evaluate_after(log, tuned, tokenizer, data, classify)
        if log.rank.is_main:
            print(f"best validation accuracy: {trained['best_accuracy']:.4f}; the model: results/{log.folder.name}")
        figures = {**trained, **measured, "largest_logit_differences": differences}
        return record(log, before, after, class_shares=class_shares(data.train), **figures)


if __name__ == "__main__":
    run_settings_from_command_line(sys.modules[__name__])
