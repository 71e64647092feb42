"""What a model that chats learns, and how good its answers are: generated on all ranks, then scored by judges.

Similarity score: 1 - cosine of the mean-pooled last hidden states of answer and reference, a *distance*: 0 means the
same. Its judge is `base`, the model before tuning; `tuned` may find itself good though it has gone astray; `minilm`
(all-MiniLM-L6-v2) had no part in the training. Fact recall: share of the reference's fact strings that stand in the
answer. Shuffled: the score that the reference of *another* question gets; near it a score says nothing of the content.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch
from torch.nn.functional import cosine_similarity
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from common.base.run_config import RunConfig
from common.data.answer_ends import stops_of
from common.data.batches import make_collator
from common.data.pictures import pixels_of
from common.data.rows import Row, answer_of, is_plain, question_of
from common.data.templates import prompt_ids
from common.models.loading import longest_readable
from common.models.real_models import MAX_TOKENS, minilm_folder
from common.runtime.recorder import RunRecorder
from common.tasks.objectives import VALIDATION_LOSS, Objective, answer_results, mean_loss
from common.tasks.predictions import predict_rows, report_predictions
from common.tasks.samples import samples
from common.tasks.sampling import generated_ids

ScoredAnswer = dict[str, object]  # a line of the predictions file
# all answers, their references, and the references of other rows
Texts = tuple[Sequence[str], Sequence[str], Sequence[str | None]]
# distances from a row's reference: of its answer, and of another row's reference; None: the judge was not asked
Scores = tuple[float | None, float | None]


# -- in training


ANSWERS = Objective(
    lambda tokenizer, _, run: make_collator(tokenizer, multiple=run.pad_to_multiple_of),
    answer_results,
    mean_loss,
    VALIDATION_LOSS,
    higher_is_better=False,
    needs_losses_alone=True,
)


# -- at the end


@dataclass(frozen=True)
class Judge:
    """A model that embeds texts, so that answer and reference can be compared: `base`, `tuned` or `minilm`.

    `judging` is entered meanwhile: with a tuned model's `disable_adapter` that model is the base, without a second one.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    judging: Callable[[], AbstractContextManager] = nullcontext

    def judge(self, texts: Texts, numbers: Sequence[int]) -> list[Scores]:
        """Score the rows of these numbers; the tuned model is not asked how near other rows' references are."""
        answers, references, shuffled = ([each[number] for number in numbers] for each in texts)
        is_asked = self.name != "tuned" and None not in shuffled
        others = self.scores(shuffled, references) if is_asked else [None] * len(numbers)
        return list(zip(self.scores(answers, references), others, strict=True))

    def scores(self, answers: list[str], references: list[str]) -> list[float]:
        """Return 1 - cosine of each answer and its reference; 1 for an empty answer."""
        similarity = cosine_similarity(self.embed(answers), self.embed(references), dim=-1)
        return (1 - similarity).clamp(min=0).tolist()

    @torch.no_grad()
    def embed(self, texts: list[str]) -> torch.Tensor:
        """Return the mean last hidden state of each text's tokens, (texts, hidden), fp32; zeros of no text."""
        if not any(texts):
            return torch.zeros(len(texts), self.model.config.get_text_config().hidden_size, device=self.model.device)
        is_encoder = self.name == "minilm"  # trained with its special tokens
        longest = MAX_TOKENS if is_encoder else longest_readable(self.model.config)  # a reference may be longer
        cut = {"truncation": longest is not None, "max_length": longest}
        padded = {"padding": True, "padding_side": "right", "return_tensors": "pt"}
        batch = self.tokenizer(texts, add_special_tokens=is_encoder, **cut, **padded).to(self.model.device)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        with self.judging():
            hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state.float()
        has_text = torch.tensor([bool(text) for text in texts], device=hidden.device).view(-1, 1, 1)
        mask = inputs["attention_mask"].to(hidden.device).unsqueeze(-1) * has_text  # layers may end on another device
        return torch.where(mask.bool(), hidden, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def independent_judges(run: RunConfig, device: str) -> list[Judge]:
    """Return the judges that had no part in the training: all-MiniLM-L6-v2 (see `minilm_folder`), or none."""
    if run.independent_judge == "none":
        return []
    folder = minilm_folder()
    model = AutoModel.from_pretrained(folder, device_map={"": device}, trust_remote_code=False)
    return [Judge("minilm", model.eval(), AutoTokenizer.from_pretrained(folder, trust_remote_code=False))]


@dataclass(frozen=True)
class Evaluation:
    """The scored answers to all questions, in the data file's order; the same on every rank."""

    answers: list[ScoredAnswer]

    def mean(self, column: str) -> float | None:
        """Return the mean of a score over the questions; a distance, lower is better. None where no judge gave it."""
        scores = [answer[column] for answer in self.answers]
        return None if None in scores else fmean(scores)

    def facts_share(self, said: str = "facts_said", kind: str | None = None) -> float | None:
        """Return the share of facts in the column `said`, of all questions or of one kind; None where none is asked."""
        rows = [row for row in self.answers if kind in (None, row.get("kind")) and row[said] is not None]
        asked = sum(row["facts"] for row in rows)
        return sum(row[said] for row in rows) / asked if asked else None

    def rouge_l(self) -> float | None:
        """Return ROUGE-L of the answers where rows name no facts, by which their content could be told; else None."""
        if self.facts_share() is not None:
            return None
        from common.tasks.summarization import rouge_scores  # here: it imports datasets, which takes 2 seconds

        written, references = ([answer[column] for answer in self.answers] for column in ("answer", "reference"))
        return rouge_scores(written, references)["rougeL"]

    def __str__(self) -> str:
        minilm, share, rouge_l = self.mean("similarity_score_minilm"), self.facts_share(), self.rouge_l()
        judged = "" if minilm is None else f"{minilm:.3f} by MiniLM, "
        facts = f", ROUGE-L {rouge_l:.3f}" if share is None else f", fact recall {share:.0%}"
        by_base = f"{self.mean('similarity_score'):.3f} by the base itself"
        return f"similarity score {judged}{by_base} (distances: lower is better){facts}"

    def summary(self) -> dict[str, float | int | None]:
        """Return the metrics for the record."""
        by_judge = ("similarity_score", "similarity_score_tuned", "similarity_score_minilm")
        return {
            **{column: self.mean(column) for column in (*by_judge, "shuffled_score", "shuffled_score_minilm")},
            "facts_said_share": self.facts_share(),
            **({} if (rouge_l := self.rouge_l()) is None else {"rougeL": rouge_l}),
            "questions": len(self.answers),
        }


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    judges: Iterable[Judge],
    log: RunRecorder,
    when: str,
) -> Evaluation:
    """Answer the last question of each row by greedy generation and score it; every rank takes its share of the rows.

    The `judges` score one after the other, at the end: a generator may load each in the memory that the one before has
    left. Rank 0 writes predictions_`when`.csv, and after tuning prints a few answers of both models.
    """
    evaluation = Evaluation(answer_and_score(model, tokenizer, rows, judges, log, when))
    report_evaluation(evaluation, rows, log, when)
    return evaluation


