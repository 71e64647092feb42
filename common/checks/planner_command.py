"""The planner's answer to its options: a table and a recommendation, or JSON."""

import json
import math
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from common.base.command_line import refused_in_one_sentence
from common.base.errors import BadInputError, NotPlannedError
from common.base.run_config import RunConfig
from common.base.settings import MOST_EVALUATED_AT_ONCE
from common.base.specs import TECHNIQUES
from common.checks.planner_options import PlannerOptions, Tokens, cluster_of, evaluation_of, job_of, read_options
from common.checks.rent_command import rent_answer
from common.checks.run_command import last_lines, run_command
from common.checks.serve_command import serve_answer
from common.hardware.devices import Gpu
from common.hardware.prices import usual_price
from common.planning.architectures import Architecture, as_classifier, read_architecture
from common.planning.gpu_overhead import CONTEXT_GIB, GAP_SHARE, SPREAD_SHARE
from common.planning.job import Job
from common.planning.model_configs import usual_tiles
from common.planning.phase_times import ASSUMED_QUESTIONS, DISK_GB_PER_S
from common.planning.plan_texts import explanation, recommendation, table, why
from common.planning.plans import LONGEST_ROW, TOKENS_STEP, Plan, make_plan
from common.planning.published_rates import evidence
from common.planning.ranking import (
    LONGEST_FIRST,
    SORTED_BY,
    planned_techniques,
    ranked_plans,
    usual_precision,
    with_longest_rows,
)
from common.planning.time_plan import MEASURED, Calibration, Cluster, calibration_from, fast_enough_from_gbit
from common.records.store import kept_records

# what the contract's JSON says of a plan's job, by its own names
OF_JOB = ("technique", "parallel", "dp_replicate_size", "sp_size", "precision", "gradient_checkpointing",
          "micro_batches")  # fmt: skip
PIPELINES = (
    "pp: 1F1B, so that a stage holds at most as many micro-batches as stages follow it, itself included; GPipe where "
    "there are fewer micro-batches than stages"
)


@refused_in_one_sentence()
def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly
    sys.exit(answer(read_options()))


