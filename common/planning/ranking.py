"""All ways to train that make sense for a question, best first."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from common.base.errors import BadInputError
from common.base.specs import PARALLELISMS, TECHNIQUES
from common.hardware.devices import CPU_DEVICE
from common.planning.architectures import Architecture
from common.planning.job import BatchShape, Job, Precision
from common.planning.plans import LONGEST_ROW, Plan, make_plan
from common.planning.time_plan import Calibration, Cluster

# projected times are not good to a tenth: nearer than that, the simpler parallelism is better
ABOUT_AS_FAST = 0.9
SORTED_BY = (
    "what fits; full fine-tuning, LoRA, QLoRA; speed, where of those within "
    f"{1 - ABOUT_AS_FAST:.0%} of the fastest the simplest is on top; tight fits come last, where another "
    "is about as fast and not tight"
)


def ranked_plans(
    architecture: Architecture,
    asked: Job,
    cluster: Cluster,
    calibration: Calibration,
    techniques: Iterable[str] = tuple(TECHNIQUES),
    parallels: Iterable[str] | None = None,
    checkpointing: bool | None = None,
    precision: Precision | None = None,
    micro_batches: int | None = None,
    dp_replicate_size: int | None = None,
    sp_size: int | None = None,
) -> list[Plan]:
    """Return plans, best first: what fits, then by quality (full, LoRA, QLoRA), then by speed, then by simplicity.

    Of plans about as fast as the fastest of their technique, the simplest comes first; a tight plan after all that are
    not, where one of these is about as fast. Where ranks cannot have rows of their own, FSDP that offloads follows; then what does
    not fit, by how much it lacks.

    None: of `parallels` those that make sense, of `precision` each technique's usual one, of `checkpointing` where it
    does not fit without, of `micro_batches` as many as make sense, of `dp_replicate_size` one copy of the model, and
    with fsdp another plan with one on each machine, of `sp_size` 1, and where no row fits and helps all of a machine.
    """
    plans = []
    for technique in techniques:
        usual = parallels or _usual_parallelisms(technique, asked.batch, cluster, sp_size or 1)
        with_copies = [(each, copies) for each in usual for copies in _copies(each, cluster, dp_replicate_size)]
        for parallel, copies in with_copies:
            sharing, number_format = PARALLELISMS[parallel], precision or usual_precision(technique, cluster)
            # fp16 needs scaled losses, which sharding and pipelines lack here
            lacks_scaling = number_format == "fp16-mixed" and (sharing.shards or sharing.pipelines)
            has_too_few_layers = sharing.splits_layers and len(cluster.gpus) > architecture.layers
            is_on_several = sharing.layers_in_turn and cluster.nodes > 1
            if parallels is None and (lacks_scaling or has_too_few_layers or is_on_several):
                continue
            if is_on_several:
                raise BadInputError(f"--parallel {parallel} is one process on one machine: pass --nodes 1, or pp.")
            parts = (parallels and micro_batches) or _micro_batches(asked.batch.rows, parallel, cluster)
            has_too_few = sharing.pipelines and parts < len(cluster.gpus)
            job = replace(
                asked,
                technique=technique,
                parallel=parallel,
                devices=len(cluster.gpus),
                dp_replicate_size=copies,
                precision=number_format,
                sp_size=sp_size or 1,
                micro_batches=parts,
                schedule="gpipe" if has_too_few else asked.schedule,  # 1F1B needs one for each stage
            )
            plans.append(_made(architecture, job, cluster, calibration, checkpointing))
            is_too_long = sp_size is None and not (plans[-1].may_fit or plans[-1].max_batch_size)
            if is_too_long and (ranks := ranks_for_rows(plans[-1])):
                shared = _made(architecture, replace(job, sp_size=ranks), cluster, calibration, checkpointing)
                plans += [shared] * shared.trains
    found = [plan for plan in plans if plan.may_fit]
    resort = [] if any(plan.job.parallelism.splits_rows for plan in found) else _offloaded(plans, calibration)
    return [*_best_first(found), *resort,
            *sorted((plan for plan in plans if not plan.may_fit), key=lambda plan: plan.shortfall_gib)]  # fmt: skip


def _made(
    architecture: Architecture, job: Job, cluster: Cluster, calibration: Calibration, checkpointing: bool | None
) -> Plan:
    """Return the job's plan; with `checkpointing` None that with it where it does not fit without."""
    found: list[Plan] = []
    for on in [False, True] if checkpointing is None else [checkpointing]:
        tried = replace(job, gradient_checkpointing=on)
        found.append(make_plan(architecture, tried, cluster, calibration).with_rows_chosen())
        if found[-1].fits:
            break
    return next((plan for verdict in ("yes", "tight") for plan in found if plan.verdict == verdict), found[-1])


