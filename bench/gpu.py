"""What training reaches of a GPU's peak, from kept records of its runs: nothing is run here."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.entries import Entry, measured
from common.base.specs import TECHNIQUES
from common.reporting.rows import NOT_RUN

GPU, MODEL, LENGTH = "H200 141GB", "llama-3.1-8b", 4096
FOLDERS = {"full": "2.4_full_finetuning/run_2_h200_141g_x1", "lora": "2.1_lora_finetuning/run_2_h200_141g_x1"}
MFU_BARS = {"full": 0.55, "lora": 0.50}
"""Least share of the GPU's dense peak; of LoRA by 4 operations per frozen weight and token."""
LORA_OVER_FULL = 1.25


def entries(records: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """Return the share of the peak by technique, and LoRA's tokens per second over full fine-tuning's.

    Each is that of the fastest of the kept `records`; without one it is not run.
    """
    fastest = {technique: _fastest(records, technique) for technique in FOLDERS}
    shares = [
        _entry(f"{TECHNIQUES[technique].title}: MFU", run and run["mfu"], "share", technique, MFU_BARS[technique])
        for technique, run in fastest.items()
    ]
    speeds = [run["tokens_per_s"] for run in fastest.values() if run]
    ratio = speeds[1] / speeds[0] if len(speeds) == len(fastest) else None
    return [*shares, _entry("LoRA over full: tokens per second", ratio, "ratio", "lora", LORA_OVER_FULL)]


def _fastest(records: Sequence[Mapping[str, Any]], technique: str) -> Mapping[str, Any] | None:
    asked = {"gpu": GPU, "devices": 1, "model": MODEL, "max_length": LENGTH, "technique": technique}
    found = [run for run in records if asked.items() <= run["config"].items() and run["status"] == "completed"]
    return max(found, key=lambda run: run["tokens_per_s"], default=None)


def _entry(figure: str, value: float | None, unit: str, technique: str, bar: float) -> Entry:
    name = f"gpu, {MODEL} on one {GPU}, rows of {LENGTH:,} tokens, {figure}"
    command = f'make run FOLDER={FOLDERS[technique]} ARGS="--model {MODEL} --weights random --max_length {LENGTH}"'
    return measured(name if value is not None else f"{name} {NOT_RUN}", value, unit, command, at_least=bar)
