"""The tables of preference tuning (3.4): what each setting learnt of pairs, and what its answers became."""

from functools import partial
from statistics import fmean

from bench.tables.columns import Table
from bench.tables.rows import waiting_for_task
from common.reporting.columns import Column
from common.reporting.rows import Row, clock, settings_of_task
from common.reporting.tasks import DATES, FACTS, WORDS

TASK = "preferences"
settings = partial(settings_of_task, task=TASK)
FACTS_SAID = FACTS.titled("Facts said")


def _reference_time(row: Row) -> str:
    """Return how long the reference took before training; with adapters its pass is part of each step."""
    seconds = [run["phases_s"]["reference"] for run in row["seeds"] if "reference" in run["phases_s"]]
    return clock(fmean(seconds)) if seconds else "in each step"


TABLES = {
    "preferences-settings": Table(
        lambda records: [*settings(records), *waiting_for_task(records, TASK)],
        ("setting", "figures", "model_id", "devices", "seeds", "preferred", "reward", DATES, FACTS_SAID, WORDS,
         Column("Reference", _reference_time), "mean_time", "speedup_of_task", "planned", "command"),
    ),
    "preferences-front": Table(
        settings,
        ("model_id", "machine", "setting", "seeds", "preferred", DATES, FACTS_SAID, "mean_time as Time"),
        shared=("Model", "Machine"),
    ),
}  # fmt: skip
