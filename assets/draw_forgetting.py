"""Draw docs/forgetting.png: what runs on the real model have gained and forgotten, over rates and ranks."""

from statistics import fmean

import matplotlib.pyplot as plt

from bench.page.runs import rise_on_general_texts
from bench.tables.real import gain, rank_of, settings
from common.base.paths import REPOSITORY
from common.reporting.rows import Row, groups_of, kind_name

PICTURE = REPOSITORY / "docs" / "forgetting.png"
LINEAR_TO = 0.1  # nats: beyond it the axis is logarithmic
PANELS = {
    "validation loss, relative to before": gain,
    "change of the loss on general texts (nats per token)": rise_on_general_texts,
    "KL divergence of answers from the base (nats per token)": lambda run: run["quality"]["after"]["answer_drift"],
}


def line_of(row: Row) -> str:
    """Return what the settings of a line share."""
    rank = rank_of(row)
    return kind_name(row) + (f", lora_r {rank}" if rank else "")


def main() -> None:
    """Draw a panel for each figure, with a line over the rates for each technique and rank; means over seeds."""
    figure, panels = plt.subplots(1, len(PANELS), figsize=(12, 3.8), layout="constrained")
    for axes, (title, value) in zip(panels, PANELS.items(), strict=True):
        for line, rows in groups_of(settings(), line_of).items():
            rates = [row["config"]["learning_rate"] for row in rows]
            means = [fmean(map(value, row.get("seeds", [row]))) for row in rows]
            axes.plot(rates, means, marker="o", label=line)
        axes.set(xscale="log", xlabel="learning rate", title=title)
        axes.title.set_fontsize(10)
    panels[1].axhline(0, color="0.8", zorder=0)
    panels[1].set_yscale("symlog", linthresh=LINEAR_TO)
    panels[0].legend(fontsize=9)
    figure.savefig(PICTURE, dpi=100)


if __name__ == "__main__":
    main()
