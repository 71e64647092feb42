"""Each tool's learning rate: the one of three that reaches the target in the fewest steps. `python -m bench.rates`

Steps are the same on every machine, so what was found is kept in `rates.json`, and the benchmark searches only for what
is not there.
"""

import argparse
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import get_args

from bench.recipe import MOST_STEPS, TARGET_LOSSES, DataSet, Technique, Trial
from bench.tools import TOOLS
from bench.trial_process import run_trial_process
from common.base.paths import REPOSITORY

RATES_PATH = REPOSITORY / "bench" / "rates.json"
CANDIDATES: dict[tuple[DataSet, Technique], tuple[float, ...]] = {
    ("short", "lora"): (5e-4, 1e-3, 2.5e-4),
    ("short", "full"): (2e-3, 1e-3, 4e-3),
    ("long", "lora"): (1e-3, 5e-4, 2e-3),
    ("long", "full"): (4e-3, 2e-3, 8e-3),
}
"""To choose from, the likeliest first: the others are given up where they take longer."""
SEARCH_SEED = 7
TAKEN_FROM = {
    "ours-grouped": "trainer-grouped",
    "sft-default": "trainer",
    "sft-best": "trainer",
    "sft-grouped": "trainer-grouped",
    "llama-factory": "trainer",
}
"""Same optimizer, and the same rows in each step: only rounding and speed differ."""


def rates_of(data: DataSet, technique: Technique, tools: list[str]) -> dict[str, float]:
    """The rate of each of `tools`, as it was found last; a search for those that have none comes first."""
    by = {tool: TAKEN_FROM.get(tool, tool) for tool in tools}
    missing = [tool for tool in dict.fromkeys(by.values()) if tool not in _kept().get(_key(data, technique), {})]
    if missing:
        search(data, technique, missing)
    found = _kept()[_key(data, technique)] if tools else {}
    return {tool: found[source] for tool, source in by.items()}


def search(data: DataSet, technique: Technique, tools: list[str]) -> None:
    """Find each tool's rate, as many tools at once as there are processors, and keep what was found."""
    with ThreadPoolExecutor(os.cpu_count()) as at_once:  # only steps are compared, so neighbours do no harm
        found = list(at_once.map(partial(best_rate, data, technique), tools))
    kept = _kept()
    kept.setdefault(_key(data, technique), {}).update(zip(tools, found, strict=True))
    RATES_PATH.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _kept() -> dict[str, dict[str, float]]:
    return json.loads(RATES_PATH.read_text("utf-8")) if RATES_PATH.exists() else {}


def _key(data: DataSet, technique: Technique) -> str:
    return f"{data} rows, {technique}"


def best_rate(data: DataSet, technique: Technique, tool: str) -> float:
    """The candidate that reaches the target in the fewest steps; the first one where none does."""
    best, fewest_steps = CANDIDATES[data, technique][0], MOST_STEPS[data]
    for rate in CANDIDATES[data, technique]:
        most_steps = int(fewest_steps) + 1
        trial = Trial(tool, technique, rate, SEARCH_SEED, TARGET_LOSSES[data, technique], most_steps, data=data)
        steps = run_trial_process(trial).steps_to_loss
        if steps is not None and steps < fewest_steps:
            best, fewest_steps = rate, steps
    return best


def main() -> None:
    """Search again, whatever is kept."""
    searched = [tool for tool in TOOLS if tool not in TAKEN_FROM]
    parser = argparse.ArgumentParser(prog="python -m bench.rates", description=__doc__)
    parser.add_argument("--data", nargs="+", choices=MOST_STEPS, default=MOST_STEPS)
    parser.add_argument("--technique", nargs="+", choices=get_args(Technique), default=get_args(Technique))
    parser.add_argument("--tool", nargs="+", choices=searched, default=searched)
    options = parser.parse_args()
    for data, technique in product(options.data, options.technique):
        search(data, technique, options.tool)


if __name__ == "__main__":
    main()
