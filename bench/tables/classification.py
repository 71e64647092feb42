"""The tables of text classification (3.1): every setting with its accuracy, memory, time and speed-up."""

from functools import partial
from itertools import product

from bench.tables.columns import Table
from bench.tables.rows import NOT_PUBLISHED, published, waiting_for_task
from common.base.specs import PARALLELISMS
from common.records.store import Record
from common.reporting.columns import Column
from common.reporting.rows import NOT_RUN, Row, in_parts, setting_name, settings_of_task
from common.reporting.tasks import ACCURACY, ALLOWED, SHARE, with_interval

TASK = "classification"
settings = partial(settings_of_task, task=TASK)


def _peaks(row: Row) -> str:
    """Return each device's peak in training; evaluation afterwards needs more."""
    if row["status"] == NOT_PUBLISHED:
        return " / ".join(f"{gb} GB" for gb in row["memory_gb"])
    peaks = [entry.get("peak_training_gib") for entry in row["memory"]]
    return " / ".join(NOT_RUN if peak is None else f"{peak:.2f}" for peak in peaks)


PEAKS = Column("Training's peak memory per device (GiB)", _peaks)


def _waiting(records: list[Record]) -> list[Row]:
    """Return a row for each setting of a run folder for GPUs that nobody has run."""
    return [
        {
            **row,
            "technique": technique,
            "parallel": parallel,
            "config": row["config"] | ({"devices": 1} if PARALLELISMS[parallel].is_single else {}),
        }
        for row in waiting_for_task(records, TASK)
        for technique, parallel in product(row["goal"].techniques, row["goal"].parallelisms)
    ]


def _shorter(row: Row) -> str:
    name = setting_name(row).replace(" fine-tuning with", " with").replace(", 1 micro-batch (naive MP)", ", naive")
    return name.replace(" micro-batches", " parts")


TABLES = {
    "classification-settings": Table(
        lambda records: [*settings(records), *_waiting(records), *published(metric="accuracy")],
        (
            "setting",
            "figures",
            "model_id",
            "devices",
            "epochs",
            "seeds",
            "best_accuracy",
            PEAKS,
            "time",
            "speedup_of_task",
            "idle",
        ),
    ),
    "classification-details": Table(
        settings,
        (
            "setting",
            ACCURACY.titled("Test accuracy (95 % interval)"),
            Column("Test macro-F1 (95 % interval)", partial(with_interval, score="macro_f1")),
            "planned",
            ALLOWED.titled("Allowed by machine and bubble"),
            SHARE.titled("Share of allowed, steps alone"),
            "command",
        ),
    ),
    "classification-front": Table(
        settings,
        (
            "technique",
            "model_id",
            Column("Epochs", "config.num_train_epochs", "{} epochs"),
            "machine",
            Column(
                "Setting",
                lambda row: PARALLELISMS[row["parallel"]].label + in_parts(row),
            ),
            "device_count",
            "seeds",
            "best_accuracy",
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
            "best_accuracy as Accuracy",
            PEAKS.titled("GiB per device"),
            "time",
        ),
    ),
}
