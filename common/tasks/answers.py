"""How good the answers are: generated on all ranks in batches sorted by length, then scored.

Similarity score: 1 - cosine of the mean-pooled last hidden states of answer and reference. It is a *distance*:
0 means the same, lower is better. Up to three judges give one each:
- base: the model before tuning; the score without further words. It compares before and after.
- tuned: the model judges its own answers. A model that has gone astray may find itself good.
- minilm: all-MiniLM-L6-v2, a sentence encoder that had no part in the training.
Facts said: share of the reference's fact strings that stand in the answer. Higher is better.
Shuffled: the score that the reference of *another* question gets. A score near it says nothing of the content.
"""

import csv
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
from accelerate.utils import gather_object
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from common.base.print_prefix import rank_prefix
from common.base.run_config import RunConfig
from common.data.batches import batches_by_length
from common.data.messages import answer_of, question_of
from common.data.rows import Row
from common.models.minilm import MAX_TOKENS, check_minilm, minilm_folder
from common.runtime.recorder import RunLog

SHUFFLE_SEED = 0


@dataclass(frozen=True)
class Judge:
    """A model that embeds texts, so that answer and reference can be compared."""

    name: str
    """`base`, `tuned` or `minilm`."""
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    judging: Callable[[], AbstractContextManager] = nullcontext
    """Entered while it judges: with a tuned model's `disable_adapter` that model is the base again, and no second one
    takes memory."""

    def scores(self, answers: list[str], references: list[str]) -> list[float]:
        """1 - cosine of each answer and its reference; 1 for an empty answer."""
        said, meant = self.embed(answers), self.embed(references)
        return (1 - torch.nn.functional.cosine_similarity(said, meant, dim=-1)).clamp(min=0).tolist()

    @torch.no_grad()
    def embed(self, texts: list[str]) -> torch.Tensor:
        """Mean of the last hidden states over each text's tokens, fp32, shape (texts, hidden); zeros for no tokens.

        An encoder's texts get its own special tokens, as it was trained with them; a language model's get none.
        """
        if not any(texts):
            return torch.zeros(len(texts), self.model.config.hidden_size, device=self.model.device)
        is_encoder = self.name == "minilm"
        batch = self.tokenizer(
            texts,
            padding=True,
            padding_side="right",
            add_special_tokens=is_encoder,
            truncation=is_encoder,
            max_length=MAX_TOKENS if is_encoder else None,
            return_tensors="pt",
        ).to(self.model.device)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        with self.judging():
            hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state.float()
        has_text = torch.tensor([bool(text) for text in texts], device=hidden.device).view(-1, 1, 1)
        mask = inputs["attention_mask"].to(hidden.device).unsqueeze(-1) * has_text  # layers may end on another device
        return torch.where(mask.bool(), hidden, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def check_independent_judge(run: RunConfig) -> None:
    """Refuse a judge that is not installed.

    Raises:
        BadInputError: with the command that installs it.
    """
    if run.independent_judge == "minilm":
        check_minilm("independent_judge is minilm", "--independent_judge none")


def independent_judges(run: RunConfig, device: str) -> list[Judge]:
    """The judges that had no part in the training: all-MiniLM-L6-v2, or none, as `run` asks.

    Raises:
        BadInputError: it is not installed, or its weights are not those that were published.
    """
    if run.independent_judge == "none":
        return []
    check_independent_judge(run)
    folder = minilm_folder()
    model = AutoModel.from_pretrained(folder, device_map={"": device})
    return [Judge("minilm", model.eval(), AutoTokenizer.from_pretrained(folder))]


@dataclass(frozen=True)
class ScoredAnswer:
    """One question, what was to be said, what was said, and how near that came: distances, lower is better."""

    row: int
    question: str
    reference: str
    answer: str
    similarity_score: float
    similarity_score_tuned: float | None
    similarity_score_minilm: float | None
    shuffled_score: float | None
    shuffled_score_minilm: float | None
    facts: int
    facts_said: int


@dataclass(frozen=True)
class Evaluation:
    """The scored answers to all questions, in the data file's order; the same on every rank."""

    answers: list[ScoredAnswer]

    def mean(self, column: str) -> float | None:
        """Mean of a score over the questions; a distance, lower is better. None where no judge gave it."""
        scores = [getattr(answer, column) for answer in self.answers]
        return None if None in scores else fmean(scores)

    @property
    def facts_said_share(self) -> float | None:
        """Facts said over facts asked for, or None where the data name no facts."""
        asked = sum(answer.facts for answer in self.answers)
        return sum(answer.facts_said for answer in self.answers) / asked if asked else None

    def __str__(self) -> str:
        """One line for a reader."""
        minilm, share = self.mean("similarity_score_minilm"), self.facts_said_share
        judged = "" if minilm is None else f", {minilm:.3f} by MiniLM"
        facts = "" if share is None else f", {share:.0%} of the facts said"
        return f"similarity score {self.mean('similarity_score'):.3f}{judged} (distances: lower is better){facts}"

    def summary(self) -> dict[str, float | int | None]:
        """The figures for the record."""
        columns = ("similarity_score", "similarity_score_tuned", "similarity_score_minilm")
        shuffled = ("shuffled_score", "shuffled_score_minilm")
        return {
            **{column: self.mean(column) for column in (*columns, *shuffled)},
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
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Row],
    judges: Sequence[Judge],
    log: RunLog,
    when: str,
) -> Evaluation:
    """Answer the last question of each row by greedy generation and score it; every rank takes its share of the rows.

    One of the `judges` is the base. Rank 0 writes predictions_`when`.csv into the results folder: `before` or `after`,
    with an underscore and more words where several models answer.
    """
    run, rank = log.run, log.rank
    others = shuffled_answers(rows)
    lengths = [len(ids) for ids in _prompt_ids(rows, tokenizer)]
    batches = batches_by_length(lengths, run.per_device_eval_batch_size, rank.rank, rank.world_size)
    scored: list[ScoredAnswer] = []
    moment, _, model_words = when.partition("_")
    title = f"{moment} tuning" + (f", {model_words.replace('_', ' ')}" if model_words else "")
    bar_title = f"{rank_prefix(rank.rank, rank.device)} answers {title}, batches"
    for numbers in tqdm(batches, desc=bar_title, disable=not rank.is_main, file=sys.stdout, mininterval=2):
        batch = [rows[number] for number in numbers]
        answers = generate_answers(model, tokenizer, batch, run.max_new_tokens)
        scored += score_answers(numbers, batch, answers, [others[number] for number in numbers], judges)
    evaluation = Evaluation(sorted(gather_object(scored), key=lambda answer: answer.row))
    if rank.is_main:
        evaluation.save_csv(log.folder / f"predictions_{when}.csv")
        print(f"{title}: {evaluation}")
    return evaluation


