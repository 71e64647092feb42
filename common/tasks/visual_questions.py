"""Answers to questions about pictures: what is learnt, and whether the model looks.

Beside all answers' scores: fact recall by kind of question, and that of the majority baseline, the commonest answer of
each kind; and fact recall, and answers unchanged, when the same question is asked about another row's picture, whose
right answer differs. A model that still gives the old answer ignores the picture.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base.run_config import RunConfig
from common.data.batches import Collate, make_collator
from common.data.pictures import pixels_of
from common.data.rows import Row, Tokens, answer_of, question_of
from common.data.splits import load_splits
from common.runtime.recorder import RunRecorder
from common.tasks import answers
from common.tasks.answers import Evaluation, Judge, answer_and_score, answer_rows, facts_in, report_evaluation


def _picture_collator(tokenizer: PreTrainedTokenizerBase, _: PreTrainedModel, run: RunConfig) -> Collate:
    collate = make_collator(tokenizer, multiple=run.pad_to_multiple_of)

    def collate_both(rows: list[Tokens]) -> dict[str, torch.Tensor]:
        texts = [{name: value for name, value in row.items() if name != "picture"} for row in rows]
        return {**collate(texts), **pixels_of([row["picture"] for row in rows], tokenizer, run.picture_noise)}

    return collate_both


ANSWERS = replace(answers.ANSWERS, collator=_picture_collator)


@dataclass(frozen=True)
class VisualEvaluation(Evaluation):
    """The scored answers to all questions, with those about another picture."""

    commonest_share: float | None  # of the facts that the commonest answers would say

    @property
    def unchanged_share(self) -> float | None:
        """The share of swapped questions with the same answer as before; None where none was swapped."""
        swapped = [row for row in self.answers if row["swapped_answer"] is not None]
        return fmean(row["swapped_answer"] == row["answer"] for row in swapped) if swapped else None

    def __str__(self) -> str:
        facts, unchanged = self.facts_share("swapped_facts_said"), self.unchanged_share
        said = "" if facts is None else f"; {facts:.0%} of them still with another picture"
        same = "" if unchanged is None else f"; with another picture {unchanged:.0%} of the answers stay the same"
        return f"{super().__str__()}{said}{same}"

    def summary(self) -> dict[str, object]:
        """Return the metrics for the record."""
        kinds = sorted({row["kind"] for row in self.answers})
        return {
            **super().summary(),
            "commonest_facts_said_share": self.commonest_share,
            "swapped_facts_said_share": self.facts_share("swapped_facts_said"),
            "swapped_unchanged_share": self.unchanged_share,
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
    """As `answers.evaluate`; questions are also answered about others' pictures, which the judges do not see."""
    scored = answer_and_score(model, tokenizer, rows, judges, log, when)
    partners = partners_of(rows)
    swappable = [number for number, partner in enumerate(partners) if partner is not None]
    swapped = [{**rows[number], "picture": rows[partners[number]]["picture"]} for number in swappable]
    answered, _ = answer_rows(model, tokenizer, swapped, log, when, "answers about other pictures")
    others = dict(zip(swappable, answered, strict=True))
    both = [
        {
            **each,
            "kind": row.get("kind", ""),
            "swapped_answer": others.get(number),
            "swapped_facts_said": facts_in(others[number], row) if number in others else None,
        }
        for number, (row, each) in enumerate(zip(rows, scored, strict=True))
    ]
    evaluation = VisualEvaluation(both, commonest_share(load_splits(log.run).train, rows))
    report_evaluation(evaluation, rows, log, when)
    return evaluation


def partners_of(rows: Sequence[Row]) -> list[int | None]:
    """Return for each row another with the same question, whose answer says none of the row's facts; None: no such."""
    asked = [(group_of(row), answer_of(row), row.get("facts", [])) for row in rows]  # rows may be on disk
    groups: dict[str, list[int]] = {}
    for number, (group, *_) in enumerate(asked):
        groups.setdefault(group, []).append(number)
    drawn = random.Random(0)
    partners: list[int | None] = []
    for group, answer, facts in asked:
        others = ((other, asked[other][1]) for other in drawn.sample(groups[group], len(groups[group])))
        right = (other for other, said in others if said != answer and not facts_in(said, {"facts": facts}))
        partners.append(next(right, None))
    return partners


def group_of(row: Row) -> str:
    """Return what rows that ask for the same share: their kind, or else their question."""
    return row.get("kind") or question_of(row)


def commonest_share(train: Sequence[Row], test: Sequence[Row]) -> float | None:
    """Return the share of the test's facts in the answer that most training rows have to its kind, or else of all."""
    asked = sum(len(row.get("facts", [])) for row in test)
    if not asked:
        return None
    counts: dict[str, Counter[str]] = {}
    for row in train:
        counts.setdefault(group_of(row), Counter())[answer_of(row)] += 1
    commonest = {group: answers.most_common(1)[0][0] for group, answers in counts.items()}
    other = sum(counts.values(), Counter()).most_common(1)[0][0]
    return sum(facts_in(commonest.get(group_of(row), other), row) for row in test) / asked
