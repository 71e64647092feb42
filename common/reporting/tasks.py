"""What `--results`, comparisons and the page of runs show of each task that has a table of its own."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from common.records.store import Record
from common.reporting.columns import NO_BASELINE, Column, column, in_percent
from common.reporting.layout import fitted
from common.reporting.rows import ANSWER_METRICS, Metric, Row, completed, in_order, settings_of_task, with_seeds


@dataclass(frozen=True)
class OwnTable:
    """What is shown of a task's runs; `Task.reporting` names it."""

    runs: str  # what its runs are, in "no ... is completed yet"
    metrics: Sequence[Metric]  # the one to look at first before the others
    rows: Callable[[list[Record]], Iterable[Row]]  # the lines of `--results`, of records of any task
    columns: Sequence[str | Column]

    def text(self, records: list[Record]) -> str:
        """Return the table for a terminal."""
        columns, rows = list(map(column, self.columns)), self.rows(records)
        cells = [[each.cell(row) for each in columns] for row in rows]
        return fitted([each.title for each in columns], cells) if cells else f"no {self.runs} is completed yet"


# -- text classification (3.1)


def with_interval(row: Row, score: str) -> str:
    """Return `0.9250 (0.899 to 0.948)`: a score of the test rows, and where it is with 95 % certainty."""
    after = row["quality"]["after"]
    return "{:.4f} ({:.3f} to {:.3f})".format(after[score], *after[f"{score}_interval"])


def _measured_in_the_run(title: str, of_ceiling: str, of_pipeline: str, form: str) -> Column:
    """Return a column of what the upper bound or the pipeline says, whichever a run has.

    Both were measured in the run itself: a machine may be slower an hour later, when one device has its turn.
    """

    def value(row: Row) -> float | None:
        ceiling, pipeline = row.get("machine_ceiling") or {}, row.get("pipeline") or {}
        return ceiling.get(of_ceiling) or pipeline.get(of_pipeline)

    return Column(title, value, form, none="-")


ACCURACY = Column("Test accuracy (95 %)", partial(with_interval, score="accuracy"))
ALLOWED = _measured_in_the_run("Allowed", "strong", "allowed_speedup", "{:.2f}x")
SHARE = _measured_in_the_run("Share", "reached", "share_of_allowed", "{:.2f}")
PEAKS = "planned as Peak GiB, planned / measured"
CLASSIFICATION = OwnTable(
    "classification run",
    (
        Metric("accuracy", "test accuracy", "higher", "{:.4f}"),
        Metric("macro_f1", "test macro-F1", "higher", "{:.4f}"),
    ),
    partial(settings_of_task, task="classification"),
    ("setting", "best_accuracy as Best", ACCURACY, "time as Time", "speedup_of_task", ALLOWED, SHARE, "idle as Idle",
     PEAKS),
)  # fmt: skip

# -- summarization (3.2)

LOOPS = {
    "trainer": "Seq2SeqTrainer, by torchrun",
    "accelerate": "plain loop, Accelerate",
    "machines": "plain loop, torch.distributed",
}


def loop_runs(records: Iterable[Record], over_links: bool = False) -> list[Record]:
    """Return the completed runs in order: those over a limited network, or the others."""
    return sorted(
        (run for run in completed(records, task="summarization") if bool(run["config"]["link"]) == over_links),
        key=lambda r: (r["run_folder"], r["config"]["devices"], list(LOOPS).index(r["config"]["loop"]), r["run_name"]),
    )


def loops(records: Iterable[Record]) -> list[Row]:
    """Return a row for each loop and number of devices, over its seeds."""
    return with_seeds(loop_runs(records))


def score(title: str, name: str, form: str, over_seeds: bool = True) -> tuple[Column, Column, Column]:
    """Return the columns of a score before and after training, and of both: `0.49 -> 0.98`."""
    before = Column(title, f"quality.before.{name}", form, missing=NO_BASELINE)
    after = Column(title, f"quality.after.{name}", form, over_seeds=over_seeds)
    both = Column(f"{title} before -> after", lambda row: row["quality"] and f"{before.cell(row)} -> {after.cell(row)}")
    return before, after, both


