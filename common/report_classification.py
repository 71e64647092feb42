"""The tables of text classification (3.1): every setting with its accuracy, memory, time and what sharing brought."""

import json
from collections.abc import Iterable

import pandas as pd

from common.report_rows import (
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
    mean_and_range,
    model_of,
    peak_memory_gib,
    planned_memory,
)
from common.run_config import CLASSIFIED_WITH, RunConfig
from common.run_record import Record
from common.siblings import run_folders

KINDS = tuple((technique, way) for technique in ("full", "lora") for way in CLASSIFIED_WITH)
BRIEF = {
    "Setting": "Setting",
    "Best accuracy": "Best",
    "Test accuracy (95 % interval)": "Test accuracy (95 %)",
    "Training time": "Time",
    "Speed-up": "Speed-up",
    "Allowed by machine and bubble": "Allowed",
    "Share of allowed": "Share",
    "Idle share per stage": "Idle",
    "Training's peak, planned / measured (GiB)": "Peak GiB, planned / measured",
}
"""Of the table's columns those that fit a terminal, and what they are called there."""
SettingKey = tuple[object, ...]
"""What runs share that differ in their seed alone."""


def classified(records: Iterable[Record]) -> list[Record]:
    """The completed classification runs, in the order of folders and settings."""
    found = completed(records, *KINDS, task="classification")
    return sorted(found, key=lambda r: (r["run_folder"], KINDS.index(kind_of(r)), r["config"]["micro_batches"]))


def setting_name(technique: str, parallel: str, micro_batches: int) -> str:
    """`LoRA with PP, 8 micro-batches`; with one, stages wait for each other, whatever the way is called."""
    name = KIND_NAMES[technique, parallel]
    if parallel != "pp":
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
    measured = [_measured(runs, records) for runs in by_setting(records).values()]
    return pd.DataFrame([*measured, *_not_run(records), *_published()]).fillna(NOT_RUN)


def front(records: list[Record]) -> pd.DataFrame:
    """Root README: the measured settings, in brief."""
    table = pd.DataFrame([_measured(runs, records) for runs in by_setting(records).values()])
    brief = ["Setting", "Devices", "Epochs", "Best accuracy", "Training time", "Speed-up"]
    return table[[*brief, "Peak memory per device (GiB)"]] if not table.empty else table


def _measured(runs: list[Record], records: list[Record]) -> Row:
    first = min(runs, key=lambda run: run["config"]["seed"])
    config = first["config"]
    baseline = baseline_of(first, records, "effective_batch_size") if first["parallel"] != "single" else first
    speedup = baseline["train_time_s"] / first["train_time_s"] if baseline else None
    return {
        "Setting": setting_name(*kind_of(first), config["micro_batches"]),
        "Figures": "measured",
        "Model": model_of(first),
        "Devices": devices_of(first),
        "Epochs": str(config["epochs"]),
        "Seeds": str(len(runs)),
        "Best accuracy": _over_seeds([run["best_accuracy"] for run in runs]),
        "Test accuracy (95 % interval)": _with_interval(first, "accuracy"),
        "Test macro-F1 (95 % interval)": _with_interval(first, "macro_f1"),
        "Peak memory per device (GiB)": peak_memory_gib(first),
        "Training's peak, planned / measured (GiB)": planned_memory(first),
        "Training time": clock(first["train_time_s"]),
        "Speed-up": f"{speedup:.2f}x" if speedup else NOT_RUN,
        **_allowed(first, speedup),
        "Idle share per stage": " / ".join(f"{stage['idle_share']:.0%}" for stage in first.get("stages", [])) or "-",
        "Command": f"`{first['command']}`",
    }


def _over_seeds(values: list[float]) -> str:
    return mean_and_range(values, "{:.3f}") if len(values) > 1 else f"{values[0]:.3f}"


def _with_interval(record: Record, name: str) -> str:
    after = record["quality"]["after"]
    low, high = after[f"{name}_interval"]
    return f"{after[name]:.3f} ({low:.3f} to {high:.3f})"


