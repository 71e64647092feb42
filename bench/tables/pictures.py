"""The tables of questions about pictures (3.3): what each setting says right, and whether it looked."""

from functools import partial
from statistics import fmean

from bench.tables.columns import Table
from bench.tables.rows import waiting_for_task
from common.records.store import Record
from common.reporting.columns import NO_BASELINE
from common.reporting.rows import Row, setting_name, settings_of_task

TASK = "visual_questions"
settings = partial(settings_of_task, task=TASK)


def _by_kind(records: list[Record]) -> list[Row]:
    """Return the share of facts said right by kind of question, before and after, a mean over seeds."""

    def mean(row: Row, when: str, kind: str) -> str:
        found = [run["quality"].get(when) or {} for run in row["seeds"]]
        shares = [each.get("facts_said_share_by_kind", {}).get(kind) for each in found]
        return NO_BASELINE if None in shares else f"{100 * fmean(shares):.0f}"

    return [
        {"Setting": setting_name(row)}
        | {
            kind or "no kind": f"{mean(row, 'before', kind)} / {mean(row, 'after', kind)}"
            for kind in row["quality"]["after"]["facts_said_share_by_kind"]
        }
        for row in settings(records)
    ]


SHARES = ("right_before", "commonest", "right_after", "swapped")

TABLES = {
    "pictures-settings": Table(
        lambda records: [*settings(records), *waiting_for_task(records, TASK)],
        ("setting", "figures", "model_id", "devices", "seeds", *SHARES, "mean_time",
         "speedup_of_task", "planned", "command"),
    ),
    "pictures-kinds": Table(_by_kind),
    "pictures-front": Table(
        settings,
        ("model_id", "machine", "setting", "seeds", *SHARES, "mean_time as Time"),
        shared=("Model", "Machine"),
    ),
}  # fmt: skip
