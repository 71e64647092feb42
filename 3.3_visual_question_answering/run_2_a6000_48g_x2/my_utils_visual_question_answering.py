"""What only this folder needs: whether the model looks, a word on what is trained, and a gallery of hits and misses.

Beside all answers' scores: fact recall by kind of question, and that of the majority baseline, the commonest answer of
each kind; and fact recall, and answers unchanged, when the same question is asked about another row's picture, whose
right answer differs. A model that still gives the old answer ignores the picture.
"""

import base64
import io
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from textwrap import fill

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from transformers import PreTrainedModel

from common.data.pictures import open_picture
from common.data.rows import Row, Splits, answer_of, question_of
from common.data.splits import load_splits
from common.models.trained_weights import vision_modules
from common.runtime.recorder import RunRecorder
from common.tasks.answers import Evaluation, Judge, answer_and_score, answer_rows, facts_in, report_evaluation
from common.tasks.samples import predictions
from common.training.loop import TrainingLoop
from common.training.steps import Tokenizer

COLUMNS, WIDTH_INCHES = 4, 10
CHARACTERS = 34  # of a line above a picture
SAID = ("right", "before", "after", "with another picture")
HIT, MISS = "black", "firebrick"


def say_trained(loop: TrainingLoop) -> None:
    """Print how many weights are trained, and what stays as it is."""
    model = loop.model
    trained, total = model.num_parameters(only_trainable=True), model.num_parameters()
    if loop.rank.is_main:
        sight = " and ".join(vision_modules(model.get_base_model() if loop.run.method.has_adapters else model))
        sight += " stay as they are" if loop.run.freeze_vision_tower else " are trained, too"
        print(f"trained: {trained:,} of {total:,} weights; {sight}")


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
    tokenizer: Tokenizer,
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


def gallery_rows(log: RunRecorder, data: Splits, rows: int = 8) -> list[dict[str, object]]:
    """Return test pictures with question, right answer, and those before, after, and about another picture.

    Half of them are misses, as far as there are some, and each picture is shown once, as far as there are enough. For
    the record, with the pictures small.
    """
    if not log.rank.is_main:
        return []
    said = predictions(log.folder)
    after = said["after"]
    has_facts = after["facts"].astype(int) > 0
    is_hit = (after["facts_said"] == after["facts"]).where(has_facts, after["answer"] == after["reference"])
    misses = _other_pictures(after.index[~is_hit], data)[: rows // 2]
    shown = [*misses, *_other_pictures(after.index[is_hit], data)[: rows - len(misses)]]
    return [
        {
            "picture": thumbnail_of(data.test[number]["picture"]),
            "question": after.loc[number, "question"],
            "right": after.loc[number, "reference"],
            **{when: answers.loc[number, "answer"] for when, answers in said.items()},
            "with another picture": after.loc[number, "swapped_answer"],
            "is_hit": bool(is_hit[number]),
        }
        for number in shown
    ]


def thumbnail_of(reference: str, side: int = 64) -> str:
    """Return a picture of at most `side` pixels each way, as a `data:` URI of a few kilobytes."""
    picture = open_picture(reference)
    picture.thumbnail((side, side))
    stream = io.BytesIO()
    picture.quantize(64).save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def _other_pictures(numbers: Iterable[int], data: Splits) -> list[int]:
    """Return rows of different pictures first, then the others."""
    firsts = {data.test[number]["picture_digest"]: number for number in reversed(list(numbers))}
    return [*sorted(firsts.values()), *(number for number in numbers if number not in firsts.values())]


def draw_gallery(seen: list[dict[str, object]], folder: Path) -> Figure:
    """Draw what `gallery_rows` returns, misses in red, and write it into the results folder."""
    figure, axes = plt.subplots(-(-len(seen) // COLUMNS), COLUMNS, squeeze=False)
    figure.set_size_inches(WIDTH_INCHES, 3.9 * len(axes))
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, row in zip(axes.flat, seen, strict=False):
        axis.imshow(open_picture(row["picture"]))
        lines = [row["question"], *(f"{name}: {row[name]}" for name in SAID if name in row)]
        title = "\n".join(fill(line, CHARACTERS) for line in lines)
        colour = HIT if row["is_hit"] else MISS
        axis.set_title(title, fontsize=8, loc="left", color=colour, parse_math=False)  # a `$` is a dollar
    figure.tight_layout()
    figure.savefig(folder / "gallery.png", dpi=100)
    return figure
