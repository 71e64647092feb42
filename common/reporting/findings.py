"""The narrow tables at the top of a technique's results, and what each of its run folders needs.

`found 2.2` has what others published beside what was measured here, one line for each way; `needs 2.2` has GPU, memory,
disk, time and rent of each run folder as the planner has them.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import fmean

import pandas as pd

from common.base.run_config import RunConfig
from common.base.run_folders import run_folders
from common.base.specs import PARALLELISMS
from common.hardware.devices import GIB
from common.planning.plans import DEFAULT_ROWS_PER_EPOCH, plan_run
from common.records.store import Record
from common.reporting import classification, summarization
from common.reporting.full import recipes
from common.reporting.rows import (
    FULL,
    FULL_DDP,
    FULL_MP,
    FULL_PP,
    LORA,
    LORA_DDP,
    NOT_RUN,
    PROJECTED_LENGTH,
    QLORA,
    QLORA_DDP,
    STRONG,
    Kind,
    Row,
    baseline_of,
    by_setting,
    clock,
    clock_seconds,
    completed,
    data_parallel_ranks,
    kind_name,
    kind_of,
    over_seeds,
    published_results,
    score,
    short_devices_of,
)

GIB_PER_DEVICE, SPEEDUP = "GiB per device", "Speed-up"
COMPARED: dict[str, tuple[tuple[Kind, ...], str]] = {
    "2.1": ((LORA,), GIB_PER_DEVICE),
    "2.2": ((LORA, LORA_DDP), SPEEDUP),
    "2.3": ((FULL, LORA, QLORA, QLORA_DDP), GIB_PER_DEVICE),
    "2.4": ((FULL,), GIB_PER_DEVICE),
    "2.5": ((FULL, FULL_MP), GIB_PER_DEVICE),
    "2.6": ((FULL, FULL_DDP, ("full", "fsdp"), ("full", "zero1"), ("full", "zero2"), ("full", "zero3")),
            GIB_PER_DEVICE),
    "2.7": ((FULL, FULL_PP), SPEEDUP),
}  # fmt: skip
"""By technique folder: what its first table compares, and the last column: what the technique is chosen for."""


def found(records: list[Record], number: str) -> pd.DataFrame:
    """Return the narrow table of a chat technique: published results, then ours, of each way the usual setting."""
    kinds, gain = COMPARED[number]
    published = published_results(*kinds)
    usual = [runs for kind in kinds if (runs := _usual_runs(recipes(records, kind), number))]
    if gain == SPEEDUP:  # beside the same batch on one device
        usual[0] = _one_device_as(usual[-1], records)
    others = [_published(each, published[0], gain) for each in published]
    return pd.DataFrame([*others, *(_measured(runs, usual[0], gain) for runs in usual if runs)])


def _one_device_as(runs: list[Record], records: list[Record]) -> list[Record]:
    """Return the runs on one device with the same batch, over their seeds; none where nobody has run it."""
    baseline = baseline_of(runs[0], records, STRONG)
    if baseline is None:
        return []
    return next(group for group in by_setting(completed(records, kind_of(baseline))) if baseline in group)


def _usual_runs(runs: Iterable[Record], number: str) -> list[Record]:
    """Return the runs of the setting with the most seeds, of the technique's own folder where that has some."""
    by_command = [run for run in runs if run["command"] != "the notebook"]
    own = [run for run in by_command if run["run_folder"].startswith(number)]
    return max(by_setting(own or by_command), key=len, default=[])


def _measured(runs: list[Record], baseline: list[Record], gain: str) -> Row:
    first = runs[0]
    return {
        "Approach": kind_name(*kind_of(first)),
        "Figures": "measured",
        "Devices": short_devices_of(first),
        "Batch size": f"{first['config']['per_device_train_batch_size']} x{data_parallel_ranks(first)}",
        "Score": over_seeds([run["quality"]["after"]["similarity_score"] for run in runs], "{:.3f}"),
        "Training time": clock(_mean_time_s(runs)),
        gain: _gib(first) if gain == GIB_PER_DEVICE else _speedup(runs, baseline),
    }


def _speedup(runs: list[Record], baseline: list[Record]) -> str:
    return f"{_mean_time_s(baseline) / _mean_time_s(runs):.2f}x" if baseline else NOT_RUN


def _mean_time_s(runs: list[Record]) -> float:
    return fmean(run["train_time_s"] for run in runs)


def _gib(record: Record) -> str:
    """Return the highest phase of each device, in GiB: of tensors on a CPU, of what is allocated on a GPU."""
    peaks = [entry.get("peak_gib_by_phase", {}) for entry in record["memory"]]
    return " / ".join(f"{max(peak.values()):.3f}" for peak in peaks if peak) or NOT_RUN


def _published(result: dict[str, object], baseline: dict[str, object], gain: str) -> Row:
    ranks = result["devices"] if PARALLELISMS[result["parallel"]].splits_rows else 1
    times = clock_seconds(baseline["train_time"]) / clock_seconds(result["train_time"])
    return {
        "Approach": kind_name(*kind_of(result)),
        "Figures": "published",
        "Devices": f"{result['gpu']} x{result['devices']}",
        "Batch size": f"{result['batch_size']} x{ranks}",
        "Score": score(result["similarity_score"]),
        "Training time": clock(clock_seconds(result["train_time"])),
        gain: f"{result['vram_gb']} GB cards" if gain == GIB_PER_DEVICE else f"{times:.2f}x",
    }


