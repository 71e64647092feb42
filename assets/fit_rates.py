"""Fit the constants of common/planning/step_speed.py to the points of published_rates.json, and print how they do.

    python -m assets.fit_rates                       all points
    python -m assets.fit_rates peft torchtitan       without these sources, and how the fit does on them

The error of a point is the logarithm of planned over published, at most 0.7, so that a few odd points weigh little. A
source weighs as the root of its points. Constants go up and down by turns, in smaller and smaller steps, from values
that are wrong on purpose. It takes half a minute on one core.
"""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from bench.published import PublishedRun, beside_planned, published_runs
from common.planning import step_speed

STEPS = (1.3, 1.1, 1.03)
MOST = 0.7  # of a point's error
SINGLE = ("ATTENTION_REACHED", "UNPACKING_BYTES", "LAUNCH_S")
GENERATIONS = {each.name: each for each in step_speed.GENERATIONS}
START = {"ATTENTION_REACHED": 0.5, "UNPACKING_BYTES": 10.0, "LAUNCH_S": 20e-6, "fp32": 0.7}
START |= dict.fromkeys(GENERATIONS, 0.7)
WEIGHTS = {source: count**-0.5 for source, count in Counter(rate.source for rate in published_runs()).items()}


def take(constants: dict[str, float]) -> None:
    """Let the model have these constants."""
    for name in SINGLE:
        setattr(step_speed, name, constants[name])
    step_speed.GENERATIONS = tuple(
        replace(each, reached=constants[name], reached_fp32=constants["fp32"]) for name, each in GENERATIONS.items()
    )


def ratios(rates: Sequence[PublishedRun]) -> list[float]:
    """Return planned over published, with the constants that the model has now."""
    return [beside_planned(rate)["ratio"] for rate in rates]


def loss(constants: dict[str, float], rates: Sequence[PublishedRun]) -> float:
    """Return the weighted mean of the points' errors."""
    take(constants)
    weights = [WEIGHTS[rate.source] for rate in rates]
    errors = [min(abs(math.log(ratio)), MOST) for ratio in ratios(rates)]
    return sum(map(math.prod, zip(weights, errors, strict=True))) / sum(weights)


def fitted(rates: Sequence[PublishedRun]) -> dict[str, float]:
    """Return the constants with the least loss; no share of a peak above 1."""
    constants = dict(START)
    lowest = loss(constants, rates)
    for step in STEPS:
        improves = True
        while improves:
            improves = False
            for name in constants:
                for factor in (step, 1 / step):
                    tried = {**constants, name: constants[name] * factor}
                    is_share = name not in SINGLE
                    if (is_share and tried[name] > 1) or (found := loss(tried, rates)) > lowest - 2e-5:
                        continue
                    constants, lowest, improves = tried, found, True
    take(constants)
    return constants


def said(rates: Sequence[PublishedRun]) -> str:
    """Return how far the model is off, in words."""
    off = ratios(rates)
    near = sum(1 / 1.5 <= ratio <= 1.5 for ratio in off) / len(off)
    return f"{len(off)} points, median error {median(abs(ratio - 1) for ratio in off):.1%}, {near:.1%} within 1.5 x"


def main(held_out: Sequence[str]) -> None:
    """Fit, and print."""
    rates = published_runs()
    print("constants as they are:", said(rates))
    used = [rate for rate in rates if rate.source not in held_out]
    constants = fitted(used)
    print("fitted:", ", ".join(f"{name} {value:.3g}" for name, value in constants.items()))
    print("fitted to:", said(used))
    if rest := [rate for rate in rates if rate.source in held_out]:
        print("held out:", said(rest))


if __name__ == "__main__":
    main(sys.argv[1:])
