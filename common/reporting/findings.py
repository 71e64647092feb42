"""The narrow tables at the top of a technique's results, and what each of its run folders needs.

`found 2.2` has what others published beside what was measured here, one line for each way; `needs 2.2` has GPU, memory,
disk, time and rent of each run folder as the planner has them.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from common.base.run_config import RunConfig
from common.base.run_folders import run_folders
from common.base.specs import PARALLELISMS, TASKS
from common.hardware.devices import GIB, MIB
from common.planning.plans import DEFAULT_ROWS_PER_EPOCH, plan_run
from common.records.store import Record
from common.reporting.full import recipes
from common.reporting.rows import (
    FULL,
    FULL_DDP,
    FULL_MP,
    FULL_PP,
    GIB_PER_DEVICE,
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
    is_comparable,
    kind_name,
    kind_of,
    over_seeds,
    published_results,
    score,
    short_devices_of,
)

SPEEDUP, IN_TRAINING, BASE_WEIGHTS, HELD = "Speed-up", "In training", "Weights", "Held by each"
COMPARED: dict[str, tuple[tuple[Kind, ...], str]] = {
    "2.1": ((LORA,), IN_TRAINING),
    "2.2": ((LORA, LORA_DDP), SPEEDUP),
    "2.3": ((FULL, LORA, QLORA, QLORA_DDP), BASE_WEIGHTS),
    "2.4": ((FULL,), IN_TRAINING),
    "2.5": ((FULL, FULL_MP), IN_TRAINING),
    "2.6": ((FULL, FULL_DDP, ("full", "fsdp"), ("full", "zero1"), ("full", "zero2"), ("full", "zero3")), HELD),
    "2.7": ((FULL, FULL_PP), SPEEDUP),
}
"""By technique folder: what its first table compares, and the last column: what the technique is chosen for."""


def found(records: list[Record], number: str) -> pd.DataFrame:
    """Return the narrow table of a chat technique: published results, then ours, of each way the usual setting."""
    kinds, gain = COMPARED[number]
    published = published_results(*kinds)
    first = _usual_runs(recipes(records, kinds[0]), number)
    rows_per_step = first[0][STRONG] if first and gain != SPEEDUP else None
    usual = [runs for kind in kinds if (runs := _usual_runs(recipes(records, kind), number, rows_per_step))]
    if usual and gain == SPEEDUP:  # beside the same batch on one device
        usual[0] = _one_device_as(usual[-1], records)
        gains = [_speedup(runs, usual[0]) for runs in usual if runs]
    else:
        gains = [MEMORY[gain](runs[0], records) for runs in usual]
    measured = [_measured(runs) for runs in usual if runs]
    return pd.DataFrame(
        [*(_published(each, published[0], gain) for each in published)]
        + [{**row, gain: text} for row, text in zip(measured, gains, strict=True)]
    )


def _one_device_as(runs: list[Record], records: list[Record]) -> list[Record]:
    """Return the runs on one device with the same batch, over their seeds; none where nobody has run it."""
    baseline = baseline_of(runs[0], records, STRONG)
    if baseline is None:
        return []
    return next(group for group in by_setting(completed(records, kind_of(baseline))) if baseline in group)


def _usual_runs(runs: Iterable[Record], number: str, rows_per_step: int | None = None) -> list[Record]:
    """Return the runs of the setting with the most seeds, of the technique's own folder where that has some.

    Those with so many `rows_per_step` come first.
    """
    by_command = [run for run in runs if run["command"] != "the notebook"]
    own = [run for run in by_command if run["run_folder"].startswith(number)]
    settings = by_setting(own or by_command)
    return max(settings, key=lambda group: (group[0][STRONG] == rows_per_step, len(group)), default=[])


def _measured(runs: list[Record]) -> Row:
    first = runs[0]
    return {
        "Approach": _short_name(first),
        "Figures": "measured",
        "Devices": short_devices_of(first),
        "Batch size": f"{first['config']['per_device_train_batch_size']} x{data_parallel_ranks(first)}",
        "Score": over_seeds([run["quality"]["after"]["similarity_score"] for run in runs], "{:.3f}"),
        "Time": clock(_mean_time_s(runs)),
    }


def _short_name(run: Mapping[str, Any]) -> str:
    """Return what was done, in few words: `Full with FSDP`."""
    return kind_name(*kind_of(run)).replace(" fine-tuning with", " with")


def _speedup(runs: list[Record], baseline: list[Record]) -> str:
    return f"{_mean_time_s(baseline) / _mean_time_s(runs):.2f}x" if baseline else NOT_RUN


def _mean_time_s(runs: list[Record]) -> float:
    return fmean(run["train_time_s"] for run in runs)


def _in_training(record: Record, _: list[Record]) -> str:
    """Return the fullest device's peak in training: of tensors on a CPU, of what is allocated on a GPU."""
    peaks = [entry.get("peak_gib_by_phase", {}).get("training") for entry in record["memory"]]
    return f"{max(peaks):.3f} GiB" if peaks and all(peaks) else NOT_RUN