def found_classes(records: list[Record]) -> pd.DataFrame:
    """Return the narrow table of 3.1: published and measured settings."""
    table = classification.settings_table(records)
    table = table[table["Figures"] != NOT_RUN].assign(Figures=table["Figures"].str.partition(":")[0])
    names = {"Best accuracy": "Accuracy", "Training's peak memory per device (GiB)": GIB_PER_DEVICE}
    table["Devices"] = table["Devices"].str.replace(", 1 thread", "")
    columns = ["Setting", "Figures", "Devices", "Epochs", *names, "Training time"]
    return table[columns].rename(columns=names).sort_values("Figures", ascending=False, kind="stable")


def found_summaries(records: list[Record]) -> pd.DataFrame:
    """Return the narrow table of 3.2: published machines with their bills, then each version of the loop."""
    published = [
        {
            "Way": "one machine" if each["machines"] == 1 else f"{each['machines']} machines",
            "Figures": "published estimate" if each["estimated"] else "published",
            "Devices": f"{each['machine']} x{each['machines']}",
            "ROUGE-L": "not published",
            "Training time": clock(clock_seconds(each["time"])),
            "USD": f"{each['bill_usd']:.2f}",
        }
        for each in published_results(metric="bill_usd")
    ]
    loops = by_setting(summarization.summarized(records))
    return pd.DataFrame([*published, *map(_loop, loops)])


def _loop(runs: list[Record]) -> Row:
    return {
        "Way": summarization.LOOPS[runs[0]["config"]["loop"]],
        "Figures": "measured",
        "Devices": short_devices_of(runs[0]),
        "ROUGE-L": over_seeds([run["quality"]["after"]["rougeL"] for run in runs], "{:.3f}"),
        "Training time": clock(_mean_time_s(runs)),
        "USD": "-",
    }


def needs(records: list[Record], number: str) -> pd.DataFrame:
    """Return what each run folder of a technique needs: projected for GPUs, measured on a CPU."""
    own = {folder: run for folder, run in run_folders().items() if folder.parent.name.startswith(number)}
    return pd.DataFrame([_needs(folder, run, records) for folder, run in own.items()])


def _needs(folder: Path, run: RunConfig, records: list[Record]) -> Row:
    from common.checks.inputs import disk_need  # here, as it imports torch, which other tables do not need

    disk_gib = disk_need(run).total_bytes / GIB
    on_cpu = run.device == "cpu"
    return {
        "Run folder": f"[{folder.name}]({folder.name})",
        "Devices": f"{run.gpu or 'CPU, 1 thread'} x{run.devices}",
        "Disk, GiB": f"{disk_gib:.2f}" if on_cpu else f"{disk_gib:.0f}",
        **(_needed_before(run, records) if on_cpu else _needed_by_plan(run)),
    }


OWN = ("model", "weights", "link")
"""Settings that a kept run has as its folder has them; other runs there are trials."""


def _needed_before(run: RunConfig, records: list[Record]) -> Row:
    """Return the memory of the process and the minutes of the usual kept run."""
    own = [record for record in records if record["run_folder"] == run.run_folder]
    runs = _usual_runs([record for record in own if _is_as_usual(record, run)], "")
    if not runs:
        return dict.fromkeys(("Figures", GIB_PER_DEVICE, "Minutes"), NOT_RUN)
    return {
        "Figures": "measured",
        GIB_PER_DEVICE: f"{max(entry['peak_rss_gib'] for entry in runs[0]['memory']):.1f}",
        "Minutes": f"{sum(runs[0]['phases_s'].values()) / 60:.1f}",
        "USD": "-",
    }


def _is_as_usual(record: Record, run: RunConfig) -> bool:
    """Return whether a record has the settings of `OWN` as the folder has them; older records lack some."""
    return all(record["config"].get(name, getattr(run, name)) == getattr(run, name) for name in OWN)


def _needed_by_plan(run: RunConfig) -> Row:
    from common.checks.tried_rows import batch_of_length  # as above

    plan = plan_run(run, batch_of_length(run, PROJECTED_LENGTH if run.goal.chats else run.max_length))
    usd, phase = plan.epoch_usd(DEFAULT_ROWS_PER_EPOCH), plan.highest.phase
    return {
        "Figures": "projected",
        GIB_PER_DEVICE: " to ".join(dict.fromkeys(f"{gib:.0f}" for gib in (phase.peak_gib, phase.safe_gib))),
        "Minutes": f"{plan.epoch_s(DEFAULT_ROWS_PER_EPOCH) / 60:.0f}",
        "USD": "-" if usd is None else f"{usd:.2f}",
    }


TABLES: dict[str, Callable[[list[Record]], pd.DataFrame]] = {
    **{f"found {number}": partial(found, number=number) for number in COMPARED},
    "found 3.1": found_classes,
    "found 3.2": found_summaries,
    **{f"needs {number}": partial(needs, number=number) for number in (*COMPARED, "3.1", "3.2")},
}
"""By the names of their markers."""
