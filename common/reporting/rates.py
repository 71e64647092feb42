"""The tables of the planner's times beside published rates (1.1), and of docs/published_rates.md."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import pandas as pd

from common.base.paths import REPOSITORY
from common.planning.published_rates import PublishedRate, excluded_rates, published_rates, source_name
from common.planning.shares import whole_model
from common.planning.step_speed import peak_tflops, step_flops
from common.records.store import Record
from common.reporting.rows import Row, as_table, percent

WITHIN = 1.5
"""A ratio of planned to published counts as near from one over this on, up to this."""
WELL_KNOWN = (
    "qwen2.5-7b, LoRA, 1 x H100 80GB SXM, 2 x 4,096, fused",
    "llama-3-8b, LoRA, 1 x H100 80GB SXM, 2 x 4,096, fused",
    "llama-3-8b, full, 8 x H100 96GB HBM2e (fsdp), 2 x 8,192, half checkpointed, compiled",
    "llama-3-8b, full, 1 x H200 141GB SXM, 4 x 4,096, checkpointed, compiled",
    "llama-3-8b, full, 1 x A100 80GB SXM, 8 x 2,048, checkpointed, plain",
    "llama-3-8b, LoRA, 1 x A100 80GB SXM, 8 x 2,048, checkpointed, plain",
    "llama-3-8b, QLoRA, 1 x A100 80GB SXM, 4 x 4,096, checkpointed, fused",
    "llama-3-8b, full, 1 x RTX 4090 24GB, 2 x 2,048, checkpointed, compiled",
    "llama-3-8b, LoRA, 1 x RTX 4090 24GB, 2 x 2,048, checkpointed, compiled",
    "llama-3-8b, QLoRA, 1 x RTX 4090 24GB, 2 x 2,048, checkpointed, compiled",
    "llama-2-7b, LoRA, 2 x RTX 3090 24GB (ddp), 4 x 2,048, checkpointed, plain",
    "llama-3.2-3b, LoRA, 1 x L40S 48GB, 4 x 210, plain",
    "llama-2-70b, QLoRA, 4 x RTX A5000 24GB (fsdp), 1 x 2,048, checkpointed, plain",
)
"""Published runs by their label: models and GPUs that many have. (Of the RTX A6000 nothing credible is published.)"""

OWN_MFU = {
    "llama-3-8b, full, 1 x H200 141GB SXM, 4 x 4,096, checkpointed, compiled": "57.8%, 6 N + 12 layers * channels * T",
    "llama-3-8b, LoRA, 1 x H100 80GB SXM, 2 x 4,096, fused": "40.6%, 402 of 989 TFLOP/s",
    "qwen2.5-7b, LoRA, 1 x H100 80GB SXM, 2 x 4,096, fused": "42.8%, 423 of 989 TFLOP/s",
}
"""By the label of a run on one GPU, the MFU that its source has."""
GPU_TRIALS_FILE = REPOSITORY / "bench" / "gpu_trials.json"


def is_near(rate: PublishedRate) -> bool:
    """Return whether planned and published differ by less than a factor of `WITHIN`."""
    return abs(math.log(rate.ratio)) <= math.log(WITHIN)


def by_source(rates: Sequence[PublishedRate]) -> dict[str, list[PublishedRate]]:
    """Return the rates of each source, the one with most first."""
    counted = Counter(rate.source for rate in rates).most_common()
    return {source: [rate for rate in rates if rate.source == source] for source, _ in counted}


@as_table
def sources_table(_: list[Record]) -> Iterator[Row]:
    """Return the table of 1.1: per source, how far the planner's times are from the published ones."""
    rates = published_rates()
    for source, own in by_source(rates).items():
        yield {"Source": source_name(source), **_row(own)}
    yield {"Source": "all", **_row(rates)}


def _row(rates: Sequence[PublishedRate]) -> Row:
    ratios = sorted(rate.ratio for rate in rates)
    techniques = dict.fromkeys(rate.job.method.short for rate in rates)
    return {
        "Technique": ", ".join(techniques),
        "Points": str(len(rates)),
        "Ratio": f"{median(ratios):.2f}",
        "Range": f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
        "Error": percent(median(abs(ratio - 1) for ratio in ratios)),
        "Near": percent(sum(map(is_near, rates)) / len(rates)),
    }


@as_table
def well_known_table(_: list[Record]) -> Iterator[Row]:
    """Return the table of 1.1: some published rates of models and GPUs that many have, and what the planner says."""
    known = {rate.label: rate for rate in reversed(published_rates())}  # of several alike the first
    for label in WELL_KNOWN:
        yield {"Run": label, **_compared(known[label])}


@as_table
def mfu_table(_: list[Record]) -> Iterator[Row]:
    """Return the table of bench/README.md: MFU of published runs on one GPU, and of the fastest here, by one count."""
    trials = json.loads(GPU_TRIALS_FILE.read_text(encoding="utf-8"))
    for gpu, technique in dict.fromkeys((trial["gpu"], trial["technique"]) for trial in trials):
        own = [trial for trial in trials if (trial["gpu"], trial["technique"]) == (gpu, technique)]
        fastest = max(own, key=lambda trial: trial["mfu"])
        run = f"here: llama-3.1-8b, {technique}, {gpu}, {fastest['name']}"
        yield _used(run, fastest["tokens_per_s"], fastest["mfu"], "the same")
    known = {rate.label: rate for rate in reversed(published_rates())}
    for label, own_mfu in OWN_MFU.items():
        rate = known[label]
        yield _used(f"{source_name(rate.source)}: {label}", rate.tokens_per_s, mfu_of(rate), own_mfu)


def mfu_of(rate: PublishedRate) -> float:
    """Return the MFU of a published run by this project's count (`StepFlops.useful`)."""
    flops = step_flops(rate.architecture, rate.job, whole_model(rate.architecture)).useful / rate.job.batch.tokens
    return rate.tokens_per_s * flops / (peak_tflops(rate.gpu, rate.job) * 1e12)


def _used(run: str, tokens_per_s: float, mfu: float, own_mfu: str) -> Row:
    return {"Run": run, "Tokens/s": f"{tokens_per_s:,.0f}", "MFU": f"{mfu:.1%}", "As the source counts": own_mfu}


def tables_by_source() -> dict[str, Callable[[list[Record]], pd.DataFrame]]:
    """Return the tables of docs/published_rates.md by name: every point of a source, with its page there."""

    @as_table
    def table(_: list[Record], rates: Sequence[PublishedRate]) -> Iterator[Row]:
        for rate in rates:
            yield {"Run": rate.label, **_compared(rate), "Page": rate.where.rpartition("/")[2]}

    return {f"rates-{source}": partial(table, rates=rates) for source, rates in by_source(published_rates()).items()}


def _compared(rate: PublishedRate) -> Row:
    return {
        "Rate": f"{rate.tokens_per_s:,.0f}",
        "Planned": f"{rate.planned:,.0f}",
        "Ratio": f"{rate.ratio:.2f}",
    }


@as_table
def excluded_table(_: list[Record]) -> Iterator[Row]:
    """Return the table of docs/published_rates.md: what was found and not used, counted by reason."""
    excluded = excluded_rates()
    for reason, count in Counter(rate["reason"] for rate in excluded).most_common():
        sources = dict.fromkeys(source_name(rate["source"]) for rate in excluded if rate["reason"] == reason)
        yield {"Why not used": reason, "Points": str(count), "Sources": ", ".join(sources)}
