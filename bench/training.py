"""Seconds to the same validation loss: this repository's trainer against what users would pick instead."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.entries import Entry, measured
from bench.rates import CANDIDATES, rates_of
from bench.recipe import MOST_STEPS, TARGET_LOSSES, DataSet, Technique, Trial
from bench.trial_process import LLAMA_FACTORY_PYTHON, Outcome, peak_bytes_of, python_of, run_trial_process

SEEDS: dict[DataSet, tuple[int, ...]] = {"short": (42, 43, 44), "long": (42, 43)}
ONCE: dict[DataSet, tuple[str, ...]] = {
    "short": ("sft-default",),
    "long": ("sft-default", "sft-best", "trainer", "llama-factory", "ours-grouped"),
}
"""Tools that are run with the first seed alone: what pads or recomputes most takes longest, and comes last anyway.
(`ours-grouped` is compared with the same seed of `ours`.)"""
ONLY_LONG = ("ours-grouped",)
"""Tools that are run on long rows alone, whose lengths differ."""
OURS = ("ours", "ours-grouped")
SFT_SET = ("sft-best", "sft-grouped", "sft-packed")
"""SFTTrainer as a user may set it; the soonest of them is the best-set one."""

PEAK_RATE = 1e-3  # any: bytes do not depend on it
MIB = 2**20
TIMES_SFT_BEST, TIMES_BEST_SET_SFT, SHARE_OF_BARE = 1.3, 1.2, 0.95


@dataclass(frozen=True)
class Scale:
    """How much is measured: all of it, or a little to see that it works."""

    seeds: dict[DataSet, tuple[int, ...]]
    most_steps: dict[DataSet, int]
    train_rows: int
    at_best_rates: bool


FULL_SCALE = Scale(SEEDS, MOST_STEPS, train_rows=-1, at_best_rates=True)
QUICK_SCALE = Scale(
    dict.fromkeys(SEEDS, SEEDS["short"][:1]), {"short": 3, "long": 2}, train_rows=16, at_best_rates=False
)
QUICK_TOOLS = ("ours", "bare")


def entries(data: DataSet, technique: Technique, tools: list[str], scale: Scale) -> list[Entry]:
    """Each tool's seconds to the target and tokens per second, and the ratios that have bars."""
    tools = [tool for tool in tools if data == "long" or tool not in ONLY_LONG]
    known = [tool for tool in tools if python_of(tool)]
    likeliest = dict.fromkeys(known, CANDIDATES[data, technique][0])
    rates = rates_of(data, technique, known) if scale.at_best_rates else likeliest
    outcomes = repeats(data, technique, rates, scale)
    peaks = peaks_of(technique, known) if data == "long" else {}
    command = f"python -m bench training --data {data} --technique {technique}"
    figures: list[Entry] = []
    for tool in tools:
        alone = f"{command} --tool {tool}"
        figures += tool_entries(data, technique, tool, outcomes.get(tool), alone)
        if tool in peaks:
            name = f"{name_of(data, technique)}, {tool}: peak of all tensors, of the longest rows"
            figures.append(measured(name, peaks[tool] / MIB, "MiB", alone))
    ratios = ratio_entries(data, technique, outcomes, command) + order_entries(data, technique, outcomes, command)
    return figures + ratios


def name_of(data: DataSet, technique: Technique) -> str:
    """How the names of a data set's entries begin."""
    return f"training, {technique}" + ("" if data == "short" else f", {data} rows")


def repeats(data: DataSet, technique: Technique, rates: dict[str, float], scale: Scale) -> dict[str, list[Outcome]]:
    """Each tool at its rate, once per seed; the tools in turn, so that a drift hits all alike."""
    outcomes: dict[str, list[Outcome]] = {tool: [] for tool in rates}
    for turn, seed in enumerate(scale.seeds[data]):
        for tool, rate in rates.items():
            if turn and tool in ONCE[data]:
                continue
            target, steps = TARGET_LOSSES[data, technique], scale.most_steps[data]
            trial = Trial(tool, technique, rate, seed, target, steps, scale.train_rows, data)
            outcomes[tool].append(run_trial_process(trial))
    return outcomes


