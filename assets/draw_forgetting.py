"""Draw docs/forgetting.png: what each run on the real model has gained, and what it has forgotten."""

import matplotlib.pyplot as plt

from bench.tables.real import forgotten, gain, real_runs
from common.base.paths import REPOSITORY
from common.reporting.rows import groups_of, kind_name

PICTURE = REPOSITORY / "docs" / "forgetting.png"
MARKERS = ("o", "s", "^", "D")


def main() -> None:
    """Draw a point for each run, with its learning rate."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for marker, (name, runs) in zip(MARKERS, sorted(groups_of(real_runs(), kind_name).items()), strict=False):
        axes.scatter(list(map(gain, runs)), list(map(forgotten, runs)), marker=marker, label=name)
        for run in runs:
            rank = "" if run["technique"] == "full" else f", r {run['config']['lora_r']}"
            said = f" {run['config']['learning_rate']:g}{rank}"
            axes.annotate(said, (gain(run), forgotten(run)), fontsize=7, va="center")
    axes.axhline(0, color="0.8", zorder=0)
    axes.set(xlabel="validation loss after 40 steps, as a share of that before (lower is better)",
             ylabel="rise of the loss on other texts (nats a token)")  # fmt: skip
    axes.legend()
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
