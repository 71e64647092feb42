"""What training reaches of a GPU's peak, from kept steps of `python -m bench.lease`: nothing is run here."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.entries import Entry, measured, read_kept
from bench.gpu_trial import LENGTH, MODEL, TRIALS_PATH
from common.base.specs import TECHNIQUES
from common.reporting.rows import NOT_RUN

GPU = "H200 141GB SXM"
"""On which the bars are."""
COMMAND = "python -m bench.lease --only steps"
MFU_BARS = {"full": 0.58, "lora": 0.51}
"""Least share of the GPU's dense peak, by `COUNTED`."""
LORA_OVER_FULL = 1.25
Record = Mapping[str, Any]


def entries(quick: bool) -> list[Entry]:
    """Return what `judged` says of kept trials: nothing is run, `quick` or not."""
    return judged(read_kept(TRIALS_PATH))


def judged(records: Sequence[Record]) -> list[Entry]:
    """Return the MFU of each technique's fastest variant, and LoRA's speed over full fine-tuning's in the same variant.

    Without records they are not run.
    """
    by: dict[str, dict[str, Record]] = {technique: {} for technique in MFU_BARS}
    for record in records:
        if record["gpu"] == GPU:
            by[record["technique"]][record["name"]] = record
    found = []
    for technique, bar in MFU_BARS.items():
        fastest = max(by[technique].values(), key=lambda record: record["mfu"], default={"mfu": None})
        words = [TECHNIQUES[technique].title, *([fastest["name"]] if "name" in fastest else [])]
        found.append(_entry(f"{', '.join(words)}: MFU", fastest["mfu"], "share", bar))
    full, lora = by["full"], by["lora"]
    ratio = min((lora[name]["tokens_per_s"] / full[name]["tokens_per_s"] for name in lora.keys() & full), default=None)
    found.append(_entry("LoRA over full, least of all variants: tokens per second", ratio, "ratio", LORA_OVER_FULL))
    return found


def _entry(figure: str, value: float | None, unit: str, bar: float) -> Entry:
    name = f"gpu, {MODEL} on one {GPU}, rows of {LENGTH:,} tokens, {figure}"
    return measured(name if value is not None else f"{name} {NOT_RUN}", value, unit, COMMAND, at_least=bar)
