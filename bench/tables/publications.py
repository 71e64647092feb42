"""The tables of the planner beside what others published: memory and times (1.1), MFU (bench/README.md)."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, itemgetter
from statistics import median

from bench.tables.table import Table
from common.base.paths import REPOSITORY
from common.planning import published_memory
from common.planning.published_memory import KINDS, LIKELY, errors_of, held_out_points, points_of, verdicts_on
from common.planning.published_rates import PublishedRate, excluded_rates, published_rates, source_name
from common.planning.shares import whole_model
from common.planning.step_speed import peak_tflops, step_flops
from common.records.store import Record
from common.reporting.columns import Column
from common.reporting.rows import Row, groups_of

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


def is_near(rate: PublishedRate) -> bool:
    """Return whether planned and published differ by less than a factor of `WITHIN`."""
    return abs(math.log(rate.ratio)) <= math.log(WITHIN)


def mfu_of(rate: PublishedRate) -> float:
    """Return the MFU of a published run by this project's count (`StepFlops.useful`)."""
    flops = step_flops(rate.architecture, rate.job, whole_model(rate.architecture)).useful / rate.job.batch.tokens
    return rate.tokens_per_s * flops / (peak_tflops(rate.gpu, rate.job) * 1e12)


# -- rows


def _memory_by_source(_: list[Record]) -> Iterator[Row]:
    """Yield each source and kind of figure, then all likely figures that were held out of the calibration."""
    for name, source in published_memory.sources().items():
        use = "held out" if source["held_out"] else "calibration"
        for kind in KINDS:
            if found := [point for point in points_of(name) if kind in point.figures]:
                errors = errors_of(found, (kind,))
                yield {
                    "source": source["title"],
                    "figure": kind.replace("nvidia_smi", "`nvidia-smi`"),
                    "errors": errors,
                    "use": use,
                }
    errors = errors_of(held_out_points(), LIKELY)
    yield {"source": "held out, together", "figure": "reserved", "errors": errors, "use": "bars: 8 %, 90 %"}


def _by_source() -> dict[str, list[PublishedRate]]:
    """Return the rates of each source, the one with most first."""
    by_source = groups_of(published_rates(), attrgetter("source"))
    return dict(sorted(by_source.items(), key=lambda named: -len(named[1])))


def _by_label() -> dict[str, PublishedRate]:
    return {rate.label: rate for rate in reversed(published_rates())}  # of several alike the first


def _model_flops(_: list[Record]) -> Iterator[Row]:
    """Yield the fastest trial here of each GPU and technique, then published runs on one GPU."""
    trials = json.loads((REPOSITORY / "bench" / "gpu_trials.json").read_text(encoding="utf-8"))
    for (gpu, technique), own in groups_of(trials, itemgetter("gpu", "technique")).items():
        fastest = max(own, key=lambda trial: trial["mfu"])
        yield {**fastest, "run": f"here: llama-3.1-8b, {technique}, {gpu}, {fastest['name']}", "own_mfu": "the same"}
    for label, own_mfu in OWN_MFU.items():
        rate = _by_label()[label]
        run = f"{source_name(rate.source)}: {label}"
        yield {"run": run, "tokens_per_s": rate.tokens_per_s, "mfu": mfu_of(rate), "own_mfu": own_mfu}


def _excluded_rates(_: list[Record]) -> list[Row]:
    """Return what was found and not used by reason, the one with most first."""
    by_reason = groups_of(excluded_rates(), itemgetter("reason"))
    return [
        {"reason": reason, "points": len(rates), "sources": {source_name(rate["source"]): None for rate in rates}}
        for reason, rates in sorted(by_reason.items(), key=lambda named: -len(named[1]))
    ]


# -- tables


def _of_ratios(title: str, value_of: Callable[[Sequence[float]], object], form: str) -> Column:
    return Column(title, lambda row: value_of([rate.ratio for rate in row["rates"]]), form)


RATE = (
    Column("Run", "label"),
    Column("Rate", "tokens_per_s", "{:,.0f}"),
    Column("Planned", "planned", "{:,.0f}"),
    Column("Ratio", "ratio", "{:.2f}"),
)
RATES_BY_SOURCE = {
    f"rates-{source}": Table(
        lambda _, rates=rates: rates,
        (*RATE, Column("Page", lambda rate: rate.where.rpartition("/")[2])),
        shared=("Page",),
    )
    for source, rates in _by_source().items()
}
"""Of docs/published_rates.md: every point of a source, with its page there."""
TABLES = {
    "published-memory": Table(
        _memory_by_source,
        (
            Column("Source", "source"),
            Column("Figure", "figure"),
            Column("Points", "errors.figures"),
            Column("Mean error", "errors.mean", "{:.1%}"),
            Column("Bias", "errors.bias", "{:+.1%}"),
            Column("Within 15 %", "errors.within_15", "{:.0%}"),
            Column("Use", "use"),
        ),
    ),
    # what the planner says of runs of which it is published whether they fitted
    "published-verdicts": Table(
        lambda _: [
            {"runs": "all sources", "verdicts": verdicts_on(published_memory.points())},
            {"runs": "held out", "verdicts": verdicts_on(held_out_points())},
        ],
        (
            Column("Runs", "runs"),
            Column("fitted", "verdicts.ran"),
            Column("of these yes", lambda row: row["verdicts"].ran - row["verdicts"].tight - row["verdicts"].refused),
            Column("tight", "verdicts.tight"),
            Column("no", "verdicts.refused"),
            Column("ran out of memory", "verdicts.ran_out"),
            Column("of these said to fit", "verdicts.false_fits"),
        ),
    ),
    "published-excluded": Table(
        lambda _: published_memory.excluded(), (Column("Not planned", "reason"), Column("Points", "points"))
    ),
    # per source, how far the planner's times are from the published ones
    "rates-by-source": Table(
        lambda _: [
            *({"source": source_name(source), "rates": rates} for source, rates in _by_source().items()),
            {"source": "all", "rates": published_rates()},
        ],
        (
            Column("Source", "source"),
            Column("Technique", lambda row: ", ".join(dict.fromkeys(rate.job.method.short for rate in row["rates"]))),
            Column("Points", lambda row: len(row["rates"])),
            _of_ratios("Ratio", median, "{:.2f}"),
            _of_ratios("Range", lambda ratios: f"{min(ratios):.2f} to {max(ratios):.2f}", "{}"),
            _of_ratios("Error", lambda ratios: median(abs(ratio - 1) for ratio in ratios), "{:.0%}"),
            Column("Near", lambda row: sum(map(is_near, row["rates"])) / len(row["rates"]), "{:.0%}"),
        ),
    ),
    # of models and GPUs that many have
    "rates-well-known": Table(lambda _: [_by_label()[label] for label in WELL_KNOWN], RATE),
    **RATES_BY_SOURCE,
    "rates-not-used": Table(
        _excluded_rates,
        (Column("Why not used", "reason"), Column("Points", "points"), Column("Sources", "sources", ", ".join)),
    ),
    "bench-mfu": Table(
        _model_flops,
        (
            Column("Run", "run"),
            Column("Tokens/s", "tokens_per_s", "{:,.0f}"),
            Column("MFU", "mfu", "{:.1%}"),
            Column("As the source counts", "own_mfu"),
        ),
    ),
}
