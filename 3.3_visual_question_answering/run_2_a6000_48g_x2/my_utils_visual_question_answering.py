"""What only this folder needs: a word on what is trained, and a gallery of hits and misses."""

import base64
import io
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from common.data.pictures import open_picture
from common.data.rows import Splits
from common.models.trained_weights import vision_modules
from common.runtime.recorder import RunRecorder
from common.tasks.samples import predictions
from common.training.loop import TrainingLoop

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
