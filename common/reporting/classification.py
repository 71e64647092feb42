"""The tables of text classification (3.1): every setting with its accuracy, memory, time and speed-up."""

from collections.abc import Callable, Iterable
from itertools import product

import pandas as pd

from common.base.run_folders import run_folders
from common.base.specs import PARALLELISMS, TECHNIQUES
from common.records.store import Record
from common.reporting.rows import (
    GIB_PER_DEVICE,
    NOT_PUBLISHED,
    NOT_RUN,
    PLANNED,
    Metric,
    Row,
    by_setting_of_commands,
    clock,
    clock_seconds,
    completed,
    device_of,
    devices_of,
    idle_shares,
    kind_name,
    kind_of,
    model_of,
    over_seeds,
    planned_memory,
    published_results,
    speedup_over_one_device,
    training_time,
)
from common.reporting.screen import brief

BRIEF = {
    "Setting": "Setting",
    "Best accuracy": "Best",
    "Test accuracy (95 % interval)": "Test accuracy (95 %)",
    "Training time": "Time",
    "Speed-up": "Speed-up",
    "Allowed by machine and bubble": "Allowed",
    "Share of allowed, steps alone": "Share",
    "Idle share per stage": "Idle",
    PLANNED: "Peak GiB, planned / measured",
}
"""Of the tables' columns those that fit a terminal, and what they are called there."""
METRICS = (
    Metric("accuracy", "test accuracy", "higher", "{:.4f}"),
    Metric("macro_f1", "test macro-F1", "higher", "{:.4f}"),
)
SHARED = {"classification-front": ("Technique", "Model", "Epochs", "Machine")}
SHORTER = {" fine-tuning with": " with", ", 1 micro-batch (naive MP)": ", naive", " micro-batches": " parts"}
"""In names of settings, where a table is narrow."""


def classified(records: Iterable[Record]) -> list[Record]:
    """Return the completed classification runs, in the order of folders and settings."""
    order = list(product(TECHNIQUES, PARALLELISMS))
    return sorted(
        completed(records, reporting=__name__),
        key=lambda r: (r["run_folder"], order.index(kind_of(r)), r["config"]["micro_batches"]),
    )


def setting_name(technique: str, parallel: str, micro_batches: int) -> str:
    """Return `LoRA with PP, 8 micro-batches`; with a single one, stages wait for each other as in naive MP."""
    return kind_name(technique, parallel) + _in_parts(parallel, micro_batches)


def _in_parts(parallel: str, micro_batches: int) -> str:
    if not PARALLELISMS[parallel].pipelines:
        return ""
    return f", {micro_batches} micro-batches" if micro_batches > 1 else ", 1 micro-batch (naive MP)"


def settings_of(records: Iterable[Record]) -> list[list[Record]]:
    """Return the runs grouped by their setting; those of a notebook are left to it."""
    return by_setting_of_commands(classified(records))


def settings_table(records: list[Record]) -> pd.DataFrame:
    """Return the table of 3.1: every setting that was run, the GPU folders that were not, and the published ones."""
    measured = [_compared(runs, records) for runs in settings_of(records)]
    return pd.DataFrame([*measured, *_not_run(records), *_published()]).fillna(NOT_RUN)


def details_table(records: list[Record]) -> pd.DataFrame:
    """Return the table of 3.1.

    Of every setting that was run test rows, memory against the plan, and what the machine allowed.
    """
    return pd.DataFrame(_details(runs[0]) for runs in settings_of(records))


def front(records: list[Record]) -> pd.DataFrame:
    """Return the table of docs/results.md: the measured settings, in brief."""
    return pd.DataFrame(_in_brief(runs[0], _compared(runs, records)) for runs in settings_of(records))


def _in_brief(record: Record, row: Row) -> Row:
    technique, parallel = kind_of(record)
    return {
        "Technique": TECHNIQUES[technique].title,
        "Model": row["Model"],
        "Epochs": f"{row['Epochs']} epochs",
        "Machine": device_of(record),
        "Setting": PARALLELISMS[parallel].label + _in_parts(parallel, record["config"]["micro_batches"]),
        "Devices": str(record["config"]["devices"]),
        "Seeds": row["Seeds"],
        "Best accuracy": row["Best accuracy"],
        "Peak GiB": row["Training's peak memory per device (GiB)"],
        "Time": row["Training time"],
        "Speed-up": row["Speed-up"],
    }


