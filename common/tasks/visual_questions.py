"""Answers to questions about pictures: what is learnt, and whether the model looks.

Beside the scores of all answers (`common/tasks/answers.py`) there are three figures of the facts said:

- by kind of question, where the rows have the column `kind`;
- of always saying the commonest answer: to each kind of question that which most training rows have;
- with another picture: the same questions are asked again about another row's picture, whose right answer differs. A
  model that still says the old facts did not look.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base.run_config import RunConfig
from common.data.batches import Collate, make_collator
from common.data.messages import answer_of, question_of
from common.data.pictures import collate_pictures
from common.data.rows import Row
from common.data.splits import load_splits
from common.runtime.recorder import RunRecorder
from common.tasks.answers import Evaluation, Judge, ScoredAnswer, answer_and_score, answer_results, answer_rows
from common.tasks.objectives import VALIDATION_LOSS, Objective, mean_loss
from common.tasks.predictions import report_predictions
from common.tasks.samples import samples

SWAP_SEED = 0


# -- in training


def make_picture_collator(tokenizer: PreTrainedTokenizerBase, _: PreTrainedModel, run: RunConfig) -> Collate:
    """Return a collator of padded rows with their pictures."""
    return collate_pictures(make_collator(tokenizer, multiple=run.pad_to_multiple_of), tokenizer, run.picture_noise)


ANSWERS = Objective(
    make_picture_collator,
    answer_results,
    mean_loss,
    VALIDATION_LOSS,
    higher_is_better=False,
    needs_losses_alone=True,
)


# -- at the end


@dataclass(frozen=True)
class VisualEvaluation(Evaluation):
    """The scored answers to all questions, with those about another picture.

    Attributes:
        commonest_share: Share of the facts that the commonest answers would say; None where the data name no facts.
    """

    commonest_share: float | None

    def facts_share(self, said: str, kind: str = "") -> float | None:
        """Return the share of facts in the column `said`, of all questions or of one kind; None where none is asked."""
        rows = [row for row in self.answers if kind in ("", row["kind"]) and row[said] is not None]
        asked = sum(row["facts"] for row in rows)
        return sum(row[said] for row in rows) / asked if asked else None

    def __str__(self) -> str:
        swapped = self.facts_share("swapped_facts_said")
        looked = "" if swapped is None else f"; {swapped:.0%} of them still with another picture"
        return f"{super().__str__()}{looked}"

    def summary(self) -> dict[str, object]:
        """Return the metrics for the record."""
        kinds = sorted({row["kind"] for row in self.answers})
        return {
            **super().summary(),
            "commonest_facts_said_share": self.commonest_share,
            "swapped_facts_said_share": self.facts_share("swapped_facts_said"),
            "swapped_questions": sum(row["swapped_answer"] is not None for row in self.answers),
            "facts_said_share_by_kind": {kind: self.facts_share("facts_said", kind) for kind in kinds},
        }


def evaluate_looking(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    judges: Iterable[Judge],
    log: RunRecorder,
    when: str,
) -> VisualEvaluation:
    """Answer questions about their own pictures, then about others', and score both; see `answers.evaluate`.

    The judges see the first answers alone.
    """
    scored = answer_and_score(model, tokenizer, rows, judges, log, when)
    partners = partners_of(rows)
    swappable = [number for number, partner in enumerate(partners) if partner is not None]
    swapped = [{**rows[number], "picture": rows[partners[number]]["picture"]} for number in swappable]
    answers = answer_rows(model, tokenizer, swapped, log, when, "answers about other pictures") if swapped else []
    others = dict(zip(swappable, answers, strict=True))
    both = [
        with_swapped(row, each, others.get(number)) for number, (row, each) in enumerate(zip(rows, scored, strict=True))
    ]
    evaluation = VisualEvaluation(both, commonest_share(load_splits(log.run).train, rows))
    report_predictions(log, when, evaluation.answers, evaluation)
    if log.rank.is_main and when == "after" and (log.folder / "predictions_before.csv").exists():
        print(samples(log.folder))
    return evaluation


def with_swapped(row: Row, scored: ScoredAnswer, answer: str | None) -> ScoredAnswer:
    """Return a scored answer with the kind of its question, and what was answered about another picture."""
    said = None if answer is None else facts_in(answer, row)
    return {**scored, "kind": kind_of(row), "swapped_answer": answer, "swapped_facts_said": said}


def kind_of(row: Row) -> str:
    """Return what a row asks for, where its data say so; else nothing."""
    return row.get("kind", "")


def facts_in(answer: str, row: Row) -> int:
    """Return how many of a row's facts an answer says."""
    return sum(fact.lower() in answer.lower() for fact in row.get("facts", []))


def partners_of(rows: Sequence[Row]) -> list[int | None]:
    """Return for each row another one whose picture has another right answer to its question, always the same.

    Both rows ask for the same: they have the same `kind`, or where rows have none the same question. No fact of the
    one is a fact of the other; without facts their answers differ. None where there is no such row.
    """
    groups: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(kind_of(row) or question_of(row), []).append(number)
    drawn = random.Random(SWAP_SEED)
    partners: list[int | None] = [None] * len(rows)
    for numbers in groups.values():
        for number in numbers:
            others = [other for other in numbers if _differs(rows[number], rows[other])]
            partners[number] = drawn.choice(others) if others else None
    return partners


def _differs(row: Row, other: Row) -> bool:
    if not row.get("facts") or not other.get("facts"):
        return answer_of(row) != answer_of(other)
    return not {fact.lower() for fact in row["facts"]} & {fact.lower() for fact in other["facts"]}


def commonest_share(train: Sequence[Row], test: Sequence[Row]) -> float | None:
    """Return the share of the test's facts in that answer to each kind of question which most training rows have."""
    asked = sum(len(row.get("facts", [])) for row in test)
    if not asked:
        return None
    counts: dict[str, Counter[str]] = {}
    for row in train:
        counts.setdefault(kind_of(row), Counter())[answer_of(row)] += 1
    commonest = {kind: answers.most_common(1)[0][0] for kind, answers in counts.items()}
    return sum(facts_in(commonest.get(kind_of(row), ""), row) for row in test) / asked
