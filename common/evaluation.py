"""How good the answers are: generated on all ranks in batches sorted by length, then scored.

Similarity score: 1 - cosine of the mean-pooled last hidden states of answer and reference. It is a *distance*:
0 means the same, lower is better. The judge is the base model, before and after tuning, so that both compare.
Facts said: share of the reference's fact strings that stand in the answer. Higher is better.
"""

import csv
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate.utils import gather_object
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.data import Row, answer_of, question_of
from common.print_prefix import rank_prefix
from common.run_record import RunLog


@dataclass(frozen=True)
class ScoredAnswer:
    """One question, what was to be said, what was said, and how near that came."""

    row: int
    question: str
    reference: str
    answer: str
    similarity_score: float
    facts: int
    facts_said: int


@dataclass(frozen=True)
class Evaluation:
    """The scored answers to all questions, in the data file's order; the same on every rank."""

    answers: list[ScoredAnswer]

    @property
    def similarity_score(self) -> float:
        """Mean over the questions; a distance, lower is better."""
        return sum(answer.similarity_score for answer in self.answers) / len(self.answers)

    @property
    def facts_said_share(self) -> float | None:
        """Facts said over facts asked for, or None where the data names no facts."""
        asked = sum(answer.facts for answer in self.answers)
        return sum(answer.facts_said for answer in self.answers) / asked if asked else None

    def __str__(self) -> str:
        """One line for a reader."""
        facts = "" if self.facts_said_share is None else f", {self.facts_said_share:.0%} of the facts said"
        return f"similarity score {self.similarity_score:.3f} (a distance: lower is better){facts}"

    def summary(self) -> dict[str, float | int | None]:
        """The figures for the record."""
        return {
            "similarity_score": self.similarity_score,
            "facts_said_share": self.facts_said_share,
            "questions": len(self.answers),
        }

    def save_csv(self, path: Path) -> None:
        """One line per question."""
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(asdict(self.answers[0])))
            writer.writeheader()
            writer.writerows(asdict(answer) for answer in self.answers)


def evaluate(
    model: PreTrainedModel,
    judge: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Row],
    log: RunLog,
    when: str,
) -> Evaluation:
    """Answer the last question of each row by greedy generation and score it; every rank takes its share of the rows.

    Rank 0 writes predictions_`when`.csv (`before` or `after`) into the results folder.
    """
    run, rank = log.run, log.rank
    lengths = [len(ids) for ids in _prompt_ids(rows, tokenizer)]
    by_length = sorted(range(len(rows)), key=lambda number: -lengths[number])
    share = by_length[rank.rank :: rank.world_size]
    batches = [
        share[start : start + run.evaluation_batch_size] for start in range(0, len(share), run.evaluation_batch_size)
    ]
    scored: list[ScoredAnswer] = []
    bar_title = f"{rank_prefix(rank.rank, rank.device)} answers {when} tuning, batches"
    for numbers in tqdm(batches, desc=bar_title, disable=not rank.is_main, file=sys.stdout, mininterval=2):
        batch = [rows[number] for number in numbers]
        answers = generate_answers(model, tokenizer, batch, run.max_new_tokens)
        scores = similarity_scores(judge, tokenizer, answers, [answer_of(row) for row in batch])
        scored += [_scored(*columns) for columns in zip(numbers, batch, answers, scores, strict=True)]
    evaluation = Evaluation(sorted(gather_object(scored), key=lambda answer: answer.row))
    if rank.is_main:
        evaluation.save_csv(log.folder / f"predictions_{when}.csv")
        print(f"{when} tuning: {evaluation}")
    return evaluation


def _scored(number: int, row: Row, answer: str, score: float) -> ScoredAnswer:
    facts = row.get("facts", [])
    return ScoredAnswer(
        row=number,
        question=row["messages"][-2]["content"],
        reference=answer_of(row),
        answer=answer,
        similarity_score=score,
        facts=len(facts),
        facts_said=sum(fact.lower() in answer.lower() for fact in facts),
    )


def _prompt_ids(rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    questions = [question_of(row) for row in rows]
    return tokenizer.apply_chat_template(questions, add_generation_prompt=True, return_dict=True)["input_ids"]


@torch.no_grad()
def generate_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[Row], max_new_tokens: int
) -> list[str]:
    """Greedy answers to a batch of questions."""
    prompts = {"input_ids": _prompt_ids(rows, tokenizer)}
    batch = tokenizer.pad(prompts, padding_side="left", return_tensors="pt").to(model.device)
    generated = model.generate(
        **batch, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    return tokenizer.batch_decode(generated[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def similarity_scores(
    judge: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, answers: list[str], references: list[str]
) -> list[float]:
    """1 - cosine of each answer and its reference, as `judge` embeds them; 1 for an empty answer."""
    said = embed(judge, tokenizer, answers)
    meant = embed(judge, tokenizer, references)
    return (1 - torch.nn.functional.cosine_similarity(said, meant, dim=-1)).clamp(min=0).tolist()


@torch.no_grad()
def embed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> torch.Tensor:
    """Mean of the last hidden states over each text's own tokens, fp32, shape (texts, hidden); zeros for no tokens."""
    if not any(texts):
        return torch.zeros(len(texts), model.config.hidden_size, device=model.device)
    batch = tokenizer(texts, padding=True, padding_side="right", add_special_tokens=False, return_tensors="pt").to(
        model.device
    )
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    hidden = model.base_model(**inputs, use_cache=False).last_hidden_state.float()
    mask = inputs["attention_mask"].unsqueeze(-1)
    return torch.where(mask.bool(), hidden, 0.0).sum(1) / mask.sum(1).clamp(min=1)