def report_evaluation(evaluation: Evaluation, rows: Sequence[Row], log: RunRecorder, when: str) -> None:
    """Write and print what `evaluate` found, on rank 0."""
    report_predictions(log, when, evaluation.answers, evaluation)
    if log.rank.is_main and when == "after":
        print(samples(log.folder, "begins" if is_plain(rows) else "question"))


def answer_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    log: RunRecorder,
    when: str,
    what: str = "answers",
) -> tuple[list[str], list[int]]:
    """Return greedy answers to the last question of each row, the same on every rank, and the tokens of each prompt."""
    lengths = [len(ids) for ids in prompt_ids(rows, tokenizer)]

    def answered(numbers: list[int]) -> list[str]:
        own = [rows[number] for number in numbers]
        return generate_answers(model, tokenizer, own, log.run.max_new_tokens, log.run.picture_noise)

    return predict_rows(log, lengths, what, when, answered, model), lengths


def answer_and_score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    judges: Iterable[Judge],
    log: RunRecorder,
    when: str,
) -> list[ScoredAnswer]:
    """Return the answers to all rows, scored; see `evaluate`."""
    answers, lengths = answer_rows(model, tokenizer, rows, log, when)
    references = [answer_of(row) for row in rows]
    texts = (answers, references, shuffled_answers(rows))
    scores = {}
    for judge in judges:
        what, judged = f"answers, judged by {judge.name},", partial(judge.judge, texts)
        beside = [model] if judge.name == "minilm" else []  # the tuned model waits while the base judges
        scores[judge.name] = predict_rows(log, lengths, what, when, judged, judge.model, *beside)
    by_judge = [scores.get(name, [(None, None)] * len(rows)) for name in ("base", "tuned", "minilm")]
    return [
        {
            "row": number,
            "question": question_of(row),
            "reference": reference,
            "answer": answer,
            "similarity_score": base,
            "similarity_score_tuned": tuned,
            "similarity_score_minilm": minilm,
            "shuffled_score": base_other,
            "shuffled_score_minilm": minilm_other,
            "facts": len(row.get("facts", [])),
            "facts_said": facts_in(answer, row),
        }
        for number, (row, answer, reference, (base, base_other), (tuned, _), (minilm, minilm_other)) in enumerate(
            zip(rows, answers, references, *by_judge, strict=True)
        )
    ]


def shuffled_answers(rows: Sequence[Row]) -> list[str | None]:
    """Return another row's reference for each row, always the same; each is used once. None for a single row."""
    if len(rows) == 1:
        return [None]
    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    return [answer_of(rows[other]) for _, other in sorted(zip(order, order[1:] + order[:1], strict=True))]


def facts_in(answer: str, row: Row) -> int:
    """Return how many of a row's facts an answer says."""
    return sum(fact.lower() in answer.lower() for fact in row.get("facts", []))


def generate_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    max_new_tokens: int,
    picture_noise: float = 0.0,
) -> list[str]:
    """Return greedy answers to a batch of questions, about their pictures where they have some."""
    prompts, stops = prompt_ids(rows, tokenizer), stops_of(tokenizer, model.generation_config.eos_token_id)
    pictures = [row["picture"] for row in rows if "picture" in row]
    pixels = pixels_of(pictures, tokenizer, picture_noise) if pictures else {}
    ids = generated_ids(model, tokenizer, prompts, stops, max_new_tokens, **pixels)
    return list(map(stops.cut, tokenizer.batch_decode(ids, skip_special_tokens=True)))
