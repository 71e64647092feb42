"""All ways to train that make sense for a question, best first."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from common.base.errors import BadInputError
from common.base.specs import PARALLELISMS, TECHNIQUES
from common.hardware.devices import CPU_DEVICE
from common.planning.architectures import Architecture, sp_sizes
from common.planning.job import Job, Precision, why_not_in_4_bits
from common.planning.plans import Plan, make_plan
from common.planning.time_plan import Calibration, Cluster

# projected times are not good to a tenth: nearer than that, the simpler parallelism is better
ABOUT_AS_FAST = 0.9
LONGEST_FIRST = "the longest row that is safe to fit in training, with gradient checkpointing"
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
    not, where one of these is about as fast. Where ranks cannot divide rows, FSDP that offloads follows; then what
    does not fit, by how much it lacks.

    None: of `parallels` those that make sense, of `precision` each technique's usual one, of `checkpointing` where it
    does not fit without, of `micro_batches` as many as make sense, of `dp_replicate_size` one copy of the model, and
    with fsdp another plan with one on each machine, of `sp_size` 1, and where not even one row fits all of a machine.
    """
    plans = []
    for technique in planned_techniques(architecture, techniques, parallels, checkpointing):
        usual = parallels or _usual_parallelisms(technique, asked, cluster, sp_size or 1)
        with_copies = [(each, copies) for each in usual for copies in _copies(each, cluster, dp_replicate_size)]
        for parallel, copies in with_copies:
            sharing, number_format = PARALLELISMS[parallel], precision or usual_precision(technique, cluster)
            # fp16 needs scaled losses, which sharding and pipelines lack here
            lacks_scaling = number_format == "fp16-mixed" and (sharing.shards or sharing.pipelines)
            has_too_few_layers = sharing.splits_layers and len(cluster.gpus) > architecture.layers
            is_on_several = sharing.layers_in_turn and cluster.nodes > 1
            is_whole = sharing.pipelines and architecture.family.positions != ""
            has_4_bit_experts = architecture.experts > 0 and TECHNIQUES[technique].quantizes
            is_left_out = is_whole or (has_4_bit_experts and bool(why_not_in_4_bits(sharing, True)))
            if parallels is None and (lacks_scaling or has_too_few_layers or is_on_several or is_left_out):
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
                micro_batches=parts,
                schedule="gpipe" if has_too_few else asked.schedule,  # 1F1B needs one for each stage
            ).suited_to(architecture)
            for ranks in (sp_size,) if sp_size else _sp_sizes(architecture, job, cluster):
                is_last_resort = ranks > 1 and sp_size is None
                if is_last_resort and (plans[-1].may_fit or plans[-1].max_batch_size):
                    continue
                found: list[Plan] = []
                for on in [False, True][has_4_bit_experts:] if checkpointing is None else [checkpointing]:
                    tried = replace(job, gradient_checkpointing=on, sp_size=ranks)
                    found.append(make_plan(architecture, tried, cluster, calibration).with_rows_chosen())
                    if found[-1].fits:
                        break
                in_turn = (plan for verdict in ("yes", "tight") for plan in found if plan.verdict == verdict)
                plan = next(in_turn, found[-1])
                plans += [plan] * (plan.trains or not is_last_resort)
    found = [plan for plan in plans if plan.may_fit]
    resort = [] if any(plan.job.parallelism.splits_rows for plan in found) else _offloaded(plans, calibration)
    return [*_best_first(found), *resort,
            *sorted((plan for plan in plans if not plan.may_fit), key=lambda plan: plan.shortfall_gib)]  # fmt: skip


def planned_techniques(
    architecture: Architecture, techniques: Iterable[str], parallels: Iterable[str] | None, checkpointing: bool | None
) -> tuple[str, ...]:
    """Return the techniques to rank: of several without QLoRA, where it cannot hold a mixture's experts as asked."""
    asked = tuple(techniques)
    why_not = [why_not_in_4_bits(PARALLELISMS[each], checkpointing is not False) for each in parallels or ("single",)]
    fit = tuple(name for name in asked if not (architecture.experts and any(why_not) and TECHNIQUES[name].quantizes))
    return fit or asked


def with_longest_rows(
    plans: Iterable[Plan], checkpointing: bool | None, calibration: Calibration, sp_size: int | None = None
) -> list[Plan]:
    """Return each plan with the longest row that fits in training (or a short one, where none does), longest first.

    With gradient checkpointing, unless it is False. Without `sp_size`, plans whose ranks do not share rows also with
    all of a machine that can.
    """
    found = []
    for plan in plans:
        for ranks in (sp_size,) if sp_size else _sp_sizes(plan.architecture, plan.job, plan.cluster):
            job = replace(plan.job, gradient_checkpointing=checkpointing is not False, sp_size=ranks)
            way = make_plan(plan.architecture, job, plan.cluster, calibration)
            longest = way.job_with_row(way.longest_row or 1)
            found.append(make_plan(plan.architecture, longest, plan.cluster, calibration))
    return sorted(found, key=lambda plan: (plan.fits, plan.job.batch.length), reverse=True)


def _sp_sizes(architecture: Architecture, job: Job, cluster: Cluster) -> tuple[int, ...]:
    """Return how many ranks may share the rows of the job, where it does not say: 1, and as many as a machine has."""
    sizes = [n for n in sp_sizes(architecture.heads, architecture.kv_heads) if cluster.gpus_per_machine % n == 0]
    return tuple(dict.fromkeys((1, max(sizes)))) if job.may_share_rows and job.sp_size == 1 else (job.sp_size,)


def _offloaded(plans: Sequence[Plan], calibration: Calibration) -> list[Plan]:
    """Return FSDP's plans that fit with all that a GPU holds in the host's memory, least of it first."""
    tried = [
        make_plan(plan.architecture, replace(plan.job, offload=True), plan.cluster, calibration).with_rows_chosen()
        for plan in plans
        if plan.job.parallelism.uses_fsdp and not plan.job.offload and plan.cluster.gpus[0].name != CPU_DEVICE
    ]
    return sorted((plan for plan in tried if plan.fits), key=lambda plan: plan.host_gib)


def _usual_parallelisms(technique: str, asked: Job, cluster: Cluster, sp_size: int) -> tuple[str, ...]:
    task, in_tiles = asked.batch.goal, asked.tiled_mlp or asked.activation_offloading
    suggested = [name for name, each in PARALLELISMS.items() if technique in each.suggested_for]
    has_own_list = task.folder_for_one != "" and technique in task.techniques  # else the planner's suggestions hold
    usual = task.parallelisms if has_own_list else suggested
    usual = [name for name in usual if PARALLELISMS[name].is_single == (len(cluster.gpus) == 1)]
    if len(usual) > 1:
        usual = [name for name in usual if sp_size == 1 or PARALLELISMS[name].shares_rows]
        usual = [name for name in usual if not in_tiles or PARALLELISMS[name].calls_whole_layers]
    return tuple(usual)


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
