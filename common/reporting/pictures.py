"""The tables of questions about pictures (3.3): what each setting says right, and whether it looked."""

from collections.abc import Callable, Iterable
from itertools import product
from statistics import fmean

import pandas as pd

from common.base.specs import PARALLELISMS, TECHNIQUES
from common.records.store import Record
from common.reporting.rows import (
    ANSWER_METRICS,
    NO_BASELINE,
    NOT_RUN,
    PLANNED,
    Row,
    by_setting_of_commands,
    clock,
    completed,
    device_of,
    devices_of,
    kind_name,
    kind_of,
    model_of,
    not_run_rows,
    over_seeds,
    planned_memory,
    speedup_over_one_device,
    training_time,
)
from common.reporting.screen import brief

BEFORE, COMMONEST, AFTER, SWAPPED = "Right before", "Commonest answer", "Right after", "Old answer, swapped picture"
BRIEF = {
    "Setting": "Setting",
    BEFORE: "Before",
    COMMONEST: "Commonest",
    AFTER: "After",
    SWAPPED: "Swapped",
    "Training time": "Time",
    "Speed-up": "Speed-up",
    PLANNED: "Peak GiB, planned / measured",
}
"""Of the tables' columns those that fit a terminal, and what they are called there."""
METRICS = ANSWER_METRICS
SHARED = {"pictures-front": ("Model", "Machine")}


def answered(records: Iterable[Record]) -> list[Record]:
    """Return the completed runs about pictures, in the order of folders and settings."""
    order = list(product(TECHNIQUES, PARALLELISMS))
    return sorted(completed(records, reporting=__name__), key=lambda r: (r["run_folder"], order.index(kind_of(r))))


def settings_of(records: Iterable[Record]) -> list[list[Record]]:
    """Return the runs grouped by their setting; those of a notebook are left to it."""
    return by_setting_of_commands(answered(records))


def settings_table(records: list[Record]) -> pd.DataFrame:
    """Return the table of 3.3: every setting that was run, and the GPU folders that were not."""
    measured = [_compared(runs, records) for runs in settings_of(records)]
    return pd.DataFrame([*measured, *not_run_rows(__name__, answered(records))]).fillna(NOT_RUN)


def kinds_table(records: list[Record]) -> pd.DataFrame:
    """Return the share of facts said right by kind of question, before and after, a mean over seeds."""
    return pd.DataFrame([_by_kind(runs) for runs in settings_of(records)])


def front(records: list[Record]) -> pd.DataFrame:
    """Return the table of docs/results.md: the measured settings, in brief."""
    return pd.DataFrame(
        {
            "Model": row["Model"],
            "Machine": device_of(runs[0]),
            **{name: row[name] for name in ("Setting", "Seeds", BEFORE, COMMONEST, AFTER, SWAPPED)},
            "Time": row["Training time"],
        }
        for runs in settings_of(records)
        for row in [_compared(runs, records)]
    )


def share(runs: list[Record], when: str, name: str) -> str:
    """Return a share of facts over the seeds, in percent: `93.4 % (92.8 to 94.1)`."""
    if not all(run["quality"].get(when) for run in runs):
        return NO_BASELINE
    shares = [run["quality"][when][name] for run in runs]
    if None in shares:
        return "no facts"
    return over_seeds([100 * each for each in shares], "{:.1f}")


def _compared(runs: list[Record], records: list[Record]) -> Row:
    first = runs[0]
    return {
        "Setting": kind_name(*kind_of(first)),
        "Figures": "measured",
        "Model": model_of(first),
        "Devices": devices_of(first),
        "Seeds": str(len(runs)),
        BEFORE: share(runs, "before", "facts_said_share"),
        COMMONEST: share(runs, "after", "commonest_facts_said_share"),
        AFTER: share(runs, "after", "facts_said_share"),
        SWAPPED: share(runs, "after", "swapped_facts_said_share"),
        "Training time": clock(fmean(run["train_time_s"] for run in runs)) if len(runs) > 1 else training_time(first),
        "Speed-up": speedup_over_one_device(first, records),
        PLANNED: planned_memory(first),
        "Command": f"`{first['command']}`",
    }


def _by_kind(runs: list[Record]) -> Row:
    kinds = runs[0]["quality"]["after"]["facts_said_share_by_kind"]

    def mean(when: str, kind: str) -> str:
        found = [run["quality"].get(when) or {} for run in runs]
        shares = [each.get("facts_said_share_by_kind", {}).get(kind) for each in found]
        return NO_BASELINE if None in shares else f"{100 * fmean(shares):.0f}"

    return {
        "Setting": kind_name(*kind_of(runs[0])),
        **{kind or "no kind": f"{mean('before', kind)} / {mean('after', kind)}" for kind in kinds},
    }


def results_text(records: list[Record]) -> str:
    """Return the table of the last runs on this machine, for a terminal: a line for each setting, shares in percent."""
    rows = [_compared(runs, records) for runs in settings_of(records)]
    return brief(rows, BRIEF, "no run about pictures is completed yet")


TABLES: dict[str, Callable[[list[Record]], pd.DataFrame]] = {
    "pictures-settings": settings_table,
    "pictures-kinds": kinds_table,
    "pictures-front": front,
}
"""By the names of their markers."""