def _compared(runs: list[Record], records: list[Record]) -> Row:
    first = runs[0]
    return {
        "Setting": setting_name(*kind_of(first), first["config"]["micro_batches"]),
        "Figures": "measured",
        "Model": model_of(first),
        "Devices": devices_of(first),
        "Epochs": str(first["config"]["num_train_epochs"]),
        "Seeds": str(len(runs)),
        "Best accuracy": over_seeds([run["best_accuracy"] for run in runs], "{:.4f}"),
        "Training's peak memory per device (GiB)": " / ".join(
            _gib(entry.get("peak_training_gib")) for entry in first["memory"]  # evaluation afterwards needs more
        ),
        "Training time": training_time(first),
        "Speed-up": speedup_over_one_device(first, records),
        "Idle share per stage": idle_shares(first),
    }  # fmt: skip


def _gib(peak: float | None) -> str:
    return NOT_RUN if peak is None else f"{peak:.2f}"


def _details(record: Record) -> Row:
    """Return test scores, memory, and which share was reached of the speed-up that the machine and the bubble allow.

    Both were measured in the run itself, in turn on the same batches: a machine's speed may be another one an hour
    later, when one device had its turn. With DDP it is the step of ranks that do not synchronize over that of ranks
    that do; a pipeline's is of its passes over naive model parallel's (2.7).
    """
    after, pipeline = record["quality"]["after"], record.get("pipeline") or {}
    ceiling = record.get("machine_ceiling") or {}
    allowed = ceiling.get("strong") or pipeline.get("allowed_speedup")
    share = ceiling.get("reached") or pipeline.get("share_of_allowed")
    interval = "{:.4f} ({:.3f} to {:.3f})"
    return {
        "Setting": setting_name(*kind_of(record), record["config"]["micro_batches"]),
        "Test accuracy (95 % interval)": interval.format(after["accuracy"], *after["accuracy_interval"]),
        "Test macro-F1 (95 % interval)": interval.format(after["macro_f1"], *after["macro_f1_interval"]),
        PLANNED: planned_memory(record),
        "Allowed by machine and bubble": f"{allowed:.2f}x" if allowed else "-",
        "Share of allowed, steps alone": f"{share:.2f}" if share else "-",
        "Command": f"`{record['command']}`",
    }


def found(records: list[Record]) -> pd.DataFrame:
    """Return the narrow table of 3.1: published and measured settings."""
    table = settings_table(records)
    table = table[table["Figures"] != NOT_RUN].assign(Figures=table["Figures"].str.partition(":")[0])
    names = {"Best accuracy": "Accuracy", "Training's peak memory per device (GiB)": GIB_PER_DEVICE}
    table["Devices"] = table["Devices"].str.replace(", 1 thread", "")
    for long, short in SHORTER.items():
        table["Setting"] = table["Setting"].str.replace(long, short)
    columns = ["Setting", "Figures", "Devices", *names, "Training time"]
    return table[columns].rename(columns=names).sort_values("Figures", ascending=False, kind="stable")


def _not_run(records: list[Record]) -> list[Row]:
    done = {record["run_folder"] for record in classified(records)}
    return [
        {
            "Setting": kind_name(technique, parallel),
            "Model": run.model,
            "Figures": NOT_RUN,
            "Devices": f"{run.gpu} x{1 if PARALLELISMS[parallel].is_single else run.devices}",
        }
        for run in run_folders().values()
        if run.goal.reporting == __name__ and run.run_folder not in done
        for technique, parallel in product(run.goal.techniques, run.goal.parallelisms)
    ]


def _published() -> list[Row]:
    found = published_results(metric="accuracy")
    one_device = {each["technique"]: each["train_time"] for each in found if PARALLELISMS[each["parallel"]].is_single}
    return [
        {
            "Setting": setting_name(*kind_of(each), micro_batches=1),
            "Figures": f"published: {each['source']}",
            "Model": "roberta-large",
            "Devices": f"{each['gpu']} x{each['devices']}",
            "Epochs": str(each["epochs"]),
            "Seeds": NOT_PUBLISHED,
            "Best accuracy": f"{each['accuracy']:.4f}",
            "Training's peak memory per device (GiB)": " / ".join(f"{gb} GB" for gb in each["memory_gb"]),
            "Training time": clock(clock_seconds(each["train_time"])),
            "Speed-up": f"{clock_seconds(one_device[each['technique']]) / clock_seconds(each['train_time']):.2f}x",
            "Idle share per stage": NOT_PUBLISHED,
        }
        for each in found
    ]


def results_text(records: list[Record]) -> str:
    """Return the table of the last runs on this machine, for a terminal: a line for each setting."""
    rows = [{**_compared(runs, records), **_details(runs[0])} for runs in settings_of(records)]
    return brief(rows, BRIEF, "no classification run is completed yet")


TABLES: dict[str, Callable[[list[Record]], pd.DataFrame]] = {
    "classification-settings": settings_table,
    "classification-details": details_table,
    "classification-front": front,
    "found 3.1": found,
}
"""By the names of their markers."""
