"""Preference tuning by DPO: LoRA or full fine-tuning, on one device or with DDP.

From this folder:
    python my_workflow_preference_tuning.py
    python my_workflow_preference_tuning.py --technique full
    python my_workflow_preference_tuning.py --technique lora --parallel ddp
    python my_workflow_preference_tuning.py --technique lora --exchange_answers
    python my_workflow_preference_tuning.py --all

`python` starts as many ranks as the setting has. A setting is this folder's run with (1) LoRA's own recipe and (2) the
pairs of a step given to the devices. Against 2.1: (3) rows are pairs of answers, whose loss is DPO's, (4) the given
answers are compared, beside the model's own.
"""

import sys
from functools import partial

from my_utils_preference_tuning import draw_log_probs, evaluate_preferences, find_reference
from transformers import PreTrainedModel

from common.base.run_config import RunConfig
from common.checks.folder_runs import setting_of
from common.checks.run_start import run_started
from common.data.rows import Splits
from common.launch import run_settings_from_command_line
from common.models.trained_weights import with_trained_weights
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.training.ddp import data_parallel, exchanging
from common.training.loop import TrainingLoop
from common.training.steps import Tokenizer, evaluate_after, evaluate_before, load, record, save, sum_up

RUN = RunConfig(
    task="preferences",
    technique="full",
    parallel="single",
    run_folder="3.4_preference_tuning/run_0_cpu_x1",
    model="assets/embedded_labeller",
    data="assets/preferences",
    max_length=128,
    num_train_epochs=1,
    learning_rate=2e-5,
    warmup_steps=0.05,
    max_grad_norm=1.0,
    eval_steps=0.2,
    per_device_eval_batch_size=60,
    max_new_tokens=40,
)
LORA = {"learning_rate": 4e-5, "lora_dropout": 0.0}  # (1)
# what `--all` runs
SETTINGS = [
    ["--technique", each, "--parallel", parallel] for each in ("full", "lora") for parallel in ("single", "ddp")
]

defaults_for = partial(setting_of, RUN, LORA)  # (2)


def train(log: RunRecorder, model: PreTrainedModel, tokenizer: Tokenizer, data: Splits) -> TrainingLoop:
    """Train by DPO's loss (`common.tasks.preferences.dpo_loss`), with DDP as in 2.2."""
    model = with_trained_weights(model, log.run)
    pairs = find_reference(log, model, tokenizer, data)
    with log.phase("build trainer"):
        replica = data_parallel(model, log.rank)
        loop = TrainingLoop(replica, tokenizer, pairs, log)
    with log.phase("training"):
        for step in loop.steps():
            for batch, is_last in step:
                with exchanging(replica, is_last):
                    (loop.loss(batch, step.label_count) * log.rank.world_size).backward()
            loop.update()
    return loop


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run, on this rank."""
    with run_started(run) as log:
        model, tokenizer, data = load(log)
        before = evaluate_before(log, tokenizer, data, evaluate_preferences, model)  # (4)
        loop = train(log, model, tokenizer, data)  # (3)
        trained = sum_up(loop)
        tuned, differences = save(log, loop, tokenizer)
        after = evaluate_after(log, tuned, tokenizer, data, partial(evaluate_preferences, reference=before))
        draw_log_probs(log, before, after)
        return record(log, before, after, **trained, largest_logit_differences=differences)


if __name__ == "__main__":
    run_settings_from_command_line(sys.modules[__name__])
