"""Seconds to the same validation loss: this repository's trainer against what users would pick instead."""

import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from bench.entries import Entry, measured
from bench.recipe import MOST_EPOCHS, Technique, Trial
from bench.tools import TOOLS
from common.base.paths import REPOSITORY

TARGET_LOSSES: dict[Technique, float] = {"lora": 0.1, "full": 0.05}
"""Validation loss to reach, in nats per answer token: one to three epochs at a good learning rate."""
LEARNING_RATES: dict[Technique, tuple[float, ...]] = {"lora": (5e-4, 1e-3, 2.5e-4), "full": (2e-3, 1e-3, 4e-3)}
"""To choose from, the likeliest first: the others are given up where they take longer."""
SEARCH_SEED = 7
SEEDS = (42, 43, 44)
RATE_TAKEN_FROM = {"sft-default": "sft-best"}
"""Same optimizer and rows; only the arithmetic's precision differs, and a search would take a quarter of an hour."""
LLAMA_FACTORY_PYTHON = "BENCH_LLAMA_FACTORY_PYTHON"
"""Environment variable: the Python of an environment in which `pip install llamafactory` was done."""

TIMES_SFT_BEST, SHARE_OF_BARE = 1.3, 0.95


@dataclass(frozen=True)
class Scale:
    """How much is measured: all of it, or a little to see that it works."""

    learning_rates: dict[Technique, tuple[float, ...]]
    seeds: tuple[int, ...]
    most_steps: int
    train_rows: int


FULL_SCALE = Scale(LEARNING_RATES, SEEDS, most_steps=MOST_EPOCHS * 52, train_rows=-1)
QUICK_SCALE = Scale({"lora": (1e-3,), "full": (1e-3,)}, SEEDS[:1], most_steps=6, train_rows=33)
QUICK_TOOLS = ("ours", "bare")


@dataclass(frozen=True)
class Outcome:
    """What a trial ended with."""

    seconds_to_loss: float | None
    steps_to_loss: float | None
    tokens_per_s: float | None


def entries(technique: Technique, tools: list[str], scale: Scale) -> list[Entry]:
    """Each tool's seconds to the target and tokens per second, and the ratios that have bars."""
    known = [tool for tool in tools if python_of(tool)]
    rates = best_rates(technique, known, scale)
    outcomes = repeats(technique, rates, scale)
    figures: list[Entry] = []
    for tool in tools:
        command = f"python -m bench training --technique {technique} --tool {tool}"
        figures += tool_entries(technique, tool, outcomes.get(tool), command)
    return figures + ratio_entries(technique, outcomes, f"python -m bench training --technique {technique}")


def python_of(tool: str) -> str | None:
    """The Python that has `tool`, or None where nobody named one."""
    return os.environ.get(LLAMA_FACTORY_PYTHON) if tool == "llama-factory" else sys.executable


def best_rates(technique: Technique, tools: list[str], scale: Scale) -> dict[str, float]:
    """Each tool's learning rate that reaches the target in the fewest steps (of one tool, all steps take as long)."""
    searching = sorted({RATE_TAKEN_FROM.get(tool, tool) for tool in tools}, key=list(TOOLS).index)
    if len(scale.learning_rates[technique]) == 1:
        return dict.fromkeys(tools, scale.learning_rates[technique][0])
    with ThreadPoolExecutor(os.cpu_count()) as at_once:  # only steps are compared here, so neighbours do no harm
        found = dict(
            zip(searching, at_once.map(lambda tool: _best_rate(technique, tool, scale), searching), strict=True)
        )
    return {tool: found[RATE_TAKEN_FROM.get(tool, tool)] for tool in tools}


def _best_rate(technique: Technique, tool: str, scale: Scale) -> float:
    best, fewest_steps = scale.learning_rates[technique][0], scale.most_steps
    for rate in scale.learning_rates[technique]:
        trial = _trial(technique, tool, rate, SEARCH_SEED, scale)
        steps = run_trial_process(replace(trial, most_steps=int(fewest_steps) + 1)).steps_to_loss
        if steps is not None and steps < fewest_steps:
            best, fewest_steps = rate, steps
    return best


def _trial(technique: Technique, tool: str, rate: float, seed: int, scale: Scale) -> Trial:
    return Trial(tool, technique, rate, seed, TARGET_LOSSES[technique], scale.most_steps, scale.train_rows)


def repeats(technique: Technique, rates: dict[str, float], scale: Scale) -> dict[str, list[Outcome]]:
    """Each tool at its best rate, once per seed; the tools in turn, so that a drift hits all alike."""
    outcomes: dict[str, list[Outcome]] = {tool: [] for tool in rates}
    for seed in scale.seeds:
        for tool, rate in rates.items():
            outcomes[tool].append(run_trial_process(_trial(technique, tool, rate, seed, scale)))
    return outcomes


def run_trial_process(trial: Trial) -> Outcome:
    """A trial in a process of its own, with one thread.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    start_s = time.perf_counter()
    done = subprocess.run(
        [str(python_of(trial.tool)), "-m", "bench.trial", json.dumps(trial.to_dict())],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"The trial {trial} failed:\n{done.stderr[-3000:]}")
    outcome = Outcome(**json.loads(done.stdout.splitlines()[-1]))
    reached = "not reached" if outcome.seconds_to_loss is None else f"{outcome.seconds_to_loss:.1f} s"
    print(
        f"{trial.technique} {trial.tool}, rate {trial.learning_rate:g}, seed {trial.seed}: validation loss "
        f"{trial.target_loss:g} {reached} ({time.perf_counter() - start_s:.0f} s in all)",
        file=sys.stderr,
        flush=True,
    )
    return outcome


def tool_entries(technique: Technique, tool: str, outcomes: list[Outcome] | None, command: str) -> list[Entry]:
    """A tool's seconds to the target and its tokens per second; no `outcomes`: it was not run."""
    name = f"training, {technique}, {tool}"
    if outcomes is None:
        return [measured(f"{name}: not run ({LLAMA_FACTORY_PYTHON} names no Python)", None, "s", command)]
    seconds, tokens = _median_seconds(outcomes), _median_tokens(outcomes)
    target = f"validation loss {TARGET_LOSSES[technique]:g}"
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


def ratio_entries(technique: Technique, outcomes: dict[str, list[Outcome]], command: str) -> list[Entry]:
    """What has bars; nothing where a tool that a bar compares with did not run."""
    if not {"ours", "bare", "sft-best"} <= outcomes.keys():
        return []
    seconds = {tool: _median_seconds(trials) for tool, trials in outcomes.items()}
    others = {tool: taken for tool, taken in seconds.items() if tool not in ("ours", "bare") and taken is not None}
    soonest = min(others, key=others.get, default="sft-best")
    tokens = {tool: _median_tokens(outcomes[tool]) for tool in ("ours", "bare")}
    name = f"training, {technique}, ours against"
    return [
        measured(
            f"{name} the soonest other tool ({soonest}), times as soon at the loss",
            _ratio(seconds[soonest], seconds["ours"]),
            "ratio",
            command,
            at_least=1.0,
        ),
        measured(
            f"{name} sft-best, times as soon at the loss",
            _ratio(seconds["sft-best"], seconds["ours"]),
            "ratio",
            command,
            at_least=TIMES_SFT_BEST,
        ),
        measured(
            f"{name} bare, tokens per second",
            _ratio(tokens["ours"], tokens["bare"]),
            "ratio",
            command,
            at_least=SHARE_OF_BARE,
        ),
    ]


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below
