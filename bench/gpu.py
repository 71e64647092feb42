"""What training reaches of a GPU's peak, from kept steps of `python -m bench.lease`: nothing is run here."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.entries import Entry, measured
from bench.gpu_trial import LENGTH, MODEL, TRIALS_PATH
from common.base.specs import TECHNIQUES
from common.reporting.rows import NOT_RUN

GPU = "H200 141GB SXM"
"""On which the bars are; other GPUs have lines without."""
COMMAND = "python -m bench.lease --only steps"
MFU_BARS = {"full": 0.58, "lora": 0.51}
"""Least share of the GPU's dense peak, by `COUNTED`."""
LORA_OVER_FULL = 1.25
Record = Mapping[str, Any]


def kept_trials(path: Path = TRIALS_PATH) -> list[Record]:
    """Return the records of all GPUs."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def entries(quick: bool) -> list[Entry]:
    """Return what `judged` says of kept trials: nothing is run, `quick` or not."""
    return judged(kept_trials())


def judged(records: Sequence[Record]) -> list[Entry]:
    """Return the entries of the GPU with bars, then those of others, whose rows may be fewer, as memory allows."""
    others = dict.fromkeys(record["gpu"] for record in records if record["gpu"] != GPU)
    return [entry for gpu in (GPU, *others) for entry in entries_of(gpu, records)]


def entries_of(gpu: str, records: Sequence[Record]) -> list[Entry]:
    """Return the MFU of each variant on a GPU, LoRA's speed over full fine-tuning's, and the plan's errors.

    Only the fastest variant of each technique has a bar. Without records it is not run.
    """
    records = [record for record in records if record["gpu"] == gpu]
    by = {name: {record["name"]: record for record in records if record["technique"] == name} for name in MFU_BARS}
    found = []
    for technique, bar in MFU_BARS.items():
        ways = sorted(by[technique].values(), key=lambda record: record["mfu"])
        title = TECHNIQUES[technique].title
        found += [_entry(gpu, f"{title}, {way['name']}: MFU", way["mfu"], "share") for way in ways[:-1]]
        fastest = ways[-1] if ways else None
        name = f"{title}, {fastest['name']}: MFU" if fastest else f"{title}: MFU"
        found.append(_entry(gpu, name, fastest and fastest["mfu"], "share", bar))
    both = [name for name in by["lora"] if name in by["full"]]
    ratio = min((by["lora"][name]["tokens_per_s"] / by["full"][name]["tokens_per_s"] for name in both), default=None)
    found.append(
        _entry(gpu, "LoRA over full, least of all variants: tokens per second", ratio, "ratio", LORA_OVER_FULL)
    )
    return found + plan_entries(gpu, records)


def plan_entries(gpu: str, records: Sequence[Record]) -> list[Entry]:
    """Return how far the plan was from step times and, of PyTorch's own kernels, which it is made for, from memory."""
    plain = [record for record in records if not record["settings"]]
    times = [abs(record["planned_step_time_s"] / record["step_time_s"] - 1) for record in records]
    memory = [abs(record["planned_gib"] / record["peak_gib"] - 1) for record in plain]
    if not plain:
        return []
    return [
        _entry(gpu, "planned step time, mean error", statistics.mean(times), "share"),
        _entry(gpu, "planned step time, worst error", max(times), "share"),
        _entry(gpu, "planned memory of PyTorch's own kernels, worst error", max(memory), "share"),
    ]


def _entry(gpu: str, figure: str, value: float | None, unit: str, bar: float | None = None) -> Entry:
    name = f"gpu, {MODEL} on one {gpu}, rows of {LENGTH:,} tokens, {figure}"
    at_least = bar if gpu == GPU else None
    return measured(name if value is not None else f"{name} {NOT_RUN}", value, unit, COMMAND, at_least=at_least)
