"""Reinforcement learning by GRPO, with a reward that a rule computes: LoRA or full fine-tuning, one device or DDP.

From this folder:
    python my_workflow_reinforcement_learning.py
    python my_workflow_reinforcement_learning.py --technique full
    python my_workflow_reinforcement_learning.py --parallel ddp
    python my_workflow_reinforcement_learning.py --reward_weights -1
    python my_workflow_reinforcement_learning.py --all

`python` starts as many ranks as the setting has. A setting is this folder's run with (1) LoRA's own recipe and (2) the
answers of a step given to the devices. Against 3.4: (3) the model itself answers, (4) a rule scores the answers.
"""

import sys
from functools import partial

import torch
from my_utils_reinforcement_learning import (
    advantages_in_groups,
    batches_to_learn,
    evaluate_rewards,
    log_probs_of,
    note_rewards,
    reference_log_probs,
    reference_of,
    sample_groups,
    sum_up,
    vllm_of,
)
from transformers import PreTrainedModel

from common.base.run_config import RunConfig
from common.checks.folder_runs import setting_of
from common.checks.run_start import run_started
from common.data.rows import Splits
from common.launch import run_settings_from_command_line
from common.models.trained_weights import with_trained_weights
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.tasks.scoring import rewards_of
from common.training.answer_logits import Batch
from common.training.ddp import data_parallel, exchanging
from common.training.loop import TrainingLoop
from common.training.steps import Tokenizer, evaluate_after, evaluate_before, load, record, save

RUN = RunConfig(
    task="rewards",
    technique="full",
    parallel="single",
    run_folder="3.5_reinforcement_learning/run_0_cpu_x1",
    model="assets/embedded_labeller",
    data="assets/preferences",
    reward="my_utils_reinforcement_learning:names_without_year",
    num_generations=8,
    beta=0.0,
    per_device_train_batch_size=64,
    max_length=88,
    max_new_tokens=40,
    max_steps=60,
    learning_rate=1e-4,
    warmup_steps=5,
    max_grad_norm=1.0,
    weight_decay=0.0,
    eval_steps=0.25,
    per_device_eval_batch_size=64,
)
LORA = {"learning_rate": 5e-5, "lora_dropout": 0.0}  # (1)
# what `--all` runs
SETTINGS = [
    ["--technique", each, "--parallel", parallel] for each in ("full", "lora") for parallel in ("single", "ddp")
]

defaults_for = partial(setting_of, RUN, LORA)  # (2)


def policy_loss(now: torch.Tensor, batch: Batch, run: RunConfig) -> torch.Tensor:
    """Return GRPO's loss of a batch's answers; `now` are log-probabilities of tokens, shape (answers, tokens).

    Shao et al. 2024, "DeepSeekMath", section 4.1. The divergence is Schulman's estimator, which is never negative,
    times the ratio, so that its gradient is right, too (DeepSeek-V3.2 2025, section 3.1).
    """
    ratio = (now - batch["before"]).exp()
    clipped = ratio.clamp(1 - run.epsilon, 1 + run.epsilon)
    gain = torch.min(ratio * batch["advantages"], clipped * batch["advantages"])
    if run.beta:
        behind = batch["reference"] - now
        gain = gain - run.beta * ratio * (behind.exp() - behind - 1)
    return -(gain * batch["weights"]).sum()


def train(log: RunRecorder, model: PreTrainedModel, tokenizer: Tokenizer, data: Splits) -> TrainingLoop:
    """Train by GRPO, with DDP as in 2.2: each step learns from what the model has answered just before."""
    run, model = log.run, with_trained_weights(model, log.run)
    with log.phase("build trainer"):
        replica = data_parallel(model, log.rank)
        loop = TrainingLoop(replica, tokenizer, data, log)
        reference, vllm = reference_of(model, run), vllm_of(loop)
    with log.phase("training"):
        for step in loop.steps():
            ((prompts, _),) = step  # one batch
            answers = sample_groups(loop, prompts, vllm)  # (3)
            rewards = rewards_of(answers, run)  # (4)
            note_rewards(loop, answers, rewards)
            batches = batches_to_learn(loop, answers, advantages_in_groups(rewards, run.num_generations))
            for _ in range(run.num_iterations):
                for batch, is_last in batches:
                    if run.beta and "reference" not in batch:
                        batch["reference"] = reference_log_probs(loop, reference, batch)
                    with exchanging(replica, is_last):
                        now = log_probs_of(loop, replica, batch)
                        batch.setdefault("before", now.detach())  # of the model that answered
                        loss = policy_loss(now, batch, run)  # weighted: a step's batches add up to its mean
                        loop.add_loss(loss / run.num_iterations)
                        loop.scaler.scale(loss * log.rank.world_size).backward()  # DDP divides by the ranks
                loop.update()
    return loop


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run, on this rank."""
    with run_started(run) as log:
        model, tokenizer, data = load(log)
        before = evaluate_before(log, tokenizer, data, evaluate_rewards, model)
        loop = train(log, model, tokenizer, data)
        trained = sum_up(loop)
        tuned, differences = save(log, loop, tokenizer)
        after = evaluate_after(log, tuned, tokenizer, data, evaluate_rewards)
        return record(log, before, after, **trained, largest_logit_differences=differences)


if __name__ == "__main__":
    run_settings_from_command_line(sys.modules[__name__])