def _base_weights(record: Record, records: list[Record]) -> str:
    """Return what the base's weights take as they are stored; unquantized they are those of QLoRA's base before."""
    of_base = [run for run in records if "quantization" in run and run["config"]["model"] == record["config"]["model"]]
    if not of_base:
        return NOT_RUN
    stored = record.get("quantization")
    return f"{1024 * (stored['weights_gib'] if stored else of_base[0]['quantization']['unquantized_gib']):.1f} MiB"


def _held(record: Record, records: list[Record]) -> str:
    """Return what a rank holds of weights, gradients and optimizer states; one device all that sharded runs divide."""
    config = record["config"]
    same = [run for run in records if "held" in run and run["config"]["model"] == config["model"]]
    same = [run for run in same if run["technique"] == record["technique"]]
    if not same:
        return NOT_RUN
    held = max(record["held"]["per_rank"], key=_held_bytes) if "held" in record else same[0]["held"]["whole"]
    return f"{_held_bytes(held) / MIB:.1f} MiB"


def _held_bytes(held: Mapping[str, int]) -> int:
    return sum(held.values())


MEMORY = {IN_TRAINING: _in_training, BASE_WEIGHTS: _base_weights, HELD: _held}
"""By column: what it says of a run; published runs have the card's memory there."""


def _published(result: dict[str, object], baseline: dict[str, object], gain: str) -> Row:
    ranks = result["devices"] if PARALLELISMS[result["parallel"]].splits_rows else 1
    times = clock_seconds(baseline["train_time"]) / clock_seconds(result["train_time"])
    return {
        "Approach": _short_name(result),
        "Figures": "published",
        "Devices": f"{result['gpu']} x{result['devices']}",
        "Batch size": f"{result['batch_size']} x{ranks}",
        "Score": score(result["similarity_score"]),
        "Time": clock(clock_seconds(result["train_time"])),
        gain: f"{times:.2f}x" if gain == SPEEDUP else f"{result['vram_gb']} GB card",
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
    own = [record for record in records if is_comparable(record) and record["run_folder"] == run.run_folder]
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

    plan = plan_run(run, batch_of_length(run, PROJECTED_LENGTH if run.goal.learns_answers else run.max_length))
    usd, phase = plan.epoch_usd(DEFAULT_ROWS_PER_EPOCH), plan.highest.phase
    return {
        "Figures": "projected",
        GIB_PER_DEVICE: " to ".join(dict.fromkeys(f"{gib:.0f}" for gib in (phase.peak_gib, phase.safe_gib))),
        "Minutes": f"{plan.epoch_s(DEFAULT_ROWS_PER_EPOCH) / 60:.0f}",
        "USD": "-" if usd is None else f"{usd:.2f}",
    }


OWN_FOLDERS = [task.number for task in TASKS.values() if task.number]
"""Numbers of the folders of tasks that are not done in those of the techniques."""
TABLES: dict[str, Callable[[list[Record]], pd.DataFrame]] = {
    **{f"found {number}": partial(found, number=number) for number in COMPARED},
    **{f"needs {number}": partial(needs, number=number) for number in (*COMPARED, *OWN_FOLDERS)},
}
"""By the names of their markers."""
