"""What only sharding needs to show: what each rank holds, beside what one device would."""

import pandas as pd
from matplotlib.figure import Figure

MIB = 2**20
PARTS = {"weights_bytes": "weights", "gradients_bytes": "gradients", "optimizer_bytes": "optimizer states"}


def held_table(held: dict[str, object]) -> pd.DataFrame:
    """What each rank held in the second step, in MiB, beside what one device would."""
    rows = {f"rank {rank}": each for rank, each in enumerate(held["per_rank"])}
    rows["one device would"] = held["whole"]
    table = pd.DataFrame.from_dict(rows, orient="index").rename(columns=PARTS) / MIB
    return table.assign(total=table.sum(axis=1)).round(2)


def plot_held(held_by_way: dict[str, dict[str, object]]) -> Figure:
    """Bars of what the fullest rank holds, in MiB, for each way of sharing; `held` comes from a record."""
    fullest = {way: max(held["per_rank"], key=lambda each: sum(each.values())) for way, held in held_by_way.items()}
    fullest["one device"] = next(iter(held_by_way.values()))["whole"]
    table = pd.DataFrame.from_dict(fullest, orient="index").rename(columns=PARTS) / MIB
    axes = table.plot.barh(stacked=True, figsize=(7, 0.6 + 0.5 * len(table)), xlabel="MiB on the fullest rank")
    axes.invert_yaxis()
    axes.figure.tight_layout()
    return axes.figure
