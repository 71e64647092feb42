"""The diagram of reinforcement learning; `python assets/draw_diagrams.py` draws it with all others, from the root."""

import matplotlib.pyplot as plt
from draw_diagrams import DATA, FROZEN, PLAIN, TRAINED, arrow, blank, box


def draw() -> plt.Figure:
    """From a prompt to the loss: several answers of the model, a rule that scores them, and how they compare."""
    figure, axes = blank(11.6, 3.9)
    box(axes, 0.1, 1.75, 1.5, 0.9, "prompt", DATA)
    box(axes, 2.3, 1.4, 2.0, 1.6, "", PLAIN)
    axes.text(3.3, 2.75, "model", ha="center", fontsize=9, fontweight="bold")
    box(axes, 2.45, 1.65, 0.85, 0.8, "base", FROZEN)
    box(axes, 3.4, 1.65, 0.75, 0.8, "LoRA", TRAINED)
    arrow(axes, (1.65, 2.2), (2.25, 2.2))
    for row, (answer, reward, advantage) in enumerate(
        (("Harp, by Lathom.", "1", "+0.9"), ("Harp, by Lathom in 1714.", "0", "0.0"), ("Harp.", "0.5", "+0.5"),
         ("Harp of 1502", "-1.5", "-1.4"))
    ):  # fmt: skip
        bottom = 3.05 - row * 0.85
        box(axes, 5.0, bottom, 2.3, 0.6, answer, DATA)
        box(axes, 7.9, bottom, 0.8, 0.6, reward, PLAIN)
        box(axes, 9.3, bottom, 0.9, 0.6, advantage, PLAIN)
        arrow(axes, (4.35, 2.2), (4.95, bottom + 0.3))
        arrow(axes, (7.35, bottom + 0.3), (7.85, bottom + 0.3))
        arrow(axes, (8.75, bottom + 0.3), (9.25, bottom + 0.3))
        arrow(axes, (10.25, bottom + 0.3), (10.6, 2.2))
    axes.text(11.1, 2.1, "loss", ha="center", fontsize=9, fontweight="bold")
    for left, title in (
        (6.15, "a group of answers, sampled"),
        (8.3, "reward,\nby a rule"),
        (9.75, "advantage\nin the group"),
    ):
        axes.text(left, 3.72, title, ha="center", fontsize=8)
    axes.text(
        5.8, 0.05, "answers that are better than their group become likelier, the others less likely",
        ha="center", fontsize=8,
    )  # fmt: skip
    return figure
