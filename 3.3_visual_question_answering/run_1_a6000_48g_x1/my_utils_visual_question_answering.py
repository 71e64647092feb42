"""What only this folder needs: a word on what is trained, and a gallery of hits and misses."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from peft import PeftModel

from common.data.pictures import open_picture
from common.data.rows import Splits
from common.models.trained_weights import vision_modules
from common.runtime.recorder import RunRecorder
from common.training.trainer import AuditedTrainer

COLUMNS, WIDTH_INCHES = 4, 12
GALLERY = "gallery.png"


def say_trained(log: RunRecorder, trainer: AuditedTrainer) -> None:
    """Print how many weights are trained, and what stays as it is."""
    model, weights = trainer.model, list(trainer.model.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    total = sum(weight.numel() for weight in weights)
    if log.rank.is_main:
        sight = " and ".join(vision_modules(model.get_base_model() if isinstance(model, PeftModel) else model))
        sight += " stay as they are" if log.run.freeze_vision_tower else " are trained, too"
        print(f"trained: {trained:,} of {total:,} weights; {sight}")


def gallery(folder: Path, data: Splits, rows: int = 8) -> Figure:
    """Return test pictures with question, answer before and after tuning, and the answer about another picture.

    Half of them are misses, as far as there are some. `folder` is the run's results folder.
    """
    before, after = (
        pd.read_csv(folder / f"predictions_{when}.csv", dtype={"answer": str}, keep_default_na=False)
        for when in ("before", "after")
    )
    is_hit = after["facts_said"] == after["facts"]
    misses = list(after.index[~is_hit][: rows // 2])
    shown = [*misses, *after.index[is_hit][: rows - len(misses)]]
    figure, axes = plt.subplots(-(-len(shown) // COLUMNS), COLUMNS, squeeze=False)
    figure.set_size_inches(WIDTH_INCHES, 4.2 * len(axes))
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, number in zip(axes.flat, shown, strict=False):
        axis.imshow(open_picture(data.test[number]["picture"]))
        row = after.loc[number]
        axis.set_title(
            f"{row['question']}\n"
            f"right: {row['reference']}\n"
            f"before: {before.loc[number, 'answer']}\n"
            f"after: {row['answer']}\n"
            f"with another picture: {row['swapped_answer']}",
            fontsize=7,
            loc="left",
            color="black" if is_hit[number] else "firebrick",
        )
    figure.tight_layout()
    return figure


def draw_gallery(log: RunRecorder, data: Splits) -> None:
    """Write the gallery into the results folder, on rank 0."""
    if log.rank.is_main:
        figure = gallery(log.folder, data)
        figure.savefig(log.folder / GALLERY, dpi=100)
        plt.close(figure)
