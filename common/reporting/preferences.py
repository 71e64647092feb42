"""The tables of preference tuning (3.4): what each setting learnt of pairs, and what its answers became."""

from collections.abc import Callable
from functools import partial
from statistics import fmean

from common.reporting.columns import NO_BASELINE, Column, Table, in_percent
from common.reporting.rows import Metric, Row, clock, in_order, kind_name, kind_of, settings_of_task, waiting_for_task
from common.reporting.screen import brief

METRICS = (
    Metric("undated_share", "answers without an invented date", "higher", "{:.0%}"),
    Metric("facts_said_share", "facts said", "higher", "{:.0%}"),
    Metric("preference_accuracy", "accuracy of preferences", "higher", "{:.3f}"),
    Metric("chosen_reward", "reward of the chosen", "higher", "{:+.2f}"),
    Metric("reward_margin", "reward margin", "higher", "{:.2f}"),
)
settings = partial(settings_of_task, reporting=__name__)


def _setting(row: Row) -> str:
    """Return what a setting is called; a control learns the rejected answers."""
    control = ", exchanged (control)" if row["config"].get("exchange_answers") else ""
    return kind_name(*kind_of(row)) + control


def _changed(row: Row, name: str, form: Callable[[float], str]) -> str:
    """Return a figure before tuning, and after it over the seeds: `91.2 to 0.3 (0.0 to 0.8)`."""
    before = [run["quality"]["before"][name] for run in row["seeds"]]
    after = Column("", f"quality.after.{name}", form, none="no facts", over_seeds=True)
    return "no facts" if None in before else f"{form(fmean(before))} to {after.cell(row)}"


def _reference_time(row: Row) -> str:
    """Return how long the reference took before training; with adapters its pass is part of each step."""
    seconds = [run["phases_s"]["reference"] for run in row["seeds"] if "reference" in run["phases_s"]]
    return clock(fmean(seconds)) if seconds else "in each step"


SETTING = Column("Setting", _setting)
ACCURACY = Column("Accuracy of preferences", "quality.after.preference_accuracy", "{:.3f}", over_seeds=True)
REWARD = Column("Reward of the chosen", "quality.after.chosen_reward", "{:+.2f}", over_seeds=True)
DATES = Column("Invented dates", partial(_changed, name="invented_dates_share", form=in_percent), missing=NO_BASELINE)
FACTS = Column("Facts said", partial(_changed, name="facts_said_share", form=in_percent), missing=NO_BASELINE)
WORDS = Column("Words", partial(_changed, name="words", form="{:.1f}".format), missing=NO_BASELINE)

TABLES = {
    "preferences-settings": Table(
        lambda records: [*settings(records), *waiting_for_task(records, __name__)],
        (SETTING, "figures", "model_id", "devices", "seeds", ACCURACY, REWARD, DATES, FACTS, WORDS,
         Column("Reference", _reference_time), "mean_time", "speedup_of_task", "planned", "command"),
    ),
    "preferences-front": Table(
        settings,
        ("model_id", "machine", SETTING, "seeds", ACCURACY, DATES, FACTS, "mean_time as Time"),
        shared=("Model", "Machine"),
    ),
}  # fmt: skip
ON_SCREEN = Table(
    lambda records: [{**run, "seeds": [run]} for run in in_order(records, __name__)],
    (
        Column("Run", "run_name"),
        SETTING,
        ACCURACY.titled("Accuracy"),
        REWARD.titled("Reward"),
        DATES,
        FACTS.titled("Facts"),
        WORDS,
        "mean_time as Time",
        "planned as Peak GiB, planned / measured",
    ),
)
results_text = partial(brief, ON_SCREEN, empty="no run on pairs of answers is completed yet")
