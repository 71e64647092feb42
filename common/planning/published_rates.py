"""Training rates that others published, each beside what the planner says of the same run.

`python -m bench.published` plans the runs of assets/published_rates.json, and writes what is read here. A rate has its
`source`, a `repository` and `page` on GitHub, a `label`, `technique`, `gpu`, its `generation`, `kernels`, `parameters`,
`tokens_per_s` of one GPU, the same `planned`, the `ratio` of these two, and operations per second over the GPU's dense
peak: `mfu`, and `share_of_peak` with those that checkpointing repeats.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from common.base.paths import REPOSITORY
from common.hardware.devices import Gpu
from common.planning.architectures import Architecture
from common.planning.job import Job
from common.planning.shares import Share
from common.planning.step_speed import GENERATIONS, generation_of
from common.planning.time_plan import Cluster, Speed, step_time

PLANNED_PATH = REPOSITORY / "assets" / "published_planned.json"
SIMILAR_SIZE = 4  # times as many parameters, or as few
MIXTURES_SLOWER = 1.5  # of four LoRA runs of Mixtral (fms-acceleration), one expert after another, the slowest had 0.68
SLOWER = 1.4  # times as long as planned: nine in ten published rates are no slower (docs/planner.md)

Rate = dict[str, Any]


@cache
def published_planned() -> dict[str, Any]:
    """Return what `bench.published` wrote: rates, and rows of tables."""
    return json.loads(PLANNED_PATH.read_text(encoding="utf-8"))


def published_rates() -> list[Rate]:
    """Return all rates, in the file's order."""
    return published_planned()["rates"]


@cache
def best_published(technique: str, generation: str, parameters: int) -> Rate | None:
    """Return the published run that reaches the largest share of its GPU's peak; None where there is none.

    Of runs with the technique, on a GPU of the generation, of models with a quarter to four times the parameters.
    """
    alike = [
        rate
        for rate in published_rates()
        if (rate["technique"], rate["generation"]) == (technique, generation)
        and parameters / SIMILAR_SIZE <= rate["parameters"] <= parameters * SIMILAR_SIZE
    ]
    return max(alike, key=lambda rate: rate["share_of_peak"], default=None)


def best_tokens_per_s(
    architecture: Architecture, job: Job, cluster: Cluster, shares: Sequence[Share], tokens_per_s: float
) -> float | None:
    """Return the tokens per second of all GPUs with the efficiency of the best published run; None where none is known.

    The job is planned with that run's kernels, and as much faster as that run was than planned; at least
    `tokens_per_s`, its own figure.
    """
    best = best_published(job.technique, generation_of(cluster.gpus[0]).name, architecture.parameters)
    if best is None or job.precision == "fp32" or architecture.experts:  # no mixture's rate is among them
        return None
    own_s, best_s = (
        published_step_s(architecture, replace(job, kernels=kernels), cluster, shares)
        for kernels in (job.kernels, best["kernels"])
    )
    return tokens_per_s * max(1.0, own_s / best_s / best["ratio"])


def published_step_s(architecture: Architecture, job: Job, cluster: Cluster, shares: Sequence[Share]) -> float:
    """Return the seconds of a step by the model of published rates alone, whatever was measured here."""
    return step_time(architecture, job, cluster, shares, [Speed(None, "")] * len(cluster.gpus)).total_s


def evidence(gpu: Gpu) -> str:
    """Return which published rates the speed of a GPU rests on, in words, and whether its memory is known."""
    return _evidence_of_speed(gpu) + "; its memory is estimated: no log of it is public" * gpu.memory_is_estimated


def _evidence_of_speed(gpu: Gpu) -> str:
    if own := sum(rate["gpu"] == gpu.name for rate in published_rates()):
        return f"{own} published rates are of it"
    generation = generation_of(gpu)
    alike = dict.fromkeys(rate["gpu"] for rate in published_rates() if rate["generation"] == generation.name)
    taken = generation.assumed or f"as of {', '.join(alike)}, which are alike"
    return f"no benchmark of this GPU: its share of the peak is assumed, {taken}"


def slowest(gpu: Gpu, architecture: Architecture) -> float:
    """Return how many times as long as planned a run takes at most, by the evidence for this card and kind of model.

    Nine in ten published rates are within `SLOWER`; where a share of the peak is assumed, it differs as much as
    `reached` does among generations.
    """
    times = SLOWER * (MIXTURES_SLOWER if architecture.experts else 1)
    if not generation_of(gpu).assumed:
        return times
    reached = [each.reached for each in GENERATIONS if not each.assumed]
    return times * max(reached) / min(reached)
