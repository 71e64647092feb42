"""The planner's answer for a model that the closed form does not know: dry runs of each strategy, by memory alone."""

import json
import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace

from common.base.errors import BadInputError, NotPlannedError
from common.base.run_config import RunConfig
from common.base.specs import TECHNIQUES
from common.checks.dry_run import dry_run
from common.checks.run_command import command_of_run
from common.hardware.devices import CATALOGUE, CPU_DEVICE, GIB, Gpu
from common.models.families import experts_at_work, suited_to_model
from common.models.loading import model_without_weights
from common.planning.gpu_overhead import CONTEXT_GIB, GAP_SHARE, PASSING_PARTS, SPREAD_SHARE, ranks_gib_of
from common.planning.job import Job
from common.planning.plan_texts import outlined
from common.planning.step_speed import generation_of
from common.planning.terms import DeviceMemory, Term

SORTED_BY = "what fits; what is not tight; full fine-tuning, LoRA; memory, as dry runs show no time"


@dataclass(frozen=True)
class Tried:
    """A way to train, and what its dry runs showed of one device."""

    run: RunConfig
    memory: DeviceMemory  # at the peak, with what a GPU needs besides; its spread: what published peaks had on top
    verdict: str
    max_batch_size: int  # rows per device that fit: memory grows by as much for each

    @property
    def name(self) -> str:
        """`full, DDP, checkpointed`."""
        parts = [self.run.method.short, self.run.parallelism.label]
        return ", ".join(parts + ["checkpointed"] * self.run.gradient_checkpointing)


def answer_by_dry_runs(
    asked: Sequence[RunConfig], job: Job, gpu: Gpu, checkpointing: bool | None, unknown: str, as_json: bool
) -> int:
    """Print the runs of `asked`, best first; return 0 if one fits, else 1; refuse what dry runs do not know.

    `checkpointing`: None where gradient checkpointing is to be used if it does not fit, or only tightly, without.
    """
    for run in asked:
        if run.method.quantizes or not (run.parallelism.is_single or run.parallelism.replicates):
            raise NotPlannedError(f"{unknown} Dry runs stand in for lora and full, with single and ddp: pass these.")
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # what it says is no part of the JSON
        runs = [suited_to_model(run) for run in asked]
    tried = sorted((_try(run, job, gpu, checkpointing) for run in runs), key=_rank)
    said = [
        f"{unknown} Dry runs stand in: they show memory, not time, and neither QLoRA nor sharding.",
        f"{runs[0].model}: {experts_at_work(model_without_weights(runs[0]))}",
    ]
    best, may_fit = tried[0], tried[0].verdict != "no"
    memory = best.memory
    needs = f"{memory.peak_gib:.1f} GiB, safe with {memory.safe_gib:.1f}, of {gpu.memory_gib:.1f} on each {gpu.name}"
    fitting = f"{best.name}: {needs}; up to {best.max_batch_size} rows"
    advice = fitting if may_fit else f"Nothing fits. Nearest is {best.name}: {needs}"
    command, why_not = _command_of(best, gpu)
    if as_json:
        answer = {
            "model": runs[0].model,
            "figures": "projected",
            "sorted_by": SORTED_BY,
            "ranked": [_as_json(each, gpu) for each in tried],
            "recommendation": advice,
            "assumptions": said,
            "run": command or None,
        }
        print(json.dumps(answer, indent=2))
    else:
        table = f"{_table(tried, gpu)}\nsorted by {SORTED_BY}"
        last = f"Recommended: {advice}\nRun: {command or why_not}"
        print("\n\n".join([said[0], f"{said[1]}; every figure is projected", table, last]))
    return 0 if may_fit else 1


def _try(run: RunConfig, job: Job, gpu: Gpu, checkpointing: bool | None) -> Tried:
    """Take the dry runs; unless gradient checkpointing was asked for or not, it is used where memory is short."""
    print(f"dry run: {run.technique}, {run.parallel} ...", file=sys.stderr, flush=True)
    rows = job.batch.rows
    result, doubled = dry_run(run, job.batch), dry_run(run, replace(job.batch, rows=2 * rows))
    passing = sum(result.peak[part] for part in PASSING_PARTS)
    own_gib = CONTEXT_GIB + generation_of(gpu).workspace_gib + ranks_gib_of(gpu) * (run.devices > 1)
    parts = {**result.peak, "overhead": own_gib * GIB + GAP_SHARE * passing}
    terms = tuple(Term(part, "by dry run", "", size) for part, size in parts.items())
    memory = DeviceMemory(result.peak_segment, terms, spread=SPREAD_SHARE * passing)
    row_gib = (doubled.peak_gib - result.peak_gib) / rows
    max_rows = max(0, rows + math.floor((gpu.memory_gib - memory.safe_gib) / row_gib))
    if (verdict := memory.verdict_on(gpu)) == "yes" or checkpointing is not None:
        return Tried(run, memory, verdict, max_rows)
    return _try(replace(run, gradient_checkpointing=True), job, gpu, True)


def _rank(tried: Tried) -> tuple[int, int, float]:
    """What fits comes first, what is tight after what is not, then the better technique, then what needs less."""
    technique = list(TECHNIQUES).index(tried.run.technique) * (tried.verdict != "no")
    return ("yes", "tight", "no").index(tried.verdict), technique, tried.memory.peak_gib


def _command_of(best: Tried, gpu: Gpu) -> tuple[str, str]:
    """Return the command that starts the run, or why there is none."""
    if best.verdict == "no":
        return "", "nothing yet."
    run = replace(best.run, gpu=gpu.name if gpu in CATALOGUE else "")
    try:
        return command_of_run(run, "cpu" if gpu.name == CPU_DEVICE else "cuda"), ""
    except BadInputError as refused:
        return "", f"no run folder takes this: {refused}"


def _table(tried: Sequence[Tried], gpu: Gpu) -> str:
    rows = [
        [
            each.name,
            each.run.precision,
            each.verdict,
            f"{each.memory.peak_gib:.1f} to {each.memory.safe_gib:.1f} / {gpu.memory_gib:.1f}",
            each.max_batch_size or "-",
        ]
        for each in tried
    ]
    headers = ["strategy", "precision", "fits", "likely to safe\n/ GPU, GiB", "largest\nbatch"]
    return outlined(rows, headers, range(5))


def _as_json(tried: Tried, gpu: Gpu) -> dict[str, object]:
    device = {
        **{f"{part}_gib": gib for part, gib in tried.memory.parts_gib.items()},
        "peak_gib": tried.memory.peak_gib,
        "safe_gib": tried.memory.safe_gib,
        "capacity_gib": gpu.memory_gib,
        "fits": tried.verdict == "yes",
    }
    return {
        "technique": tried.run.technique,
        "parallel": tried.run.parallel,
        "precision": tried.run.precision,
        "gradient_checkpointing": tried.run.gradient_checkpointing,
        "per_device": [{"device": number, **device} for number in range(tried.run.devices)],
        "max_batch_size": tried.max_batch_size,
        **dict.fromkeys(("step_time_s", "tokens_per_s", "tokens_per_s_best", "cost_usd_per_epoch")),
        "why": f"by dry run: {tried.memory.peak_gib:.1f} of {gpu.memory_gib:.1f} GiB",
    }
