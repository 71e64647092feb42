"""The tables of questions about pictures (3.3): what each setting says right, and whether it looked."""

from functools import partial
from statistics import fmean

from common.records.store import Record
from common.reporting.columns import NO_BASELINE, Column, Table, column, in_percent, mean_time_s, training_time
from common.reporting.rows import (
    ANSWER_METRICS,
    Row,
    clock,
    settings_of_task,
    waiting_for_task,
)
from common.reporting.screen import brief

METRICS = ANSWER_METRICS
settings = partial(settings_of_task, reporting=__name__)


def _share(title: str, path: str) -> Column:
    """Return the column of a share of facts in percent, over the seeds: `93.4 (92.8 to 94.1)`."""
    return Column(title, f"quality.{path}", in_percent, none="no facts", missing=NO_BASELINE, over_seeds=True)


def _time(row: Row) -> str:
    return clock(mean_time_s(row)) if len(row["seeds"]) > 1 else training_time(row)


def _by_kind(records: list[Record]) -> list[Row]:
    """Return the share of facts said right by kind of question, before and after, a mean over seeds."""

    def mean(row: Row, when: str, kind: str) -> str:
        found = [run["quality"].get(when) or {} for run in row["seeds"]]
        shares = [each.get("facts_said_share_by_kind", {}).get(kind) for each in found]
        return NO_BASELINE if None in shares else f"{100 * fmean(shares):.0f}"

    return [
        {"Setting": SETTING.cell(row)}
        | {
            kind or "no kind": f"{mean(row, 'before', kind)} / {mean(row, 'after', kind)}"
            for kind in row["quality"]["after"]["facts_said_share_by_kind"]
        }
        for row in settings(records)
    ]


SETTING = column("kind as Setting")
BEFORE = _share("Right before", "before.facts_said_share")
COMMONEST = _share("Commonest answer", "after.commonest_facts_said_share")
AFTER = _share("Right after", "after.facts_said_share")
SWAPPED = _share("Old answer, swapped picture", "after.swapped_facts_said_share")
TIME = Column("Training time", _time)

TABLES = {
    "pictures-settings": Table(
        lambda records: [*settings(records), *waiting_for_task(records, __name__)],
        (SETTING, "figures", "model_id", "devices", "seeds", BEFORE, COMMONEST, AFTER, SWAPPED, TIME,
         "speedup_of_task", "planned", "command"),
    ),
    "pictures-kinds": Table(_by_kind),
    "pictures-front": Table(
        settings,
        ("model_id", "machine", SETTING, "seeds", BEFORE, COMMONEST, AFTER, SWAPPED, TIME.titled("Time")),
        shared=("Model", "Machine"),
    ),
}  # fmt: skip
ON_SCREEN = Table(
    settings,
    (
        SETTING,
        BEFORE.titled("Before"),
        COMMONEST.titled("Commonest"),
        AFTER.titled("After"),
        SWAPPED.titled("Swapped"),
        TIME.titled("Time"),
        "speedup_of_task",
        "planned as Peak GiB, planned / measured",
    ),
)
results_text = partial(brief, ON_SCREEN, empty="no run about pictures is completed yet")
