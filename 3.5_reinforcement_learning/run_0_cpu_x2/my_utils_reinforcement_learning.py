"""What only this folder needs: the reward, groups of answers with their advantages, and what the first step says."""

import copy
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from common.base.run_config import RunConfig
from common.data.answer_ends import Stops, stops_of
from common.data.rows import NO_ROW, Row, Tokens
from common.data.templates import prompt_ids
from common.runtime.recorder import RunRecorder
from common.tasks.answers import report_evaluation
from common.tasks.predictions import predict_rows
from common.tasks.preferences import LabelEvaluation, scored, token_log_probs
from common.tasks.sampling import Answers, answers_to, distinct_share, ended_answers, seed_of
from common.tasks.scoring import rewards_of
from common.training import steps
from common.training.answer_logits import Batch, on_device
from common.training.loop import TrainingLoop
from common.training.steps import Metrics, Tokenizer

YEAR = re.compile(r"\b(?:1\d|20)\d\d\b")  # 1000 to 2099: no prompt of this folder's data has one
VLLM_SHARE = 0.3  # of the GPU's memory, for its weights and cache
SMALL = 1e-4  # of TRL, beside the deviation of a group


def names_without_year(
    completions: Sequence[list[dict[str, str]]], facts: Sequence[list[str]], **_: object
) -> list[float]:
    """Return 1 for a label that names exhibit and maker, less for what is missing, an invented year, or no full stop.

    `facts`, a column of the rows, has the two names.
    """
    scores = []
    for (message,), names in zip(completions, facts, strict=True):
        label = message["content"]
        named = sum(name in label for name in names) / max(1, len(names))
        scores.append(named - bool(YEAR.search(label)) - (not label.endswith(".")))
    return scores


def is_right(completions: Sequence[list[dict[str, str]]], answer: Sequence[str], **_: object) -> list[float]:
    """Return 1 for an answer whose last number is the right one; `answer` is a column of the rows."""
    numbers = [re.findall(r"\d+", message["content"]) for (message,) in completions]
    return [float(found[-1:] == [right]) for found, right in zip(numbers, answer, strict=True)]


def vllm_of(loop: TrainingLoop) -> Any:
    """Return vLLM with the model's weights, which sleeps while the model trains; None where a run does without it."""
    run = loop.run
    if not run.use_vllm:
        return None
    from accelerate import Accelerator
    from trl.generation.vllm_generation import VLLMGeneration  # here: it needs the package vllm

    return VLLMGeneration(
        loop.model,
        Accelerator(),
        loop.tokenizer,
        gpu_memory_utilization=VLLM_SHARE,
        max_model_length=run.max_length + run.max_new_tokens,
        max_num_seqs=run.rows_evaluated_at_once,
        enable_sleep_mode=True,
        temperature=run.temperature,
        max_completion_length=run.max_new_tokens,
        generation_kwargs={"stop": list(stops_of_model(loop).texts) or None, "include_stop_str_in_output": True},
    )


def stops_of_model(loop: TrainingLoop) -> Stops:
    """Return where the model stops, by its tokenizer and its generation config."""
    return stops_of(loop.tokenizer, loop.model.generation_config.eos_token_id)


def sample_groups(loop: TrainingLoop, prompts: Batch, vllm: Any = None) -> Answers:
    """Sample `num_generations` answers to each prompt, by the model as it is now, or by `vllm_of` it."""
    run, rows, start_s = loop.run, prompts["prompts"], time.perf_counter()
    numbered = [(row, number) for row in rows for number in range(run.num_generations)]
    seeds = [seed_of(run.seed, loop.state.global_step, row["row"], number) for row, number in numbered]
    asked = [row for row, _ in numbered]
    with loop.log.memory.phase("rollouts"):
        if vllm:
            vllm.sync_weights()
            _, ids, *_ = vllm.generate([row["input_ids"] for row in asked], images=None, num_generations=1)
            answers = ended_answers(loop.tokenizer, stops_of_model(loop), asked, ids)
        else:
            answers = answers_to(loop.model, loop.tokenizer, asked, run, seeds)
    counted = int(prompts["attention_mask"].sum())  # each prompt once, before
    loop.work.tokens += run.num_iterations * answers.tokens - counted
    loop.work.generating_s += time.perf_counter() - start_s
    return answers