def _allowed(record: Record, speedup: float | None) -> Row:
    """What the machine, and with micro-batches the bubble, allow, and how much of that was reached.

    DDP's speed-up is that of the whole training over the ceiling of the same ranks that need not agree. A pipeline's is
    that of its passes over naive model parallel's, measured in the run itself (2.7).
    """
    allowed = share = None
    if record.get("machine_ceiling") and speedup:
        allowed = record["machine_ceiling"]["strong"]
        share = speedup / allowed
    elif record.get("pipeline"):
        allowed, share = record["pipeline"]["allowed_speedup"], record["pipeline"]["share_of_allowed"]
    return {
        "Allowed by machine and bubble": f"{allowed:.2f}x" if allowed else "-",
        "Share of allowed": f"{share:.2f}" if share else "-",
    }


def _not_run(records: list[Record]) -> list[Row]:
    """Settings of run folders without any record."""
    done = {record["run_folder"] for record in classified(records)}
    rows = []
    for folder, run in run_folders().items():
        if run.task == "classification" and run.run_folder not in done:
            about = {"Model": run.model, "Figures": NOT_RUN}
            rows += [
                {
                    "Setting": KIND_NAMES[kind],
                    **about,
                    "Devices": _gpus(run, kind),
                    "Command": _command(folder.name, kind),
                }
                for kind in KINDS
            ]
    return rows


def _gpus(run: RunConfig, kind: tuple[str, str]) -> str:
    return f"{run.gpu} x{1 if kind[1] == 'single' else run.devices}"


def _command(folder_name: str, kind: tuple[str, str]) -> str:
    return f"`python my_workflow_text_classification.py --technique {kind[0]} --parallel {kind[1]}` in {folder_name}"


def _published() -> list[Row]:
    found = [each for each in json.loads(PUBLISHED_FILE.read_text(encoding="utf-8")) if "accuracy" in each]
    one_device = {each["technique"]: each["train_time"] for each in found if each["parallel"] == "single"}
    return [
        {
            "Setting": setting_name(*kind_of(each), micro_batches=1),
            "Figures": f"published: {each['source']}",
            "Model": "roberta-large",
            "Devices": f"{each['gpu']} x{each['devices']}",
            "Epochs": str(each["epochs"]),
            "Seeds": NOT_PUBLISHED,
            "Best accuracy": f"{each['accuracy']:.4f}",
            "Test accuracy (95 % interval)": NOT_PUBLISHED,
            "Test macro-F1 (95 % interval)": NOT_PUBLISHED,
            "Peak memory per device (GiB)": " / ".join(f"{gb} GB" for gb in each["memory_gb"]),
            "Training's peak, planned / measured (GiB)": NOT_PUBLISHED,
            "Training time": clock(clock_seconds(each["train_time"])),
            "Speed-up": f"{clock_seconds(one_device[each['technique']]) / clock_seconds(each['train_time']):.2f}x",
            "Allowed by machine and bubble": NOT_PUBLISHED,
            "Share of allowed": NOT_PUBLISHED,
            "Idle share per stage": NOT_PUBLISHED,
            "Command": NOT_PUBLISHED,
        }
        for each in found
    ]  # fmt: skip


def confusion_table(record: Record) -> pd.DataFrame:
    """How many test rows of each class (lines) were taken for which (columns)."""
    after = record["quality"]["after"]
    return pd.DataFrame(after["confusion"], index=after["labels"], columns=after["labels"])


def results_text(records: list[Record]) -> str:
    """The table of the last runs on this machine, for a terminal: a line for each setting."""
    table = pd.DataFrame([_measured(runs, records) for runs in by_setting(records).values()])
    if table.empty:
        return "no classification run is completed yet"
    brief = table[list(BRIEF)].rename(columns=BRIEF)
    return brief.to_markdown(tablefmt="simple", index=False, disable_numparse=True)


TABLES = {"classification-settings": settings_table, "classification-front": front}
