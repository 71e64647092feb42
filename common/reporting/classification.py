"""The tables of text classification (3.1): every setting with its accuracy, memory, time and what sharing brought."""

import json
from collections.abc import Iterable
from itertools import product

import pandas as pd

from common.base.run_config import RunConfig
from common.base.run_folders import run_folders
from common.base.specs import PARALLELISMS, TASKS
from common.records.store import Record
from common.reporting.rows import (
    KIND_NAMES,
    NOT_PUBLISHED,
    NOT_RUN,
    PUBLISHED_FILE,
    Row,
    baseline_of,
    clock,
    clock_seconds,
    completed,
    devices_of,
    kind_of,
    model_of,
    over_seeds,
    planned_memory,
    training_time,
)

TASK = next(task for task in TASKS.values() if task.classifies)
KINDS = tuple(product(TASK.techniques, TASK.parallelisms))
BRIEF = {
    "Setting": "Setting",
    "Best accuracy": "Best",
    "Test accuracy (95 % interval)": "Test accuracy (95 %)",
    "Training time": "Time",
    "Speed-up": "Speed-up",
    "Allowed by machine and bubble": "Allowed",
    "Share of allowed, steps alone": "Share",
    "Idle share per stage": "Idle",
    "Training's peak, planned / measured (GiB)": "Peak GiB, planned / measured",
}
"""Of the tables' columns those that fit a terminal, and what they are called there."""
NO_BASELINE = "no run on one device"
"""A speed-up needs one with the same work."""
SettingKey = tuple[object, ...]
"""What runs share that differ in their seed alone."""


def classified(records: Iterable[Record]) -> list[Record]:
    """The completed classification runs, in the order of folders and settings."""
    found = completed(records, *KINDS, task=TASK.name)
    return sorted(found, key=lambda r: (r["run_folder"], KINDS.index(kind_of(r)), r["config"]["micro_batches"]))


def setting_name(technique: str, parallel: str, micro_batches: int) -> str:
    """`LoRA with PP, 8 micro-batches`; with one, stages wait for each other, whatever the way is called."""
    name = KIND_NAMES[technique, parallel]
    if not PARALLELISMS[parallel].pipelines:
        return name
    return f"{name}, {micro_batches} micro-batches" if micro_batches > 1 else f"{name}, 1 micro-batch (naive MP)"


def by_setting(records: Iterable[Record]) -> dict[SettingKey, list[Record]]:
    """Runs that differ in their seed alone, together; those of a notebook are left to it."""
    groups: dict[SettingKey, list[Record]] = {}
    for record in classified(records):
        if record["launcher"] in ("python", "torchrun", "acclaunch"):
            same = {name: value for name, value in record["config"].items() if name not in ("seed", "run_name")}
            groups.setdefault((record["launcher"], *same.items()), []).append(record)
    return groups


def settings_table(records: list[Record]) -> pd.DataFrame:
    """3.1: every setting that was run, the GPU folders that were not, and the published ones."""
    measured = [_compared(runs, records) for runs in by_setting(records).values()]
    return pd.DataFrame([*measured, *_not_run(records), *_published()]).fillna(NOT_RUN)


def details_table(records: list[Record]) -> pd.DataFrame:
    """3.1: of every setting that was run test rows, memory against the plan, and what the machine allowed."""
    firsts = map(_first, by_setting(records).values())
    return pd.DataFrame([{**_setting(first), **_details(first)} for first in firsts])


def front(records: list[Record]) -> pd.DataFrame:
    """Root README: the measured settings, in brief."""
    table = pd.DataFrame([_compared(runs, records) for runs in by_setting(records).values()])
    return table.drop(columns=["Figures", "Model", "Idle share per stage"]) if not table.empty else table


def _first(runs: list[Record]) -> Record:
    return min(runs, key=lambda run: run["config"]["seed"])


def _setting(record: Record) -> Row:
    return {"Setting": setting_name(*kind_of(record), record["config"]["micro_batches"])}