def answer(options: PlannerOptions) -> int:
    """Print the answer; 0 if the recommended plan fits, else 1."""
    if options.serve:
        return serve_answer(options)
    if options.asks_what_to_rent:
        return rent_answer(options)
    cluster, job = cluster_of(options), job_of(options)
    is_longest = isinstance(options.max_length, Tokens)
    try:
        architecture = read_architecture(options.model, options.model_revision)
    except NotPlannedError as unknown:
        if is_longest:
            raise NotPlannedError(f"--seq-len is max, which needs a plan: {unknown}") from unknown
        from common.checks.dry_run_planner import answer_by_dry_runs  # here: it imports torch

        faked = [name for name in job.batch.goal.techniques if not TECHNIQUES[name].quantizes]
        techniques = [options.technique] if options.technique else faked
        runs = [_run_of(options, job, cluster, technique) for technique in techniques]
        gpu, checkpointing = cluster.gpus[0], options.gradient_checkpointing
        return answer_by_dry_runs(runs, job, gpu, checkpointing, str(unknown), options.json)
    if options.classes:
        architecture = as_classifier(architecture, options.classes)
    if architecture.tower:
        options = replace(options, tiles=options.tiles or usual_tiles(options.model, options.model_revision))
        job = job_of(options)
    job = replace(job, evaluation=evaluation_of(options, architecture))
    calibration = calibration_from(kept_records(), job.batch.task)
    if is_longest:  # of training alone, and beyond what the model has learnt to read, where its positions allow it
        readable = LONGEST_ROW if architecture.family.is_llama_like else architecture.max_length
        if readable < TOKENS_STEP:
            raise NotPlannedError(
                f"--seq-len is max, in steps of {TOKENS_STEP}, but {architecture.name} reads {readable}: pass a number."
            )
        job, architecture = replace(job, evaluation=None), replace(architecture, max_length=readable)
    plans = ranked_plans(
        architecture,
        job,
        cluster,
        calibration,
        options.techniques,
        (options.parallel,) if options.parallel else None,
        options.gradient_checkpointing,
        options.precision,
        options.micro_batches,
        options.dp_replicate_size,
        options.sp_size or (1 if is_longest else None),
    )
    if is_longest:
        plans = with_longest_rows(plans, options.gradient_checkpointing, calibration, options.sp_size)
    sorted_by = LONGEST_FIRST if is_longest else SORTED_BY
    assumptions = _assumptions_of(plans, options)
    divided = next((plan for plan in plans if plan.job.parallelism.splits_rows), None)  # the best with data parallelism
    several = divided and cluster.nodes > 1
    alone, figures_alone = _one_machine_alone(divided, calibration) if several else ("", {})
    command_of = partial(run_command, model=options.model, model_revision=options.model_revision)
    if options.json:
        run = None
        with suppress(BadInputError):
            run = command_of(plans[0]) if plans[0].may_fit else None
        said = as_json(options.model, plans, assumptions, options.rows_per_epoch) | {"sorted_by": sorted_by}
        one_machine = {"one_machine": figures_alone} if alone else {}
        print(json.dumps(said | one_machine | {"run": run}, indent=2))
        return 0 if plans[0].may_fit else 1
    machines = f" on {cluster.nodes} machines" if cluster.nodes > 1 else ""
    names = " + ".join(f"{cluster.gpus.count(gpu)} x {gpu.name}" for gpu in dict.fromkeys(cluster.gpus))
    size = f"{architecture.parameters / 1e9:.2f}B parameters"
    parts = [
        f"{options.model}: {size}, {names}{machines}; every figure is projected",
        f"{table(plans, options.rows_per_epoch, is_longest)}\nsorted by {sorted_by}",
        recommendation(plans),
        explanation(plans[0]) if options.explain else "",
        alone,
        "\n".join(["assumed:", *(f"- {line}" for line in assumptions)]),
        "\n".join(last_lines(plans, options.rows_per_epoch, command_of)),
    ]
    print("\n\n".join(filter(None, parts)))
    return 0 if plans[0].may_fit else 1


def _one_machine_alone(plan: Plan, calibration: Calibration) -> tuple[str, dict[str, object]]:
    """Return a sentence, and the same for JSON, on how one of a plan's several machines does alone."""
    cluster, job = plan.cluster, plan.job
    gpus = cluster.gpus[: cluster.gpus_per_machine]
    sharing = job.parallel if len(gpus) > 1 else "single"
    sp_size = math.gcd(job.sp_size, len(gpus))
    own = replace(job, parallel=sharing, devices=len(gpus), dp_replicate_size=1, sp_size=sp_size)
    alone = make_plan(plan.architecture, own, replace(cluster, gpus=gpus, nodes=1, link=None), calibration)
    most_s = plan.rows_per_step / (alone.rows_per_step / alone.time.total_s)
    gbit = fast_enough_from_gbit(plan.architecture, job, cluster, most_s, calibration)
    figures = {"fits": alone.may_fit, "tokens_per_s": alone.tokens_per_s, "more_pay_from_gbit_per_s": gbit}
    if not alone.may_fit:
        return f"{plan.name}: one machine alone cannot hold it", figures
    pays = "pay at no speed of Ethernet" if gbit is None else f"pay from {gbit:.3g} Gbit/s between them"
    said = (
        f"{plan.name}: {cluster.nodes} machines train {plan.tokens_per_s:,.0f} tokens per s over "
        f"{cluster.slowest_link.name}, one alone {alone.tokens_per_s:,.0f}: more machines {pays}"
    )
    return said, figures


