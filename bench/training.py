"""Seconds to the same validation loss: this repository's loop against what users would pick instead."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.apart import measured_apart
from bench.clock import Clock
from bench.entries import Entry, measured
from bench.recipe import TARGET_LOSSES, TECHNIQUES, Trial, material_of
from bench.tools import TOOLS

COMMAND = "python -m bench training"
SEEDS = {"short": (42, 43, 44), "long": (42, 43)}
# SFTTrainer as a user may set it; the soonest of them is the best-set one
SFT_SET = ("sft-best", "sft-grouped", "sft-packed")
QUICK_TOOLS, QUICK_ROWS = ("ours", "bare"), 16
TIMES_SOONEST, TIMES_BEST_SET_SFT, SHARE_OF_BARE = 1.0, 1.2, 0.95
# What a trial ended with: `seconds_to_loss` and `tokens_per_s`; None: the loss was not reached, or no epoch was
Outcome = dict[str, float | None]


def entries(quick: bool) -> list[Entry]:
    """Each tool's seconds to the target and tokens per second, and the ratios that have bars; `quick`: a little."""
    found = []
    for data, seeds in SEEDS.items():
        for technique in TECHNIQUES[:1] if quick else TECHNIQUES:
            tools, rows = (QUICK_TOOLS, QUICK_ROWS) if quick else (tuple(TOOLS), -1)
            outcomes = repeats(tools, seeds[:1] if quick else seeds, technique=technique, data=data, train_rows=rows)
            found += [*tool_entries(data, technique, outcomes), *ratio_entries(data, technique, outcomes)]
    return found


def repeats(tools: Sequence[str], seeds: Sequence[int], **trial: Any) -> dict[str, list[Outcome]]:
    """Each tool once per seed; the tools in turn, so that a drift hits all alike."""
    outcomes: dict[str, list[Outcome]] = {tool: [] for tool in tools}
    for seed in seeds:
        for tool in tools:
            outcomes[tool].append(measured_apart(train, **asdict(Trial(tool, seed=seed, **trial))))
    return outcomes


def train(**trial: Any) -> Outcome:
    """Train by the trial's tool, in a process of its own; return an outcome."""
    asked = Trial(**trial)
    clock = Clock(asked, material_of(asked))
    TOOLS[asked.tool](clock)
    return {"seconds_to_loss": clock.seconds_to_loss, "tokens_per_s": clock.tokens_per_s}


def name_of(data: str, technique: str) -> str:
    """How the names of a data set's entries begin."""
    return f"training, {technique}" + ("" if data == "short" else f", {data} rows")


def tool_entries(data: str, technique: str, outcomes: dict[str, list[Outcome]]) -> list[Entry]:
    """Seconds to the target and tokens per second of each tool."""
    target, found = f"validation loss {TARGET_LOSSES[data, technique]:g}", []
    for tool, trials in outcomes.items():
        name, seconds = f"{name_of(data, technique)}, {tool}", median(trials, "seconds_to_loss")
        to_loss = f"{name}: {target} not reached" if seconds is None else f"{name}: time to {target}"
        tokens = median(trials, "tokens_per_s")
        found.append(measured(to_loss, seconds, "s", COMMAND))
        found.append(measured(f"{name}: non-padding tokens", tokens, "tokens per s", COMMAND))
    return found


def median(trials: Sequence[Outcome], figure: str) -> float | None:
    """The median over the seeds, or None where a seed did not get there."""
    values = [trial[figure] for trial in trials]
    return None if None in values else statistics.median(values)


def ratio_entries(data: str, technique: str, outcomes: dict[str, list[Outcome]]) -> list[Entry]:
    """What has bars; nothing where not all tools ran."""
    if not {"ours", "bare", *SFT_SET} <= outcomes.keys():
        return []
    seconds = {tool: median(trials, "seconds_to_loss") for tool, trials in outcomes.items()}
    tokens = {tool: median(outcomes[tool], "tokens_per_s") for tool in ("ours", "bare")}
    soonest = _soonest(seconds, [tool for tool in seconds if tool not in ("bare", "ours")])
    best_set = _soonest(seconds, SFT_SET)
    name = name_of(data, technique)
    return [
        measured(f"{name}, {words}", None if None in (above, below) else above / below, "ratio", COMMAND, at_least=bar)
        for words, above, below, bar in (
            (f"time to the loss, the soonest other tool ({soonest}) over ours", seconds[soonest], seconds["ours"],
             TIMES_SOONEST),
            (f"time to the loss, the best-set SFTTrainer ({best_set}) over ours", seconds[best_set], seconds["ours"],
             TIMES_BEST_SET_SFT),
            ("ours against bare, tokens per second", tokens["ours"], tokens["bare"], SHARE_OF_BARE),
        )
    ]  # fmt: skip


def _soonest(seconds: dict[str, float | None], tools: Sequence[str]) -> str:
    """Which of `tools` reaches the loss first; the first one where none does."""
    return min(tools, key=lambda tool: math.inf if seconds[tool] is None else seconds[tool])