def ranks_for_rows(plan: Plan) -> int:
    """Return how many ranks may share the rows of a plan in which each has its own: all of a machine; 0: none."""
    job, ranks = plan.job, plan.cluster.gpus_per_machine
    shares = job.parallelism.shares_rows and job.batch.goal.learns_answers and job.attention != "eager"
    return ranks if shares and ranks in plan.architecture.sp_sizes[1:] else 0


class Longest(NamedTuple):
    """How long a row may be in a way to train, the plan of such a row (0 tokens: of a short one), and what limits it."""

    tokens: int
    plan: Plan
    limit: str


def longest_rows(plans: Iterable[Plan], checkpointing: bool | None, calibration: Calibration) -> list[Longest]:
    """Return each plan's longest row, with gradient checkpointing unless it is False; longest first.

    Plans in which ranks have rows of their own come with one more, in which a machine's ranks share each row.
    """
    found = []
    for plan in plans:
        for ranks in filter(None, (plan.job.sp_size, plan.job.sp_size == 1 and ranks_for_rows(plan))):
            job = replace(plan.job, gradient_checkpointing=checkpointing is not False, sp_size=ranks)
            of_way = make_plan(plan.architecture, job, plan.cluster, calibration)
            tokens = of_way.longest_row
            there = make_plan(plan.architecture, of_way.job_with_row(tokens), plan.cluster, calibration)
            found.append(
                Longest(
                    tokens, there, "the search ends here" if tokens == LONGEST_ROW else there.fullest[0].largest_parts
                )
            )
    return sorted(found, key=lambda each: -each.tokens)


def _offloaded(plans: Sequence[Plan], calibration: Calibration) -> list[Plan]:
    """Return FSDP's plans that fit with all that a GPU holds in the host's memory, least of it first."""
    tried = [
        make_plan(plan.architecture, replace(plan.job, offload=True), plan.cluster, calibration).with_rows_chosen()
        for plan in plans
        if plan.job.parallelism.uses_fsdp and not plan.job.offload and plan.cluster.gpus[0].name != CPU_DEVICE
    ]
    return sorted((plan for plan in tried if plan.fits), key=lambda plan: plan.host_gib)


def _usual_parallelisms(technique: str, batch: BatchShape, cluster: Cluster, sp_size: int) -> tuple[str, ...]:
    task = batch.goal
    suggested = [name for name, each in PARALLELISMS.items() if technique in each.suggested_for]
    has_own_list = task.folder_for_one != "" and technique in task.techniques  # else the planner's suggestions hold
    usual = task.parallelisms if has_own_list else suggested
    usual = [name for name in usual if PARALLELISMS[name].is_single == (len(cluster.gpus) == 1)]
    return tuple(name for name in usual if sp_size == 1 or len(usual) == 1 or PARALLELISMS[name].shares_rows)


def _copies(parallel: str, cluster: Cluster, asked: int | None) -> tuple[int, ...]:
    """Return how many sharded copies of the model to plan: one, or hybrid sharding's one on each machine."""
    if not PARALLELISMS[parallel].uses_fsdp:
        return (1,)
    if asked is not None:
        return (asked,)
    return (1, cluster.nodes) if 1 < cluster.nodes < len(cluster.gpus) else (1,)


def _micro_batches(rows: int, parallel: str, cluster: Cluster) -> int:
    """Return the most equal parts of a batch, up to four per stage, beyond which the bubble hardly shrinks."""
    most = min(rows, 4 * len(cluster.gpus)) if PARALLELISMS[parallel].pipelines else 1
    return max(parts for parts in range(1, most + 1) if rows % parts == 0)


def _best_first(plans: list[Plan]) -> list[Plan]:
    fastest_roomy = max((plan.tokens_per_s for plan in plans if plan.fits), default=0.0)
    fastest = {plan.job.technique: plan.tokens_per_s for plan in sorted(plans, key=lambda plan: plan.tokens_per_s)}
    techniques, simplest_first = list(TECHNIQUES), list(PARALLELISMS)

    def rank(plan: Plan) -> tuple[bool, int, bool, float, float]:
        is_needless = plan.verdict == "tight" and fastest_roomy >= ABOUT_AS_FAST * plan.tokens_per_s
        is_slow = plan.tokens_per_s < ABOUT_AS_FAST * fastest[plan.job.technique]
        simplicity = 0 if is_slow else simplest_first.index(plan.job.parallel)
        return is_needless, techniques.index(plan.job.technique), is_slow, simplicity, -plan.tokens_per_s

    return sorted(plans, key=rank)


def usual_precision(technique: str, cluster: Cluster) -> Precision:
    """Return a technique's usual precision: of weights that are updated fp32, of frozen ones 16 bits."""
    if all(gpu.tflops_dense["bf16"] for gpu in cluster.gpus):
        return "bf16" if TECHNIQUES[technique].has_adapters else "bf16-mixed"
    return "fp16-mixed" if all(gpu.tflops_dense["fp16"] for gpu in cluster.gpus) else "fp32"