LOOP = Column("Loop", "config.loop", LOOPS.get)
ROUGE_L_BEFORE, ROUGE_L, ROUGE_L_BOTH = score("ROUGE-L", "rougeL", "{:.3f}")
EXACT_BEFORE, EXACT, EXACT_BOTH = score("Exact match", "exact_share", "{:.0%}", over_seeds=False)
SUMMARIZATION = OwnTable(
    "summarization run",
    (
        Metric("rougeL", "ROUGE-L", "higher", "{:.3f}"),
        Metric("rouge1", "ROUGE-1", "higher", "{:.3f}"),
        Metric("rouge2", "ROUGE-2", "higher", "{:.3f}"),
        Metric("exact_share", "exact match", "higher", "{:.0%}"),
    ),
    loops,
    (LOOP, "devices", ROUGE_L_BOTH, EXACT_BOTH.titled("Exact match"), "loss", "time", "tokens_per_s"),
)

# -- questions about pictures (3.3)

PICTURES = OwnTable(
    "run about pictures",
    ANSWER_METRICS,
    partial(settings_of_task, task="visual_questions"),
    ("setting", "right_before as Before", "commonest as Commonest", "right_after as After", "swapped as Swapped",
     "mean_time as Time", "speedup_of_task", PEAKS),
)  # fmt: skip

# -- preference tuning (3.4)


def _changed(row: Row, name: str, form: Callable[[float], str]) -> str:
    """Return a figure before tuning, and after it over the seeds: `91.2 to 0.3 (0.0 to 0.8)`."""
    before = [run["quality"]["before"][name] for run in row["seeds"]]
    after = Column("", f"quality.after.{name}", form, none="no facts", over_seeds=True)
    return "no facts" if None in before else f"{form(fmean(before))} to {after.cell(row)}"


DATES = Column("Invented dates", partial(_changed, name="invented_dates_share", form=in_percent), missing=NO_BASELINE)
FACTS = Column("Facts", partial(_changed, name="facts_said_share", form=in_percent), missing=NO_BASELINE)
WORDS = Column("Words", partial(_changed, name="words", form="{:.1f}".format), missing=NO_BASELINE)
SAMPLES_DIFFER = Column("Distinct", partial(_changed, name="distinct_share", form=in_percent), missing=NO_BASELINE)
REWARD = Column("Reward", partial(_changed, name="reward", form="{:.2f}".format), missing=NO_BASELINE)
PREFERENCES = OwnTable(
    "run on pairs of answers",
    (
        Metric("undated_share", "answers without an invented date", "higher", "{:.0%}"),
        Metric("facts_said_share", "fact recall", "higher", "{:.0%}"),
        Metric("preference_accuracy", "accuracy of preferences", "higher", "{:.3f}"),
        Metric("chosen_reward", "reward of the chosen", "higher", "{:+.2f}"),
        Metric("reward_margin", "reward margin", "higher", "{:.2f}"),
    ),
    lambda records: [{**run, "seeds": [run]} for run in in_order(records, "preferences")],
    (Column("Run", "run_name"), "setting", "preferred as Accuracy", "reward as Reward", DATES, FACTS, WORDS,
     "mean_time as Time", PEAKS),
)  # fmt: skip

# -- answers with a reward (3.5)

REWARDS = OwnTable(
    "run with a reward",
    (
        Metric("reward", "reward", "higher", "{:.3f}"),
        Metric("undated_share", "answers without an invented date", "higher", "{:.0%}"),
        Metric("facts_said_share", "fact recall", "higher", "{:.0%}"),
        Metric("distinct_share", "samples that differ", "higher", "{:.0%}"),
    ),
    lambda records: [{**run, "seeds": [run]} for run in in_order(records, "rewards")],
    (Column("Run", "run_name"), "setting", REWARD, DATES, FACTS, WORDS, SAMPLES_DIFFER, "mean_time as Time", PEAKS),
)