def peaks_of(technique: Technique, tools: list[str]) -> dict[str, int]:
    """Each tool's bytes in a step of the longest rows.

    Grouped tools are left out: grouping does not change this batch.
    """
    tools = [tool for tool in tools if not tool.endswith("-grouped")]
    trials = [Trial(tool, technique, PEAK_RATE, SEEDS["long"][0], 0.0, 0, data="long") for tool in tools]
    return dict(zip(tools, peak_bytes_of(trials), strict=True))


def tool_entries(
    data: DataSet, technique: Technique, tool: str, outcomes: list[Outcome] | None, command: str
) -> list[Entry]:
    """A tool's seconds to the target and its tokens per second; no `outcomes`: it was not run."""
    name = f"{name_of(data, technique)}, {tool}"
    if outcomes is None:
        return [measured(f"{name}: not run ({LLAMA_FACTORY_PYTHON} names no Python)", None, "s", command)]
    seconds, tokens = _median_seconds(outcomes), _median_tokens(outcomes)
    target = f"validation loss {TARGET_LOSSES[data, technique]:g}"
    to_loss = f"{name}: time to {target}" if seconds is not None else f"{name}: {target} not reached"
    return [
        measured(to_loss, seconds, "s", command),
        measured(f"{name}: non-padding tokens", tokens, "tokens per s", command),
    ]


def _median_seconds(outcomes: list[Outcome]) -> float | None:
    """The median over the seeds, or None where a seed did not get there."""
    seconds = [outcome.seconds_to_loss for outcome in outcomes]
    return None if None in seconds else statistics.median(seconds)


def _median_tokens(outcomes: list[Outcome]) -> float | None:
    tokens = [outcome.tokens_per_s for outcome in outcomes]
    return None if None in tokens else statistics.median(tokens)


def ratio_entries(data: DataSet, technique: Technique, outcomes: dict[str, list[Outcome]], command: str) -> list[Entry]:
    """What has bars; nothing where a tool that a bar compares with did not run."""
    if not {"ours", "bare", *SFT_SET} <= outcomes.keys():
        return []
    seconds = {tool: _median_seconds(trials) for tool, trials in outcomes.items()}
    soonest = _soonest(seconds, [tool for tool in seconds if tool not in ("bare", *OURS)])
    best_set = _soonest(seconds, SFT_SET)
    bars = {
        f"the soonest other tool ({soonest})": (soonest, 1.0),
        f"the best-set SFTTrainer ({best_set})": (best_set, TIMES_BEST_SET_SFT),
        **({"sft-best": ("sft-best", TIMES_SFT_BEST)} if data == "short" else {}),
    }
    name = f"{name_of(data, technique)}, ours against"

    def times_as_soon(other: str, ratio: float | None, bar: float) -> Entry:
        return measured(f"{name} {other}, times as soon at the loss", ratio, "ratio", command, at_least=bar)

    times = [times_as_soon(other, _ratio(seconds[tool], seconds["ours"]), bar) for other, (tool, bar) in bars.items()]
    tokens = {tool: _median_tokens(outcomes[tool]) for tool in ("ours", "bare")}
    share = _ratio(tokens["ours"], tokens["bare"])
    return [
        *times,
        measured(f"{name} bare, tokens per second", share, "ratio", command, at_least=SHARE_OF_BARE),
    ]


def order_entries(data: DataSet, technique: Technique, outcomes: dict[str, list[Outcome]], command: str) -> list[Entry]:
    """Whether random order is as soon at the loss as rows of like length; nothing where one of them did not run."""
    if not {*OURS} <= outcomes.keys():
        return []
    grouped = outcomes["ours-grouped"]
    of_same_seeds = _median_seconds(outcomes["ours"][: len(grouped)])
    name = f"{name_of(data, technique)}, ours against rows of like length (ours-grouped), times as soon at the loss"
    return [measured(name, _ratio(_median_seconds(grouped), of_same_seeds), "ratio", command, at_least=1.0)]


def _soonest(seconds: dict[str, float | None], tools: Sequence[str]) -> str:
    """Which of `tools` reaches the loss first; the first one where none does."""
    return min(tools, key=lambda tool: math.inf if seconds[tool] is None else seconds[tool])


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below
