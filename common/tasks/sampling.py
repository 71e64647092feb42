"""Answers that a model samples, or chooses greedily, with their tokens: as a reward scores them, or to see how many."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase as Tokenizer

from common.base.run_config import RunConfig
from common.data.answer_ends import Stops, stops_of
from common.data.rows import Row, Tokens
from common.data.templates import prompt_ids
from common.runtime.recorder import RunRecorder
from common.tasks.predictions import predict_rows

SAMPLED_ROWS, SAMPLES = 60, 4  # of the test, and of each row's answers: they tell how diverse answers are


@dataclass(frozen=True)
class Answers:
    """What a model has answered, with each answer's prompt; several answers to a prompt follow each other."""

    prompts: list[Tokens]
    ids: list[list[int]]  # with the end token of those that have ended
    texts: list[str]
    ended: list[bool]

    @property
    def tokens(self) -> int:
        """Of all prompts and answers."""
        return sum(len(prompt["input_ids"]) + len(ids) for prompt, ids in zip(self.prompts, self.ids, strict=True))


class SeededSampling(LogitsProcessor):
    """Makes the likeliest token a sample: adds Gumbel noise, of a generator for each answer, to its logits.

    So an answer depends on its seed alone, and not on the batch, the rank or what was drawn before (Gumbel-max trick,
    Maddison et al. 2014, "A* Sampling").
    """

    def __init__(self, seeds: Sequence[int], temperature: float, device: torch.device) -> None:
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.temperature = temperature

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, shape (answers, vocabulary), of which the highest is a sample."""
        waits = torch.empty_like(scores)
        for row, generator in zip(waits, self.generators, strict=True):
            row.exponential_(generator=generator)
        return scores / self.temperature - waits.log()


@torch.no_grad()
def generated_ids(
    model: PreTrainedModel, tokenizer: Tokenizer, prompts: list[list[int]], stops: Stops, max_new_tokens: int,
    noise: Sequence[LogitsProcessor] = (), **pictures: torch.Tensor,
) -> list[list[int]]:  # fmt: skip
    """Return the likeliest tokens after each prompt of a batch, by the model's logits with `noise`, if any."""
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    batch.update(pictures)
    how = {"max_new_tokens": max_new_tokens, "do_sample": False, "logits_processor": list(noise)}
    if noise:  # a sample is the model's own, whatever its generation config adds
        how["repetition_penalty"] = 1.0
    generated = model.generate(**batch.to(model.device), **how, **stops.settings(tokenizer))
    return generated[:, batch["input_ids"].shape[1] :].tolist()


def answers_to(
    model: PreTrainedModel, tokenizer: Tokenizer, prompts: Sequence[Tokens], run: RunConfig, seeds: Sequence[int] = ()
) -> Answers:
    """Return an answer to each prompt, sampled where there are seeds, else greedy; as many at once as are evaluated."""
    order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]["input_ids"]))
    stops = stops_of(tokenizer, model.generation_config.eos_token_id)
    found: dict[int, list[int]] = {}
    was_training = model.training
    model.eval()
    for start in range(0, len(order), run.rows_evaluated_at_once):
        places = order[start : start + run.rows_evaluated_at_once]
        ids = [prompts[place]["input_ids"] for place in places]
        noise = [SeededSampling([seeds[place] for place in places], run.temperature, model.device)] if seeds else ()
        found |= zip(places, generated_ids(model, tokenizer, ids, stops, run.max_new_tokens, noise), strict=True)
    model.train(was_training)
    return ended_answers(tokenizer, stops, prompts, [found[place] for place in range(len(prompts))])


def ended_answers(tokenizer: Tokenizer, stops: Stops, prompts: Sequence[Tokens], ids: Sequence[list[int]]) -> Answers:
    """Return generated tokens as answers to the prompts: up to the token or text that ends one, without padding."""
    whole, texts, ended = [], [], []
    for each in ids:
        end = next((n for n, token in enumerate(each, 1) if token in stops.token_ids), None)
        text = tokenizer.decode(each[:end], skip_special_tokens=True)
        if ends_by_text := any(stop in text for stop in stops.texts):
            end = next(n for n in range(len(each), 0, -1) if each[n - 1] != tokenizer.pad_token_id)
        whole.append(each[:end])
        texts.append(stops.cut(text))
        ended.append(ends_by_text or end is not None)
    return Answers(list(prompts), whole, texts, ended)


def seed_of(*numbers: int) -> int:
    """Return the seed of an answer's noise, from what names it: the run's seed, step, row, and which of the row's."""
    return random.Random(str(numbers)).getrandbits(32)


def distinct_share(
    model: PreTrainedModel, tokenizer: Tokenizer, rows: Sequence[Row], log: RunRecorder, when: str
) -> float:
    """Return how many of the answers sampled to a prompt differ, as a share: 1 / `SAMPLES` = they are all the same."""
    prompts = [{"input_ids": ids} for ids in prompt_ids(rows[:SAMPLED_ROWS], tokenizer)]

    def shares(numbers: list[int]) -> list[float]:
        asked = [prompts[number] for number in numbers for _ in range(SAMPLES)]
        seeds = [seed_of(log.run.seed, number, sample) for number in numbers for sample in range(SAMPLES)]
        texts = answers_to(model, tokenizer, asked, log.run, seeds).texts
        return [len(set(texts[place : place + SAMPLES])) / SAMPLES for place in range(0, len(texts), SAMPLES)]

    lengths = [len(prompt["input_ids"]) for prompt in prompts]
    return fmean(predict_rows(log, lengths, "samples", when, shares, model))
