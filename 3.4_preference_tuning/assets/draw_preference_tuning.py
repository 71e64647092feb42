"""The diagram of preference tuning; `python assets/draw_diagrams.py` draws it with all others, from the root."""

import matplotlib.pyplot as plt
from draw_diagrams import DATA, FROZEN, PLAIN, TRAINED, arrow, blank, box


def draw() -> plt.Figure:
    """From a pair of answers to the loss: the model with its adapters, and as the reference without them."""
    figure, axes = blank(11.6, 3.7)
    box(axes, 0.1, 2.2, 2.0, 1.0, "prompt\n+ chosen answer", DATA)
    box(axes, 0.1, 0.5, 2.0, 1.0, "prompt\n+ rejected answer", DATA)
    for bottom, title, what, colour in (
        (2.1, "model", "LoRA on", TRAINED),
        (0.4, "reference", "LoRA off", PLAIN),
    ):
        box(axes, 3.2, bottom, 2.6, 1.2, "", PLAIN)
        axes.text(4.5, bottom + 0.97, title, ha="center", fontsize=9, fontweight="bold")
        box(axes, 3.35, bottom + 0.15, 1.2, 0.6, "base", FROZEN)
        box(axes, 4.7, bottom + 0.15, 1.0, 0.6, what, colour)
        for row in (2.7, 1.0):
            arrow(axes, (2.15, row), (3.15, bottom + 0.6))
        box(axes, 6.5, bottom + 0.1, 1.9, 1.0, "log p of both\nanswers", PLAIN)
        arrow(axes, (5.85, bottom + 0.6), (6.45, bottom + 0.6))
    box(axes, 9.1, 1.25, 2.4, 1.2, "reward of each:\nbeta x difference\nof the two log p", DATA)
    for bottom in (2.1, 0.4):
        arrow(axes, (8.45, bottom + 0.6), (9.05, 1.85))
    axes.text(10.3, 0.85, "loss: falls as the chosen one's\nreward rises above the other's", ha="center", fontsize=8)
    axes.text(
        4.5, 0.08, "with full fine-tuning the reference's log p are computed once, before training",
        ha="center", fontsize=8,
    )  # fmt: skip
    return figure
