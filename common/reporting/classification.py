"""The tables of text classification (3.1): every setting with its accuracy, memory, time and speed-up."""

from functools import partial
from itertools import product

from common.base.specs import PARALLELISMS
from common.records.store import Record
from common.reporting.columns import Column, Table
from common.reporting.rows import (
    NOT_PUBLISHED,
    NOT_RUN,
    Metric,
    Row,
    in_order,
    kind_name,
    kind_of,
    published,
    settings_of_task,
    waiting_for_task,
)
from common.reporting.screen import brief

METRICS = (
    Metric("accuracy", "test accuracy", "higher", "{:.4f}"),
    Metric("macro_f1", "test macro-F1", "higher", "{:.4f}"),
)
SHORTER = {" fine-tuning with": " with", ", 1 micro-batch (naive MP)": ", naive", " micro-batches": " parts"}
"""In names of settings, where a table is narrow."""

classified = partial(in_order, reporting=__name__)
settings = partial(settings_of_task, reporting=__name__)


def setting_name(technique: str, parallel: str, micro_batches: int | None) -> str:
    """Return `LoRA with PP, 8 micro-batches`; with a single one, stages wait for each other as in naive MP."""
    return kind_name(technique, parallel) + _in_parts(parallel, micro_batches)


def _in_parts(parallel: str, micro_batches: int | None) -> str:
    if not PARALLELISMS[parallel].pipelines or not micro_batches:  # of a run folder that nobody has run
        return ""
    return f", {micro_batches} micro-batches" if micro_batches > 1 else ", 1 micro-batch (naive MP)"


def _peaks(row: Row) -> str:
    """Return each device's peak in training; evaluation afterwards needs more."""
    if row["status"] == NOT_PUBLISHED:
        return " / ".join(f"{gb} GB" for gb in row["memory_gb"])
    peaks = [entry.get("peak_training_gib") for entry in row["memory"]]
    return " / ".join(NOT_RUN if peak is None else f"{peak:.2f}" for peak in peaks)


def _with_interval(row: Row, score: str) -> str:
    after = row["quality"]["after"]
    return "{:.4f} ({:.3f} to {:.3f})".format(after[score], *after[f"{score}_interval"])


def _of_ceiling_or_pipeline(row: Row, of_ceiling: str, of_pipeline: str) -> float | None:
    """Return the speed-up that the machine and the bubble allow, or the share of it that was reached.

    Both were measured in the run itself, in turn on the same batches: a machine's speed may be another one an hour
    later, when one device had its turn. With DDP it is the step of ranks that do not synchronize over that of ranks
    that do; a pipeline's is of its passes over naive model parallel's (2.7).
    """
    ceiling, pipeline = row.get("machine_ceiling") or {}, row.get("pipeline") or {}
    return ceiling.get(of_ceiling) or pipeline.get(of_pipeline)


SETTING = Column("Setting", lambda row: setting_name(*kind_of(row), row["config"].get("micro_batches")))
BEST = Column("Best accuracy", "best_accuracy", "{:.4f}", over_seeds=True)
PEAKS = Column("Training's peak memory per device (GiB)", _peaks)
ACCURACY = Column("Test accuracy (95 % interval)", partial(_with_interval, score="accuracy"))
MACRO_F1 = Column("Test macro-F1 (95 % interval)", partial(_with_interval, score="macro_f1"))
ALLOWED = Column(
    "Allowed by machine and bubble",
    partial(_of_ceiling_or_pipeline, of_ceiling="strong", of_pipeline="allowed_speedup"),
    "{:.2f}x",
    none="-",
)
SHARE = Column(
    "Share of allowed, steps alone",
    partial(_of_ceiling_or_pipeline, of_ceiling="reached", of_pipeline="share_of_allowed"),
    "{:.2f}",
    none="-",
)


def _waiting(records: list[Record]) -> list[Row]:
    """Return a row for each setting of a run folder for GPUs that nobody has run."""
    return [
        {
            **row,
            "technique": technique,
            "parallel": parallel,
            "config": row["config"] | ({"devices": 1} if PARALLELISMS[parallel].is_single else {}),
        }
        for row in waiting_for_task(records, __name__)
        for technique, parallel in product(row["goal"].techniques, row["goal"].parallelisms)
    ]


def _shorter(row: Row) -> str:
    name = SETTING.cell(row)
    for long, short in SHORTER.items():
        name = name.replace(long, short)
    return name


TABLES = {
    "classification-settings": Table(
        lambda records: [*settings(records), *_waiting(records), *published(metric="accuracy")],
        (
            SETTING,
            "figures",
            "model_id",
            "devices",
            "epochs",
            "seeds",
            BEST,
            PEAKS,
            "time",
            "speedup_of_task",
            "idle",
        ),
    ),
    "classification-details": Table(settings, (SETTING, ACCURACY, MACRO_F1, "planned", ALLOWED, SHARE, "command")),
    "classification-front": Table(
        settings,
        (
            "technique",
            "model_id",
            Column("Epochs", "config.num_train_epochs", "{} epochs"),
            "machine",
            Column(
                "Setting",
                lambda row: (
                    PARALLELISMS[row["parallel"]].label + _in_parts(row["parallel"], row["config"]["micro_batches"])
                ),
            ),
            "device_count",
            "seeds",
            BEST,
            PEAKS.titled("Peak GiB"),
            "time as Time",
            "speedup_of_task",
        ),
        shared=("Technique", "Model", "Epochs", "Machine"),
    ),
    "found 3.1": Table(
        lambda records: [*published(metric="accuracy"), *settings(records)],
        (
            Column("Setting", _shorter),
            "short_figures",
            "short_devices",
            BEST.titled("Accuracy"),
            PEAKS.titled("GiB per device"),
            "time",
        ),
    ),
}
ON_SCREEN = Table(
    settings,
    (
        SETTING,
        BEST.titled("Best"),
        ACCURACY.titled("Test accuracy (95 %)"),
        "time as Time",
        "speedup_of_task",
        ALLOWED.titled("Allowed"),
        SHARE.titled("Share"),
        "idle as Idle",
        "planned as Peak GiB, planned / measured",
    ),
)
results_text = partial(brief, ON_SCREEN, empty="no classification run is completed yet")
