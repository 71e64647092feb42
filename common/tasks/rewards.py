"""What a model learns from its own answers by a reward: prompts as batches, validation, and the memory of a step."""

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase as Tokenizer

from common.base.run_config import RunConfig
from common.data.batches import Collate
from common.data.rows import IGNORED_LABEL, Tokens
from common.tasks.objectives import REWARD, VALIDATION_LOSS, Objective
from common.tasks.preferences import prepare_for_log_probs, token_log_probs
from common.tasks.sampling import answers_to
from common.tasks.scoring import rewards_of


def _prompt_collator(tokenizer: Tokenizer, *_: object) -> Collate:
    """Return a collator of prompts: padded, with their rows and the tokenizer, as they are to be answered."""

    def collate(rows: list[Tokens]) -> dict[str, Any]:
        inputs = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in rows]
        batch = tokenizer.pad(inputs, padding_side="right", return_tensors="pt")
        numbers = {"row": torch.tensor([row["row"] for row in rows])} if "row" in rows[0] else {}
        return {**batch, **numbers, "prompts": rows, "tokenizer": tokenizer}

    return collate


def policy_gradient(
    run: RunConfig, model: PreTrainedModel, module: torch.nn.Module, batch: dict[str, Any]
) -> torch.Tensor:
    """Return a loss that takes the memory of a step on answers, as long as they may be: minus their log-probability."""
    if "prompts" in batch:
        ids, mask = (batch[name].to(model.device) for name in ("input_ids", "attention_mask"))
        answers = ids.new_ones(len(ids), run.max_new_tokens)
        parts = {"input_ids": ids, "attention_mask": mask, "completion_mask": 0 * mask}
        batch = {name: torch.cat([of_prompts, answers], dim=1) for name, of_prompts in parts.items()}
    return -token_log_probs(module, batch).sum()


def greedy_rewards(run: RunConfig, model: PreTrainedModel, _: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Return 1 and the reward of a greedy answer to each prompt, shape (prompts, 2); fillers count nothing."""
    rewards = rewards_of(answers_to(model, batch["tokenizer"], batch["prompts"], run), run)
    counts = torch.tensor([float(row["labels"][-1] != IGNORED_LABEL) for row in batch["prompts"]])
    return torch.stack([counts, counts * rewards], dim=1).to(model.device)


def mean_reward(sums: torch.Tensor) -> dict[str, float]:
    """Return the mean reward of all prompts, and as the loss to be lowered minus that."""
    count, total = sums.tolist()
    return {VALIDATION_LOSS: -total / count, REWARD: total / count}


REWARDS = Objective(
    _prompt_collator,
    results=greedy_rewards,
    metrics=mean_reward,
    best_metric=REWARD,
    higher_is_better=True,
    loss_of_model=policy_gradient,
    results_of_model=greedy_rewards,
    prepare=lambda model, run: prepare_for_log_probs(model, run.temperature),
)
