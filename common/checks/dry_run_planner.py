"""The planner's answer for a model that the closed form does not know: dry runs of each way, ranked by memory alone."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tabulate import tabulate

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.base.specs import PARALLELISMS, TECHNIQUES
from common.checks.dry_run import DryRun, dry_run
from common.hardware.devices import GIB, Gpu
from common.models.families import experts_at_work, suited_to_model
from common.models.loading import model_without_weights
from common.planning.gpu_overhead import CONTEXT_GIB, GAP_SHARE, NCCL_GIB, WORKSPACE_GIB
from common.planning.job import Job
from common.planning.plans import usual_precision
from common.planning.time_plan import Cluster

if TYPE_CHECKING:
    from common.checks.planner_command import PlannerOptions

PASSING = ("activations", "logits", "gradients")
"""Parts that are allocated and freed in every step, and leave gaps."""


@dataclass(frozen=True)
class Tried:
    """A way to train, and what its dry runs showed.

    Attributes:
        result: Of the batch that was asked for.
        row_gib: What one more row per device takes, by a dry run of twice the batch.
    """

    run: RunConfig
    result: DryRun
    row_gib: float
    gpu: Gpu

    @property
    def overhead_gib(self) -> float:
        """What a GPU needs besides: context, workspace, gaps, and NCCL's buffers where there are several."""
        gaps_gib = GAP_SHARE * sum(self.result.peak[part] for part in PASSING) / GIB
        return CONTEXT_GIB + WORKSPACE_GIB + gaps_gib + NCCL_GIB * (self.run.devices > 1)

    @property
    def peak_gib(self) -> float:
        """Of one device, with the overhead."""
        return self.result.peak_gib + self.overhead_gib

    @property
    def fits(self) -> bool:
        """Whether the GPU holds it."""
        return self.peak_gib <= self.gpu.memory_gib

    @property
    def max_batch_size(self) -> int:
        """Rows per device that fit: memory grows by as much for each."""
        rows = self.run.per_device_train_batch_size
        return max(0, rows + math.floor((self.gpu.memory_gib - self.peak_gib) / self.row_gib))

    @property
    def name(self) -> str:
        """For a table: `full, DDP, checkpointed`."""
        parts = [self.run.method.short, self.run.parallelism.label]
        return ", ".join(parts + ["checkpointed"] * self.run.gradient_checkpointing)


def answer_by_dry_runs(options: "PlannerOptions", job: Job, cluster: Cluster, unknown: str) -> int:
    """Print the ways that dry runs can show, best first; return 0 if one fits, else 1.

    Raises:
        BadInputError: the dry run does not know the technique or the parallelism that is asked for.
    """
    of_16_bits = [name for name, each in TECHNIQUES.items() if not each.quantizes]
    techniques = [options.technique] if options.technique else of_16_bits
    parallel = options.parallel or ("ddp" if len(cluster.gpus) > 1 else "single")
    can_run = PARALLELISMS[parallel].is_single or PARALLELISMS[parallel].replicates
    if not can_run or any(TECHNIQUES[technique].quantizes for technique in techniques):
        raise BadInputError(f"{unknown} Dry runs stand in for lora and full, with single and ddp: pass these.")
    runs = [_run_of(options, job, cluster, technique, parallel) for technique in techniques]
    tried = sorted((_try(run, job, cluster.gpus[0], options.gradient_checkpointing) for run in runs), key=_rank)
    said = [
        f"{unknown} Dry runs stand in: they show memory, not time, and neither QLoRA nor sharding.",
        f"{options.model}: {experts_at_work(model_without_weights(runs[0]))}",
    ]
    best = tried[0]
    needs = f"{best.peak_gib:.1f} of {best.gpu.memory_gib:.1f} GiB on each {best.gpu.name}"
    fitting = f"{best.name}: {needs}; up to {best.max_batch_size} rows"
    advice = fitting if best.fits else f"Nothing fits. Nearest is {best.name}: {needs}"
    if options.json:
        print(json.dumps({"model": options.model, "figures": "projected", "ranked": [_as_json(each) for each in tried],
                          "recommendation": advice, "assumptions": said}, indent=2))  # fmt: skip
    else:
        print("\n\n".join([said[0], f"{said[1]}; every figure is projected", _table(tried), advice]))
    return 0 if best.fits else 1


def _run_of(options: "PlannerOptions", job: Job, cluster: Cluster, technique: str, parallel: str) -> RunConfig:
    has_adapters = TECHNIQUES[technique].has_adapters
    adapters = {"lora_r": job.lora_rank, "lora_dropout": job.lora_dropout} if has_adapters else {}
    return suited_to_model(
        RunConfig(
            technique=technique,
            parallel=parallel,
            devices=len(cluster.gpus),
            model=options.model,
            weights="random",
            precision=options.precision or usual_precision(technique, cluster),
            optim=job.optimizer,
            attention=job.attention if job.attention != "flash" else "sdpa",
            gradient_checkpointing=bool(options.gradient_checkpointing),
            per_device_train_batch_size=job.batch.rows,
            target_modules=options.target_modules or ("all-linear" if has_adapters else "all"),
            **adapters,
        )
    )


def _try(run: RunConfig, job: Job, gpu: Gpu, checkpointing: bool | None) -> Tried:
    """Take the dry runs; unless gradient checkpointing was asked for or not, it is used where nothing fits without."""
    print(f"dry run: {run.technique}, {run.parallel} ...", file=sys.stderr, flush=True)
    result, doubled = dry_run(run, job.batch), dry_run(run, replace(job.batch, rows=2 * job.batch.rows))
    tried = Tried(run, result, (doubled.peak_gib - result.peak_gib) / job.batch.rows, gpu)
    if tried.fits or checkpointing is not None:
        return tried
    return _try(replace(run, gradient_checkpointing=True), job, gpu, True)


def _rank(tried: Tried) -> tuple[bool, int, float]:
    """What fits comes first, then the better technique, then the one that needs less."""
    return not tried.fits, list(TECHNIQUES).index(tried.run.technique) if tried.fits else 0, tried.peak_gib


def _table(tried: Sequence[Tried]) -> str:
    rows = [
        [
            each.name,
            each.run.precision,
            "yes" if each.fits else "no",
            f"{each.peak_gib:.1f} / {each.gpu.memory_gib:.1f}",
            each.max_batch_size or "-",
        ]
        for each in tried
    ]
    headers = ["way", "precision", "fits", "peak / GPU\nGiB", "largest\nbatch"]
    return tabulate(rows, headers, tablefmt="rounded_outline", disable_numparse=True)


def _as_json(tried: Tried) -> dict[str, object]:
    device = {
        **{f"{part}_gib": size / GIB for part, size in tried.result.peak.items()},
        "overhead_gib": tried.overhead_gib,
        "peak_gib": tried.peak_gib,
        "capacity_gib": tried.gpu.memory_gib,
        "fits": tried.fits,
    }
    return {
        "technique": tried.run.technique,
        "parallel": tried.run.parallel,
        "precision": tried.run.precision,
        "gradient_checkpointing": tried.run.gradient_checkpointing,
        "per_device": [{"device": number, **device} for number in range(tried.run.devices)],
        "max_batch_size": tried.max_batch_size,
        **dict.fromkeys(("step_time_s", "tokens_per_s", "cost_usd_per_epoch")),
        "why": f"by dry run: {tried.peak_gib:.1f} of {tried.gpu.memory_gib:.1f} GiB",
    }