def _compared(runs: list[Record], records: list[Record]) -> Row:
    first = _first(runs)
    speedup = _speedup(first, records)
    return {
        **_setting(first),
        "Figures": "measured",
        "Model": model_of(first),
        "Devices": devices_of(first),
        "Epochs": str(first["config"]["num_train_epochs"]),
        "Seeds": str(len(runs)),
        "Best accuracy": over_seeds([run["best_accuracy"] for run in runs], "{:.4f}"),
        "Training's peak memory per device (GiB)": _training_peaks(first),
        "Training time": training_time(first),
        "Speed-up": f"{speedup:.2f}x" if speedup else NO_BASELINE,
        "Idle share per stage": " / ".join(f"{stage['idle_share']:.0%}" for stage in first.get("stages", [])) or "-",
    }


def _details(record: Record) -> Row:
    return {
        "Test accuracy (95 % interval)": _with_interval(record, "accuracy"),
        "Test macro-F1 (95 % interval)": _with_interval(record, "macro_f1"),
        "Training's peak, planned / measured (GiB)": planned_memory(record),
        **_allowed(record),
        "Command": f"`{record['command']}`",
    }


def _speedup(record: Record, records: list[Record]) -> float | None:
    """Over one device with the same steps; None: there is no such run."""
    baseline = (
        baseline_of(record, records, "effective_batch_size")
        if not PARALLELISMS[record["parallel"]].is_single
        else record
    )
    return baseline["train_time_s"] / record["train_time_s"] if baseline else None


def _training_peaks(record: Record) -> str:
    """Of each device until training ended: what is measured afterwards needs more."""
    return " / ".join(f"{entry['peak_training_gib']:.2f}" for entry in record["memory"])


def _with_interval(record: Record, name: str) -> str:
    after = record["quality"]["after"]
    low, high = after[f"{name}_interval"]
    return f"{after[name]:.4f} ({low:.3f} to {high:.3f})"


def _allowed(record: Record) -> Row:
    """What the machine, and with micro-batches the bubble, allow, and how much of that was reached.

    Both were measured in the run itself, in turn on the same batches: a machine's speed may be another one an hour
    later, when one device had its turn. With DDP it is the step of ranks that need not agree over that of ranks that
    do; a pipeline's is of its passes over naive model parallel's (2.7).
    """
    allowed = share = None
    if record.get("machine_ceiling"):
        allowed, share = record["machine_ceiling"]["strong"], record["machine_ceiling"]["reached"]
    elif record.get("pipeline"):
        allowed, share = record["pipeline"]["allowed_speedup"], record["pipeline"]["share_of_allowed"]
    return {
        "Allowed by machine and bubble": f"{allowed:.2f}x" if allowed else "-",
        "Share of allowed, steps alone": f"{share:.2f}" if share else "-",
    }


def _not_run(records: list[Record]) -> list[Row]:
    """Settings of run folders without any record."""
    done = {record["run_folder"] for record in classified(records)}
    rows = []
    for run in run_folders().values():
        if run.goal.classifies and run.run_folder not in done:
            about = {"Model": run.model, "Figures": NOT_RUN}
            rows += [
                {"Setting": KIND_NAMES[kind], **about, "Devices": _gpus(run, kind)}
                for kind in KINDS
            ]  # fmt: skip
    return rows


def _gpus(run: RunConfig, kind: tuple[str, str]) -> str:
    return f"{run.gpu} x{1 if PARALLELISMS[kind[1]].is_single else run.devices}"


def _published() -> list[Row]:
    found = [each for each in json.loads(PUBLISHED_FILE.read_text(encoding="utf-8")) if "accuracy" in each]
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
    ]  # fmt: skip


def confusion_table(record: Record) -> pd.DataFrame:
    """How many test rows of each class (lines) were taken for which (columns)."""
    after = record["quality"]["after"]
    return pd.DataFrame(after["confusion"], index=after["labels"], columns=after["labels"])


def results_text(records: list[Record]) -> str:
    """The table of the last runs on this machine, for a terminal: a line for each setting."""
    rows = [{**_compared(runs, records), **_details(_first(runs))} for runs in by_setting(records).values()]
    if not rows:
        return "no classification run is completed yet"
    table = pd.DataFrame(rows)
    brief = table[list(BRIEF)].rename(columns=BRIEF)
    return brief.to_markdown(tablefmt="simple", index=False, disable_numparse=True)


TABLES = {
    "classification-settings": settings_table,
    "classification-details": details_table,
    "classification-front": front,
}
