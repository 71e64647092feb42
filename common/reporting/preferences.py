"""The tables of preference tuning (3.4): what each setting learnt of pairs, and what its answers became."""

from collections.abc import Callable, Iterable
from itertools import product
from statistics import fmean

import pandas as pd

from common.base.specs import PARALLELISMS, TECHNIQUES
from common.records.store import Record
from common.reporting.rows import (
    NOT_RUN,
    PLANNED,
    Metric,
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
)
from common.reporting.screen import brief

ACCURACY, REWARD = "Accuracy of preferences", "Reward of the chosen"
DATES, FACTS, WORDS = "Invented dates", "Facts said", "Words"
BRIEF = {
    "Run": "Run",
    "Setting": "Setting",
    ACCURACY: "Accuracy",
    REWARD: "Reward",
    DATES: "Invented dates",
    FACTS: "Facts",
    WORDS: "Words",
    "Training time": "Time",
    PLANNED: "Peak GiB, planned / measured",
}
"""Of the tables' columns those that fit a terminal, and what they are called there."""
METRICS = (
    Metric("undated_share", "answers without an invented date", "higher", "{:.0%}"),
    Metric("facts_said_share", "facts said", "higher", "{:.0%}"),
    Metric("preference_accuracy", "accuracy of preferences", "higher", "{:.3f}"),
    Metric("chosen_reward", "reward of the chosen", "higher", "{:+.2f}"),
    Metric("reward_margin", "reward margin", "higher", "{:.2f}"),
)
SHARED = {"preferences-front": ("Model", "Machine")}


def preferring(records: Iterable[Record]) -> list[Record]:
    """Return the completed runs on pairs, in the order of folders and settings, each control after its setting."""
    order = list(product(TECHNIQUES, PARALLELISMS))
    runs = completed(records, reporting=__name__)
    return sorted(runs, key=lambda r: (r["run_folder"], order.index(kind_of(r)), r["config"]["exchange_answers"]))


def settings_of(records: Iterable[Record]) -> list[list[Record]]:
    """Return the runs grouped by their setting; those of a notebook are left to it."""
    return by_setting_of_commands(preferring(records))


def settings_table(records: list[Record]) -> pd.DataFrame:
    """Return the table of 3.4: every setting that was run, and the GPU folders that were not."""
    measured = [_measured(runs, records) for runs in settings_of(records)]
    return pd.DataFrame([*measured, *not_run_rows(__name__, preferring(records))]).fillna(NOT_RUN)


def front(records: list[Record]) -> pd.DataFrame:
    """Return the measured settings in brief, for a page of all results."""
    return pd.DataFrame(
        {
            "Model": row["Model"],
            "Machine": device_of(runs[0]),
            **{name: row[name] for name in ("Setting", "Seeds", ACCURACY, DATES, FACTS)},
            "Time": row["Training time"],
        }
        for runs in settings_of(records)
        for row in [_measured(runs, records)]
    )


def _measured(runs: list[Record], records: list[Record]) -> Row:
    first = runs[0]
    return {
        "Setting": name_of(first),
        "Figures": "measured",
        "Model": model_of(first),
        "Devices": devices_of(first),
        "Seeds": str(len(runs)),
        ACCURACY: over_seeds([run["quality"]["after"]["preference_accuracy"] for run in runs], "{:.3f}"),
        REWARD: over_seeds([run["quality"]["after"]["chosen_reward"] for run in runs], "{:+.2f}"),
        DATES: changed(runs, "invented_dates_share", "{:.1f}", times=100),
        FACTS: changed(runs, "facts_said_share", "{:.1f}", times=100),
        WORDS: changed(runs, "words", "{:.1f}"),
        "Reference": _reference_time(runs),
        "Training time": clock(fmean(run["train_time_s"] for run in runs)),
        "Speed-up": speedup_over_one_device(first, records),
        PLANNED: planned_memory(first),
        "Command": f"`{first['command']}`",
    }


def _reference_time(runs: list[Record]) -> str:
    """Return how long the reference took before training; with adapters its pass is part of each step."""
    seconds = [run["phases_s"]["reference"] for run in runs if "reference" in run["phases_s"]]
    return clock(fmean(seconds)) if seconds else "in each step"


def name_of(run: Record) -> str:
    """Return what a setting is called; a control learns the rejected answers."""
    control = ", exchanged (control)" if run["config"]["exchange_answers"] else ""
    return kind_name(*kind_of(run)) + control


def changed(runs: list[Record], name: str, form: str, times: float = 1) -> str:
    """Return a figure before tuning, and after it over the seeds: `91.2 to 0.3 (0.0 to 0.8)`."""
    before, after = ([run["quality"][when][name] for run in runs] for when in ("before", "after"))
    if None in (*before, *after):
        return "no facts"
    return f"{form.format(times * fmean(before))} to {over_seeds([times * each for each in after], form)}"


def results_text(records: list[Record]) -> str:
    """Return the table of the last runs on this machine, for a terminal."""
    rows = [{"Run": run["run_name"], **_measured([run], records)} for run in preferring(records)]
    return brief(rows, BRIEF, "no run on pairs of answers is completed yet")


TABLES: dict[str, Callable[[list[Record]], pd.DataFrame]] = {
    "preferences-settings": settings_table,
    "preferences-front": front,
}
"""By the names of their markers."""