def as_json(model: str, plans: Sequence[Plan], assumptions: Sequence[str], rows_per_epoch: int) -> dict[str, Any]:
    """Return the contract's JSON; numbers are in GiB (2^30 bytes), seconds and US dollars."""
    return {
        "model": model,
        "figures": "projected",
        "sorted_by": SORTED_BY,
        "ranked": [
            {
                **{name: getattr(plan.job, name) for name in OF_JOB},
                "offload": "cpu" if plan.job.offload else "none",
                "max_length": plan.job.batch.length,
                "per_device": [
                    {
                        "device": number,
                        "gpu": gpu.name,
                        "moment": memory.moment,
                        "layers": sum(share.layers),
                        **{f"{part}_gib": gib for part, gib in memory.parts_gib.items()},
                        "allocated_gib": memory.allocated_gib,
                        "peak_gib": memory.peak_gib,
                        "safe_gib": memory.safe_gib,
                        "phases_gib": {phase.name: phase.memory.peak_gib for phase in phases},
                        "capacity_gib": gpu.memory_gib,
                        "fits": all(phase.memory.safe_gib <= gpu.memory_gib for phase in phases),
                    }
                    for number, (memory, gpu, share, phases) in enumerate(
                        zip(plan.devices, plan.cluster.gpus, plan.shares, plan.phases, strict=True)
                    )
                ],
                "highest_phase": plan.highest.phase.name,
                "training_peak_gib": plan.training_peak_gib,
                "run_peak_gib": plan.run_peak.memory.peak_gib,
                "rows_evaluated_at_once": plan.job.evaluation.rows if plan.job.evaluation else None,
                "host_gib": plan.host_gib,
                "host_phases_gib": plan.host_moments_gib,
                "loading_time_s": plan.phase_times and plan.phase_times.loading_s,
                "evaluation_time_s": plan.phase_times and plan.phase_times.answering_s,
                "evaluated_questions": plan.phase_times and plan.phase_times.questions,
                "max_batch_size": plan.max_batch_size,
                "step_time_s": plan.time.total_s,
                "tokens_per_s": plan.tokens_per_s,
                "tokens_per_s_best": plan.tokens_per_s_best,
                "epoch_time_s": plan.epoch_s(rows_per_epoch),
                "cost_usd_per_epoch": plan.epoch_usd(rows_per_epoch),
                "why": why(plan),
            }
            for plan in plans
        ],
        "recommendation": recommendation(plans),
        "assumptions": list(assumptions),
    }


def _assumptions_of(plans: Sequence[Plan], options: PlannerOptions) -> list[str]:
    best = plans[0]
    job, batch, link, tower = best.job, best.job.batch, best.cluster.slowest_link, best.architecture.tower
    learnt = f"with one of {batch.classes} labels each" if batch.classes else "learnt as a whole"
    learnt = "with two answers each" if batch.goal.compares else learnt
    learnt = f"of which an answer takes {batch.labelled:,}" if batch.goal.rewards else learnt
    summaries = f" with summaries of {batch.target_length:,}" if batch.target_length else ""
    pictures = f", of which a picture in {batch.tiles} squares takes {batch.tiles * tower.tokens:,}" if tower else ""
    rank = f", LoRA rank {job.lora_rank}" if any(plan.job.method.has_adapters for plan in plans) else ""
    speeds = zip(dict.fromkeys(best.cluster.gpus), best.speed_sources, strict=True)
    yours = "; name yours with --link" if best.cluster.nodes > 1 and not options.link else ""
    hybrid = {plan.job.sharing: plan for plan in plans if plan.job.dp_replicate_size > 1}
    said = [
        f"rows of {batch.length:,} tokens{summaries}{pictures}, {learnt}; {job.optimizer}, {job.attention} attention, "
        f"{job.kernels} kernels{rank}",
        *dict.fromkeys(f"speed of {source}" for plan in plans for source in plan.speed_sources),
        *(f"{gpu.name}: {evidence(gpu)}" for gpu, source in speeds if MEASURED not in source),
        f"overhead of a GPU: {CONTEXT_GIB} GiB context, {GAP_SHARE:.0%} of temporary memory for gaps, blocks that "
        f"only some moments use; safe: {SPREAD_SHARE:.0%} of it more, which 19 in 20 published peaks did not need",
        "memory as PyTorch's own kernels take it, also where Liger's or compiled ones are faster; expandable segments; "
        "batches are copied from pinned memory while the GPU computes",
        f"an epoch is {options.rows_per_epoch:,} rows; loading reads each weight once per machine, at {DISK_GB_PER_S} "
        f"GB/s; the test has {ASSUMED_QUESTIONS} questions",
        f"validated, and answered before and after training: as many rows at once as need no more than training, at "
        f"most {MOST_EVALUATED_AT_ONCE} ({best.name}: {job.evaluation.rows} on each GPU)"
        if job.evaluation
        else f"training alone is planned, and may take longer rows than answering; {options.model} has learnt to read "
        f"{read_architecture(options.model, options.model_revision).max_length:,} tokens",
        f"between GPUs: {link.name}, of which {link.gb_per_s:.3g} GB/s are reached{yours}"
        if len(best.devices) > 1
        else "",
        *_of_mixture(best.architecture, options),
        PIPELINES if any(plan.job.parallelism.pipelines for plan in plans) else "",
        *(
            f"{name}: hybrid sharding, {plan.job.dp_replicate_size} copies of the model, each sharded by "
            f"{plan.job.shard_ranks} GPUs and gathered by {plan.cluster.link_among(plan.job.shard_ranks).name}"
            for name, plan in hybrid.items()
        ),
        *(_price(gpu, options.usd_per_hour) for gpu in dict.fromkeys(best.cluster.gpus)),
    ]
    return list(filter(None, said))


