"""What only sharding needs to show: what each rank holds, beside what one device would."""

import pandas as pd

PARTS = {"weights_bytes": "weights", "gradients_bytes": "gradients", "optimizer_bytes": "optimizer states"}


def held_table(held: dict[str, object]) -> pd.DataFrame:
    """Return what each rank held in the second step, in MiB, beside what one device would."""
    rows = {f"rank {rank}": each for rank, each in enumerate(held["per_rank"])}
    rows["one device would"] = held["whole"]
    table = pd.DataFrame.from_dict(rows, orient="index").rename(columns=PARTS) / 2**20
    return table.assign(together=table.sum(axis=1)).round(2)
