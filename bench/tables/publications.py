"""The tables of the planner beside what others published: memory and times (1.1), MFU (bench/README.md)."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from statistics import median

from bench.tables.table import Table
from common.base.paths import REPOSITORY
from common.base.specs import TECHNIQUES
from common.planning.published_rates import published_planned, published_rates
from common.records.store import Record
from common.reporting.columns import Column
from common.reporting.rows import Row, groups_of

WITHIN = 1.5  # a ratio of planned to published counts as near from one over this on, up to this
# Published runs by their label: models and GPUs that many have. (Of the RTX A6000 nothing credible is published.)
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

# By the label of a run on one GPU, the MFU that its source has
OWN_MFU = {
    "llama-3-8b, full, 1 x H200 141GB SXM, 4 x 4,096, checkpointed, compiled": "57.8%, 6 N + 12 layers * channels * T",
    "llama-3-8b, LoRA, 1 x H100 80GB SXM, 2 x 4,096, fused": "40.6%, 402 of 989 TFLOP/s",
    "qwen2.5-7b, LoRA, 1 x H100 80GB SXM, 2 x 4,096, fused": "42.8%, 423 of 989 TFLOP/s",
}


def is_near(rate: Row) -> bool:
    """Return whether planned and published differ by less than a factor of `WITHIN`."""
    return abs(math.log(rate["ratio"])) <= math.log(WITHIN)


# -- rows


def _by_source() -> dict[str, list[Row]]:
    """Return the rates of each source, the one with most first."""
    by_source = groups_of(published_rates(), itemgetter("source"))
    return dict(sorted(by_source.items(), key=lambda named: -len(named[1])))


def _by_label() -> dict[str, Row]:
    return {rate["label"]: rate for rate in reversed(published_rates())}  # of several alike the first


def _model_flops(_: list[Record]) -> Iterator[Row]:
    """Yield the fastest trial here of each GPU and technique, then published runs on one GPU."""
    trials = json.loads((REPOSITORY / "bench" / "gpu_trials.json").read_text(encoding="utf-8"))
    for (gpu, technique), own in groups_of(trials, itemgetter("gpu", "technique")).items():
        fastest = max(own, key=lambda trial: trial["mfu"])
        yield {**fastest, "run": f"here: llama-3.1-8b, {technique}, {gpu}, {fastest['name']}", "own_mfu": "the same"}
    for label, own_mfu in OWN_MFU.items():
        rate = _by_label()[label]
        run = f"{rate['repository']}: {label}"
        yield {"run": run, "tokens_per_s": rate["tokens_per_s"], "mfu": rate["mfu"], "own_mfu": own_mfu}


# -- tables


def _planned(name: str, *columns: Column) -> Table:
    """Return a table of rows that `bench.published` wrote."""
    return Table(lambda _: published_planned()[name], columns)


def _of_ratios(title: str, value_of: Callable[[Sequence[float]], object], form: str) -> Column:
    return Column(title, lambda row: value_of([rate["ratio"] for rate in row["rates"]]), form)


RATE = (
    Column("Run", "label"),
    Column("Rate", "tokens_per_s", "{:,.0f}"),
    Column("Planned", "planned", "{:,.0f}"),
    Column("Ratio", "ratio", "{:.2f}"),
)
# Of docs/published_rates.md: every point of a source, with its page there
RATES_BY_SOURCE = {
    f"rates-{source}": Table(lambda _, rates=rates: rates, (*RATE, Column("Page", "page")), shared=("Page",))
    for source, rates in _by_source().items()
}
TABLES = {
    "published-memory": _planned(
        "memory",
        Column("Source", "source"),
        Column("Figure", "figure"),
        Column("Points", "figures"),
        Column("Mean error", "mean", "{:.1%}"),
        Column("Bias", "bias", "{:+.1%}"),
        Column("Within 15 %", "within_15", "{:.0%}"),
        Column("Use", "use"),
    ),
    # what the planner says of runs of which it is published whether they fitted
    "published-verdicts": _planned(
        "verdicts",
        Column("Runs", "runs"),
        Column("fitted", "fitted"),
        Column("of these yes", "yes"),
        Column("tight", "tight"),
        Column("no", "no"),
        Column("ran out of memory", "ran_out"),
        Column("of these said to fit", "said_to_fit"),
    ),
    # the longest rows that others ran, beside the longest that is planned to fit
    "published-longest": _planned(
        "longest_rows",
        Column("Llama 8B, full fine-tuning", "run"),
        Column("Ran with", "tokens", "{:,}"),
        Column("Planned: likely", "likely", "{:,}"),
        Column("safe", "safe", "{:,}"),
        Column("Error", "error", "{:+.0%}"),
    ),
    "published-longest-excluded": _planned(
        "longest_rows_not_planned", Column("Not planned", "reason"), Column("Points", "points")
    ),
    "published-excluded": _planned("memory_not_planned", Column("Not planned", "reason"), Column("Points", "points")),
    # per source, how far the planner's times are from the published ones
    "rates-by-source": Table(
        lambda _: [
            *({"source": rates[0]["repository"], "rates": rates} for rates in _by_source().values()),
            {"source": "all", "rates": published_rates()},
        ],
        (
            Column("Source", "source"),
            Column(
                "Technique",
                lambda row: ", ".join(dict.fromkeys(TECHNIQUES[rate["technique"]].short for rate in row["rates"])),
            ),
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
    "rates-not-used": _planned(
        "rates_not_used",
        Column("Why not used", "reason"),
        Column("Points", "points"),
        Column("Sources", "sources", ", ".join),
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