def _of_mixture(architecture: Architecture, options: PlannerOptions) -> list[str]:
    if not architecture.experts:
        return []
    at_work = architecture.parameters - architecture.expert_weights * (1 - architecture.chosen / architecture.experts)
    said = [
        f"a mixture: all {architecture.experts} experts of each layer are held, and {architecture.chosen} work on a "
        f"token ({at_work / 1e9:.3g}B parameters); adapters are on attention alone; under autocast experts compute in "
        "fp32; its times are less certain: Mixtral's rates with Transformers' older kernels were 0.68 to 0.81 of these"
    ]
    parallels = options.parallel and (options.parallel,)
    planned = planned_techniques(architecture, options.techniques, parallels, options.gradient_checkpointing)
    why = "its experts in 4 bits need gradient checkpointing, and one device or ddp"
    return said + [f"{TECHNIQUES[name].label} is left out: {why}" for name in set(options.techniques) - set(planned)]


def _price(gpu: Gpu, given: float | None) -> str:
    if given:
        return f"{gpu.name}: {given} USD per hour, as given"
    price = usual_price(gpu)
    return f"{gpu.name}: {price.said}" if price else ""


def _run_of(options: PlannerOptions, job: Job, cluster: Cluster, technique: str) -> RunConfig:
    """Return the run that a dry run takes in the place of the closed form."""
    has_adapters, devices, summaries = TECHNIQUES[technique].has_adapters, len(cluster.gpus), job.batch.target_length
    adapters = {"lora_r": job.lora_rank, "lora_dropout": job.lora_dropout} if has_adapters else {}
    return RunConfig(
        technique=technique,
        task=job.batch.task,
        parallel=options.parallel or ("ddp" if devices > 1 else "single"),
        devices=devices,
        sp_size=options.sp_size or 1,
        model=options.model,
        model_revision=options.model_revision,
        weights="random",
        precision=options.precision or usual_precision(technique, cluster),
        optim=job.optimizer,
        attention=job.attention if job.attention != "flash" else "sdpa",
        gradient_checkpointing=bool(options.gradient_checkpointing),
        per_device_train_batch_size=job.batch.rows,
        target_modules=options.target_modules or ("all-linear" if has_adapters else "all"),
        **job.batch.lengths,
        **adapters,
        **({"max_target_length": summaries} if summaries else {}),
    )