def shuffled_answers(rows: list[Row]) -> list[str | None]:
    """For each row the reference of another row, always the same one; each is used once. None for a single row."""
    if len(rows) == 1:
        return [None]
    order = list(range(len(rows)))
    random.Random(SHUFFLE_SEED).shuffle(order)
    return [answer_of(rows[other]) for _, other in sorted(zip(order, order[1:] + order[:1], strict=True))]


def score_answers(
    numbers: list[int],
    rows: list[Row],
    answers: list[str],
    other_references: list[str | None],
    judges: Sequence[Judge],
) -> list[ScoredAnswer]:
    """The answers to some rows as each judge scores them, beside the references of other rows."""
    references = [answer_of(row) for row in rows]
    scores = {judge.name: judge.scores(answers, references) for judge in judges}
    absent = [None] * len(rows)
    shuffled = {
        judge.name: absent if None in other_references else judge.scores(other_references, references)
        for judge in judges
        if judge.name != "tuned"
    }
    return [
        ScoredAnswer(
            row=number,
            question=row["messages"][-2]["content"],
            reference=answer_of(row),
            answer=answer,
            similarity_score=scores["base"][place],
            similarity_score_tuned=scores.get("tuned", absent)[place],
            similarity_score_minilm=scores.get("minilm", absent)[place],
            shuffled_score=shuffled["base"][place],
            shuffled_score_minilm=shuffled.get("minilm", absent)[place],
            facts=len(row.get("facts", [])),
            facts_said=sum(fact.lower() in answer.lower() for fact in row.get("facts", [])),
        )
        for place, (number, row, answer) in enumerate(zip(numbers, rows, answers, strict=True))
    ]


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