def advantages_in_groups(rewards: torch.Tensor, size: int) -> torch.Tensor:
    """Return how much better each answer is than its group, in standard deviations, shape (answers,).

    `rewards` of `size` answers to a prompt follow each other. Of a group that agrees all are 0: it teaches nothing.
    """
    groups = rewards.view(-1, size)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + SMALL)
    return (advantages * groups_differ(rewards, size).unsqueeze(1)).flatten()


def groups_differ(rewards: torch.Tensor, size: int) -> torch.Tensor:
    """Return whether the rewards of each group differ, shape (groups,); a mean's rounding is no difference."""
    return rewards.view(-1, size).amax(1) > rewards.view(-1, size).amin(1)


def batch_to_learn(prompts: Sequence[Tokens], answers: Sequence[list[int]], pad: int, multiple: int) -> Batch:
    """Return prompts with their answers, padded on the right to a multiple, each of shape (answers, tokens)."""
    rows = [torch.tensor([*prompt["input_ids"], *ids]) for prompt, ids in zip(prompts, answers, strict=True)]
    begins = torch.tensor([len(prompt["input_ids"]) for prompt in prompts]).unsqueeze(1)
    ends = torch.tensor(list(map(len, rows))).unsqueeze(1)
    filler = torch.full((-(-max(map(len, rows)) // max(1, multiple)) * max(1, multiple),), pad)
    places = torch.arange(len(filler))
    return {
        "input_ids": pad_sequence([*rows, filler], batch_first=True, padding_value=pad)[:-1],
        "attention_mask": (places < ends).long(),
        "completion_mask": ((places >= begins) & (places < ends)).long(),
    }


def batches_to_learn(loop: TrainingLoop, answers: Answers, advantages: torch.Tensor) -> list[tuple[Batch, bool]]:
    """Return the answers in batches of like length, and whether each is the step's last.

    A batch has its answers' `advantages`, and as `weights` what each token's loss counts for: one in all tokens of the
    step (dapo), or one in all tokens of the answer and all answers of the step (grpo).
    """
    run, pad = loop.run, loop.tokenizer.pad_token_id
    counted = torch.tensor([float(row["row"] != NO_ROW) for row in answers.prompts])
    lengths = torch.tensor([len(ids) for ids in answers.ids])
    device = loop.loss_sum.device
    tokens, count = loop.part.sum_over_ranks(
        torch.stack([(counted * lengths).sum(), counted.sum()]).to(device)
    ).tolist()
    weights = counted / tokens if run.loss_type != "grpo" else counted / lengths / count
    order = sorted(range(len(answers.ids)), key=lambda n: -len(answers.prompts[n]["input_ids"]) - len(answers.ids[n]))
    size, batches = run.per_device_train_batch_size, list[tuple[Batch, bool]]()
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        ids = [answers.ids[number] for number in chosen]
        batch = batch_to_learn([answers.prompts[number] for number in chosen], ids, pad, run.pad_to_multiple_of)
        batch["advantages"] = advantages[chosen].unsqueeze(1)
        batch["weights"] = batch["completion_mask"][:, 1:] * weights[chosen].unsqueeze(1)
        batches.append((on_device(batch, device), start + size >= len(order)))
    return batches


def log_probs_of(loop: TrainingLoop, module: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the log-probability of each token of the answers by `module`, shape (answers, tokens - 1), fp32."""
    with loop.part.autocast():
        return token_log_probs(module, batch)


def reference_of(model: PreTrainedModel, run: RunConfig) -> PreTrainedModel | None:
    """Return a copy of the model before training, where the loss reads it; with adapters none is needed."""
    if not run.beta or run.method.has_adapters:
        return None
    return copy.deepcopy(model).requires_grad_(False)


@torch.no_grad()
def reference_log_probs(loop: TrainingLoop, reference: PreTrainedModel | None, batch: Batch) -> torch.Tensor:
    """Return `log_probs_of` the model before training: the copy, or this model with its adapters switched off."""
    if reference:
        return log_probs_of(loop, reference, batch)
    with loop.model.disable_adapter():
        return log_probs_of(loop, loop.model, batch)


def note_rewards(loop: TrainingLoop, answers: Answers, rewards: torch.Tensor) -> None:
    """Count the step's rewards for the log, and after the first step say what would teach nothing."""
    counted = torch.tensor([row["row"] != NO_ROW for row in answers.prompts])  # the others only fill a step up
    size = loop.run.num_generations
    differ = groups_differ(rewards, size).repeat_interleave(size)
    figures = {
        "reward": rewards,
        "groups_that_differ": differ,
        "answer_tokens": torch.tensor(list(map(len, answers.ids))),
        "ended_share": torch.tensor(answers.ended),
    }
    loop.note(count=counted.sum().item(), **{name: each[counted].sum().item() for name, each in figures.items()})
    if loop.state.global_step or not loop.rank.is_main:
        return
    share = differ.float().mean()
    print(f"first step: {len(rewards)} answers, mean reward {rewards.mean():.3f}; {share:.0%} of the groups differ")
    if not differ.any():
        print(f"WARNING: all answers to a prompt have the same reward, such as {rewards[0]:g}: nothing can be learnt")
    if not any(answers.ended):
        print(f"WARNING: no answer has ended within --max_new_tokens {loop.run.max_new_tokens}: pass more")


def sum_up(loop: TrainingLoop) -> Metrics:
    """Sum up as other workflows do; and what answering took on this rank, and what the answers were like, by step."""
    history = [entry for entry in loop.state.log_history if "reward" in entry]
    names = ("reward", "groups_that_differ", "answer_tokens", "ended_share")
    by_step = {name: [[entry["step"], entry[name]] for entry in history] for name in names}
    return {**steps.sum_up(loop), "rollouts": {"generating_s": loop.work.generating_s, **by_step}}


@dataclass(frozen=True)
class RewardEvaluation(LabelEvaluation):
    """What a model answers to all prompts, and the rewards of its answers."""

    def __str__(self) -> str:
        return f"reward {self.mean('reward'):.3f}, {super().__str__()}"

    def summary(self) -> dict[str, float | int | None]:
        """Return the metrics for the record."""
        return {"reward": self.mean("reward"), "ended_share": self.mean("ended"), **super().summary()}


def evaluate_rewards(
    model: PreTrainedModel, tokenizer: Tokenizer, rows: Sequence[Row], log: RunRecorder, when: str
) -> RewardEvaluation:
    """Answer each prompt greedily and score the answers; sample some, to see how diverse they are."""
    prompts = [{"input_ids": ids, "asked": row} for ids, row in zip(prompt_ids(rows, tokenizer), rows, strict=True)]

    def rewarded(numbers: list[int]) -> list[tuple[str, bool, float]]:
        answers = answers_to(model, tokenizer, [prompts[number] for number in numbers], log.run)
        return list(zip(answers.texts, answers.ended, rewards_of(answers, log.run).tolist(), strict=True))

    lengths = [len(prompt["input_ids"]) for prompt in prompts]
    found = predict_rows(log, lengths, "answers", when, rewarded, model)
    answers = [
        {**scored(number, row, answer), "reward": reward, "ended": ended}
        for number, (row, (answer, ended, reward)) in enumerate(zip(rows, found, strict=True))
    ]
    evaluation = RewardEvaluation(answers, distinct_share(model, tokenizer, rows, log, when))
    report_evaluation(evaluation, rows, log, when)
    return evaluation
