"""Plans of runs: memory, time and cost with every technique and parallelism; all numbers are projected."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from tabulate import tabulate

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.base.settings import MOST_EVALUATED_AT_ONCE
from common.base.specs import PARALLELISMS, TECHNIQUES
from common.hardware.devices import CPU_DEVICE, GIB, Gpu, cpu_device, find_gpu
from common.planning.architectures import Architecture
from common.planning.between_steps import hidden_bytes
from common.planning.device_maps import (
    answering_shares,
    balanced_shares,
    even_shares,
    read_device_map,
    shares_of_map,
    shares_that_fit,
)
from common.planning.gpu_overhead import memory_with_overhead
from common.planning.host_memory import host_moments
from common.planning.job import BatchShape, EvaluationShape, Job, Precision
from common.planning.phase_times import PhaseTimes, phase_times
from common.planning.phases import TRAINING, Phase, phases_of
from common.planning.published_rates import best_tokens_per_s
from common.planning.run_jobs import architecture_of_run, job_of_run, with_tiles
from common.planning.searches import largest
from common.planning.shares import Share, part_of_rank, sees, stages_of, whole_model
from common.planning.terms import DeviceMemory, Term
from common.planning.time_plan import Cluster, StepTime, calibration_from, parse_link, speed_of, step_time
from common.planning.tower_activations import TowerActivations
from common.records.store import kept_records

LARGEST_BATCH = 4096  # beyond it nobody asks
DEFAULT_ROWS_PER_EPOCH = 10_000
# projected times are not good to a tenth: nearer than that, the simpler parallelism is better
ABOUT_AS_FAST = 0.9
SORTED_BY = (
    "what fits; full fine-tuning, LoRA, QLoRA; speed, where of those within "
    f"{1 - ABOUT_AS_FAST:.0%} of the fastest the simplest is on top; last of what fits is what is tight, where another "
    "is about as fast and not tight"
)


class Highest(NamedTuple):
    """A device, and the phase in which it needs most."""

    device: int
    gpu: Gpu
    phase: Phase

    @property
    def share(self) -> float:
        """Of the device's memory, by the safe figure."""
        return self.phase.memory.safe_gib / self.gpu.memory_gib

    @property
    def likely_share(self) -> float:
        """The same by the likely figure."""
        return self.phase.memory.peak_gib / self.gpu.memory_gib


@dataclass(frozen=True)
class Plan:
    """A job on a cluster: memory per device, time and cost, all projected.

    Attributes:
        shares: What each device holds.
        devices: The memory of each device.
        placed_by_hand: `shares` was given, not searched: another batch size has the same.
    """

    architecture: Architecture
    job: Job
    cluster: Cluster
    shares: tuple[Share, ...]
    devices: tuple[DeviceMemory, ...]
    time: StepTime
    speed_sources: tuple[str, ...]
    placed_by_hand: bool = False

    @cached_property
    def phases(self) -> tuple[tuple[Phase, ...], ...]:
        """Each device's phases; training alone where the job has no evaluation."""
        stages = stages_of(self.architecture, self.job)
        is_alone, numbers = self.job.parallelism.in_one_process, range(len(self.shares))
        merges = [is_alone or number < stages for number in numbers]  # the first rank, or group of ranks
        reloads = [merging or stages > 1 for merging in merges]  # every group compares
        parts = answering_shares(self.architecture, stages) if stages > 1 else (None,)
        of_devices = [parts[number % stages] for number in numbers]
        devices = list(zip(self.shares, self.cluster.gpus, reloads, merges, of_devices, strict=True))
        known = {device: phases_of(self.architecture, self.job, *device) for device in dict.fromkeys(devices)}
        return tuple(known[device] for device in devices)

    @cached_property
    def highest(self) -> Highest:
        """The device and the phase in which a device is fullest, by the safe figure."""
        return max(self._each_phase(), key=lambda each: each.share)

    @cached_property
    def highest_likely(self) -> Highest:
        """The same by the likely figure."""
        return max(self._each_phase(), key=lambda each: each.likely_share)

    def _each_phase(self) -> list[Highest]:
        return [
            Highest(number, gpu, phase)
            for number, (gpu, phases) in enumerate(zip(self.cluster.gpus, self.phases, strict=True))
            for phase in phases
        ]

    @property
    def training_peak_gib(self) -> float:
        """What the fullest device is likely to need in training."""
        return max(memory.peak_gib for memory in self.devices)

    @property
    def run_peak_gib(self) -> float:
        """The same in the run's highest phase."""
        return max(each.phase.memory.peak_gib for each in self._each_phase())

    @property
    def higher_phase(self) -> str:
        """Which phase takes more than training, and how much; empty = none does."""
        highest = max(self._each_phase(), key=lambda each: each.phase.memory.peak_gib).phase
        return "" if highest.name == TRAINING else f"{highest.name} takes {highest.memory.peak_gib:.1f} GiB"

    @property
    def fits(self) -> bool:
        """Whether every device is safe to hold its part in every phase: published peaks were hardly ever higher."""
        return self.highest.share <= 1

    @property
    def may_fit(self) -> bool:
        """Whether every device is likely to hold its part in every phase."""
        return self.highest_likely.likely_share <= 1

    @property
    def trains(self) -> bool:
        """Whether every device is likely to hold its part of a training step, whatever the other phases take."""
        gpus = self.cluster.gpus
        return all(memory.peak_gib <= gpu.memory_gib for memory, gpu in zip(self.devices, gpus, strict=True))

    @property
    def verdict(self) -> str:
        """`yes`: it fits; `tight`: it is likely to, but what PyTorch's allocator wastes may decide; `no`."""
        return "yes" if self.fits else "tight" if self.may_fit else "no"

    @cached_property
    def host_moments(self) -> dict[str, list[Term]]:
        """By phase, what the fullest machine's own memory holds for its GPUs, beside what programs take."""
        return host_moments(self.architecture, self.job, self.cluster.nodes)

    @cached_property
    def phase_times(self) -> PhaseTimes | None:
        """Seconds of loading and of an evaluation; None on a CPU, or where nothing is evaluated."""
        return phase_times(self.architecture, self.job, self.cluster.gpus[0])

    @property
    def host_moments_gib(self) -> dict[str, float]:
        """The same in GiB."""
        return {phase: sum(term.gib for term in terms) for phase, terms in self.host_moments.items()}

    @property
    def host_gib(self) -> float:
        """Of the fullest machine's own memory, in the phase that needs most of it."""
        return max(self.host_moments_gib.values())

    @property
    def tightest(self) -> int:
        """The device whose memory is fullest in training."""
        return max(range(len(self.devices)), key=lambda i: self.devices[i].safe_gib / self.cluster.gpus[i].memory_gib)

    @property
    def fullest(self) -> tuple[DeviceMemory, Gpu]:
        """The tightest device's memory in training, and its GPU."""
        return self.devices[self.tightest], self.cluster.gpus[self.tightest]

    @property
    def shortfall_gib(self) -> float:
        """What the fullest device lacks in its highest phase to be safe; negative where it has room."""
        return self.highest.phase.memory.safe_gib - self.highest.gpu.memory_gib

    def safe_evaluation_rows(self) -> int:
        """Return the most rows, up to the job's own, with which every phase beside training is safe; 0: none."""

        def is_safe(rows: int) -> bool:
            return all(each.share <= 1 for each in self._evaluating(rows)._beside_training())

        return largest(is_safe, self.job.evaluation.rows, self.job.evaluation.rows)

    def with_rows_chosen(self) -> "Plan":
        """Return the plan with as many rows validated and answered at once as leave training the highest phase.

        At least one row, which is higher where training's own batch is small, and is all where training does not fit.
        A phase that is above training with one row already may fill the device, by the safe figure: its models are, say
        a judge beside a tiny base, and one row at a time would save little and cost much.
        """
        if self.job.evaluation is None:
            return self
        if not self.trains:
            return self._evaluating(1)
        gpus = self.cluster.gpus
        highest = max(memory.peak_gib / gpu.memory_gib for memory, gpu in zip(self.devices, gpus, strict=True))
        with_one = self._evaluating(1)._beside_training()

        def fits_beside(rows: int) -> bool:
            return all(
                each.likely_share <= highest or (one.likely_share > highest and each.share <= 1)
                for one, each in zip(with_one, self._evaluating(rows)._beside_training(), strict=True)
            )

        return self._evaluating(largest(fits_beside, MOST_EVALUATED_AT_ONCE, MOST_EVALUATED_AT_ONCE) or 1)

    def _evaluating(self, rows: int) -> "Plan":
        return replace(self, job=replace(self.job, evaluation=replace(self.job.evaluation, rows=rows)))

    def _beside_training(self) -> list[Highest]:
        return [each for each in self._each_phase() if each.phase.name != TRAINING]

    @property
    def rows_per_step(self) -> int:
        """Rows of all data-parallel ranks together."""
        return self.job.batch.rows * self.job.data_parallel_ranks

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks; of an encoder-decoder those of texts and of summaries, of pairs those of both answers."""
        batch = self.job.batch
        of_a_row = sum({stack.kind: batch.length_in(stack) for stack in self.architecture.stacks}.values())
        return self.rows_per_step * batch.goal.sequences_per_row * of_a_row / self.time.total_s

    @cached_property
    def tokens_per_s_best(self) -> float | None:
        """What the best published run of this kind leads to; None = nothing is published. See `best_tokens_per_s`."""
        return best_tokens_per_s(self.architecture, self.job, self.cluster, self.shares, self.tokens_per_s)

    def epoch_s(self, rows: int) -> float:
        """Return the seconds to go once through so many rows."""
        return self.time.total_s * rows / self.rows_per_step

    def epoch_usd(self, rows: int) -> float | None:
        """Return the rent of all GPUs for an epoch; None where a price is missing."""
        price = self.cluster.usd_per_second
        return None if price is None else price * self.epoch_s(rows)

    @cached_property
    def max_batch_size(self) -> int:
        """The largest number of rows per data-parallel rank that fits; 0 = not even one."""
        step = self.job.micro_batches
        most = max(1, LARGEST_BATCH // step)
        return step * largest(lambda steps: self._fits_with(steps * step), most, self._rows_expected() // step)

    def _rows_expected(self) -> int:
        """Return the rows that would fit if all devices shared all memory, and each row took as much as the next."""
        rows = self.job.batch.rows
        twice = replace(self.job, batch=replace(self.job.batch, rows=2 * rows))
        need, twice_need = (
            sum(
                memory_with_overhead(self.architecture, job, share, gpu).safe_gib
                for share, gpu in zip(self.shares, self.cluster.gpus, strict=True)
            )
            for job in (self.job, twice)
        )
        room = sum(gpu.memory_gib for gpu in self.cluster.gpus) - need
        return int(rows * (1 + room / max(twice_need - need, 1 / GIB)))

    def _fits_with(self, rows: int) -> bool:
        architecture, gpus = self.architecture, self.cluster.gpus
        job = replace(self.job, batch=replace(self.job.batch, rows=rows))
        if job.parallelism.splits_layers and not self.placed_by_hand:
            return shares_that_fit(architecture, job, gpus) is not None
        return all(
            memory_with_overhead(architecture, job, share, gpu).safe_gib <= gpu.memory_gib
            for share, gpu in dict.fromkeys(zip(self.shares, gpus, strict=True))
        )

    @property
    def name(self) -> str:
        """`LoRA, ddp, checkpointed`."""
        checkpointed = ", checkpointed" if self.job.gradient_checkpointing else ""
        offloaded = ", offloaded" if self.job.offload else ""
        return f"{self.job.method.label}, {self.job.sharing}{checkpointed}{offloaded}"


# -- plans


def make_plan(
    architecture: Architecture,
    job: Job,
    cluster: Cluster,
    calibration: dict[str, list[float]],
    shares: Sequence[Share] | None = None,
) -> Plan:
    """Plan a job on a cluster.

    `shares` is what each device of a job with mp or pp holds; None: so that the fullest device is least full.

    Raises:
        BadInputError: Settings contradict each other or the model.
    """
    job.check_targets(architecture)
    for option, length in (("--seq-len", job.batch.length), ("--target-len", job.batch.target_length)):
        if length > architecture.max_length:
            raise BadInputError(
                f"{option} {length} is longer than {architecture.name} can read: "
                f"pass {option} {architecture.max_length} or less."
            )
    if job.batch.target_length and len(architecture.stacks) == 1:
        raise BadInputError(
            f"--target-len is {job.batch.target_length}, but {architecture.name} is no encoder-decoder, and has no "
            "summaries of another length than its rows: leave it out, or pass --model bart-large-cnn."
        )
    check_pictures(architecture, job)
    whole = [whole_model(architecture)] * job.devices
    placed = shares or (balanced_shares(architecture, job, cluster.gpus) if job.parallelism.splits_layers else whole)
    placed = tuple(
        replace(share, in_flight=job.in_flight(number), keeps_first_gradients=job.keeps_first_gradients(number))
        for number, share in enumerate(placed)
    )
    known = {
        pair: memory_with_overhead(architecture, job, *pair)
        for pair in dict.fromkeys(zip(placed, cluster.gpus, strict=True))
    }
    speeds = {gpu: speed_of(gpu, job, calibration) for gpu in dict.fromkeys(cluster.gpus)}
    return Plan(
        architecture,
        job,
        cluster,
        placed,
        tuple(known[pair] for pair in zip(placed, cluster.gpus, strict=True)),
        step_time(architecture, job, cluster, placed, [speeds[gpu] for gpu in cluster.gpus]),
        tuple(speed.source for speed in speeds.values()),
        placed_by_hand=shares is not None,
    )


def check_pictures(architecture: Architecture, job: Job) -> None:
    """Refuse pictures that a model, its rows, a technique or a parallelism does not take.

    Raises:
        BadInputError: with what to pass instead.
    """
    tiles, tower = job.batch.tiles, architecture.tower
    if not tiles:
        return
    if tower is None:
        raise BadInputError(
            f"--tiles is {tiles}, but {architecture.name} has no vision tower: leave it out, or pass --model "
            "smolvlm-instruct."
        )
    if tiles * tower.tokens >= job.batch.length:
        raise BadInputError(
            f"--seq-len is {job.batch.length}, but a picture of {tiles} squares takes {tiles} x {tower.tokens} = "
            f"{tiles * tower.tokens:,} tokens of {architecture.name}: pass a longer --seq-len, or fewer --tiles."
        )
    task = job.batch.goal
    for option, name, known in (("--technique", job.technique, task.techniques),
                                ("--parallel", job.parallel, task.parallelisms)):  # fmt: skip
        if name not in known:
            raise BadInputError(f"{option} is {name}, but models with pictures are trained with {' or '.join(known)}.")


def ranked_plans(
    architecture: Architecture,
    asked: Job,
    cluster: Cluster,
    techniques: Iterable[str],
    parallels: Iterable[str] | None,
    checkpointing: bool | None,
    calibration: dict[str, list[float]],
    precision: Precision | None = None,
    micro_batches: int | None = None,
    dp_replicate_size: int | None = None,
) -> list[Plan]:
    """Return plans, best first: what fits, then by quality (full, LoRA, QLoRA), then by speed, then by simplicity.

    Of plans that are about as fast as the fastest of their technique, the simplest comes first. A tight plan comes
    after all that are not tight, where one of these is about as fast, whatever its technique. Where ranks cannot share
    rows, FSDP that offloads to the host follows. What does not fit is sorted by how much it lacks.

    `precision` None: the usual one of each technique. `checkpointing` None: with gradient checkpointing only where it
    does not fit without. `micro_batches` None: with pp as many as make sense. `dp_replicate_size` None: with fsdp one
    copy of the model, and another plan with one on each machine.
    """
    plans = []
    for technique in techniques:
        usual = parallels or _usual_parallelisms(technique, asked.batch, cluster)
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
                micro_batches=parts,
                schedule="gpipe" if has_too_few else asked.schedule,  # 1F1B needs one for each stage
            )
            tries = [False, True] if checkpointing is None else [checkpointing]
            found: list[Plan] = []
            for on in tries:
                tried = replace(job, gradient_checkpointing=on)
                found.append(make_plan(architecture, tried, cluster, calibration).with_rows_chosen())
                if found[-1].fits:
                    break
            safe = [plan for plan in found if plan.fits]
            plans.append([*safe, *(plan for plan in found if plan.may_fit), found[-1]][0])
    found = [plan for plan in plans if plan.may_fit]
    resort = [] if any(plan.job.parallelism.splits_rows for plan in found) else _offloaded(plans, calibration)
    return [*_best_first(found), *resort,
            *sorted((plan for plan in plans if not plan.may_fit), key=lambda plan: plan.shortfall_gib)]  # fmt: skip


def _offloaded(plans: Sequence[Plan], calibration: dict[str, list[float]]) -> list[Plan]:
    """Return what would fit with shards in the host's memory, for where no ranks can share rows without: least first.

    FSDP alone: what waits for a GPU is then all that it holds.
    """
    tried = [
        make_plan(plan.architecture, replace(plan.job, offload=True), plan.cluster, calibration).with_rows_chosen()
        for plan in plans
        if plan.job.parallelism.uses_fsdp and not plan.job.offload and plan.cluster.gpus[0].name != CPU_DEVICE
    ]
    return sorted((plan for plan in tried if plan.fits), key=lambda plan: plan.host_gib)


def _usual_parallelisms(technique: str, batch: BatchShape, cluster: Cluster) -> tuple[str, ...]:
    """Return the parallelisms that this repository uses with the technique and so many devices."""
    task = batch.goal
    suggested = [name for name, each in PARALLELISMS.items() if technique in each.suggested_for]
    has_own_list = task.folder_for_one != "" and technique in task.techniques  # else the planner's suggestions hold
    usual = task.parallelisms if has_own_list else suggested
    return tuple(name for name in usual if PARALLELISMS[name].is_single == (len(cluster.gpus) == 1))


def _copies(parallel: str, cluster: Cluster, asked: int | None) -> tuple[int, ...]:
    """Return how many sharded copies of the model to plan for: one, or hybrid sharding's one on each machine."""
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
    """Sort plans that fit: by technique, speed and simplicity; last those that are tight, where others are as fast."""
    fastest_roomy = max((plan.tokens_per_s for plan in plans if plan.fits), default=0.0)
    fastest = {plan.job.technique: plan.tokens_per_s for plan in sorted(plans, key=lambda plan: plan.tokens_per_s)}
    techniques, simplest_first = list(TECHNIQUES), list(PARALLELISMS)

    def rank(plan: Plan) -> tuple[bool, int, bool, float, float]:
        is_needless = plan.verdict == "tight" and fastest_roomy >= ABOUT_AS_FAST * plan.tokens_per_s
        is_slow = plan.tokens_per_s < ABOUT_AS_FAST * fastest[plan.job.technique]
        simplicity = 0 if is_slow else simplest_first.index(plan.job.parallel)
        return is_needless, techniques.index(plan.job.technique), is_slow, simplicity, -plan.tokens_per_s

    return sorted(plans, key=rank)


def why(plan: Plan) -> str:
    """Return the reason for a plan, or against it."""
    job, n = plan.job, len(plan.devices)
    if not plan.trains:
        memory, gpu = plan.fullest
        help_ = f"--batch-size {plan.max_batch_size} would fit" if plan.max_batch_size else _what_would_help(plan)
        return (
            f"does not fit: {memory.peak_gib:.1f} of {gpu.memory_gib:.1f} GiB on device {plan.tightest}, most of it "
            f"{_largest_parts(memory)}; {help_}"
        )
    if not plan.may_fit:
        return f"does not fit: {phase_that_is_too_large(plan)}"
    # a pipeline idles while it fills and empties; where layers are computed in turn, there is one micro-batch
    dividing = job.shard_ranks if job.parallelism.shards else n
    idle = (n - 1) / (job.micro_batches + n - 1)
    waits = plan.time.exposed_s / plan.time.total_s
    remedy = "" if job.parallelism.splits_matrices else ", which more rows per step hide"
    device, gpu, phase = plan.highest
    reasons = [
        job.parallelism.why.format(devices=dividing, micro_batches=job.micro_batches, idle=idle),
        f"hybrid: {job.dp_replicate_size} such copies average their gradients" if job.dp_replicate_size > 1 else "",
        f"waits {waits:.0%} of the time for {plan.cluster.slowest_link.name}{remedy}" if waits > 0.1 else "",
        "gradient checkpointing, so that activations are computed twice" if job.gradient_checkpointing else "",
        ""
        if plan.fits
        else f"tight, as {phase.name} is safe with {phase.memory.safe_gib:.1f} GiB, and device {device} has "
        f"{gpu.memory_gib:.1f}: let `python -m common.preflight` have the last word",
        f"{-plan.shortfall_gib:.1f} GiB to spare, up to {plan.max_batch_size} rows" if plan.fits else "",
    ]
    return "; ".join(filter(None, reasons))


def _largest_parts(memory: DeviceMemory) -> str:
    parts = sorted(memory.parts_gib.items(), key=lambda part: -part[1])[:2]
    return " and ".join(f"{name} {gib:.1f}" for name, gib in parts)


def phase_that_is_too_large(plan: Plan) -> str:
    """Return the phase beside training that a device cannot hold, by how much, and what would fit."""
    device, gpu, phase = plan.highest_likely
    fewer = plan.safe_evaluation_rows()
    help_ = (
        f"--per_device_eval_batch_size {fewer} would fit"
        if fewer
        else f"a GPU with {math.ceil(phase.memory.peak_gib)} GiB would hold it, or a smaller --model"
    )
    return (
        f"training fits, but {phase.name} takes {phase.memory.peak_gib:.1f} of {gpu.memory_gib:.1f} GiB on device "
        f"{device} ({phase.alive}), most of it {_largest_parts(phase.memory)}; {help_}"
    )


def _what_would_help(plan: Plan) -> str:
    job, parts = plan.job, plan.fullest[0].parts_gib
    passing = parts["activations"] + parts["logits"] > 0.5 * sum(parts.values())
    states = parts["optimizer"] + parts["gradients"] > parts["weights"]
    remedies = [
        "gradient checkpointing" if not job.gradient_checkpointing and parts["activations"] > parts["weights"] else "",
        "shorter rows (--seq-len)" if passing else "",
        "adapters instead of all weights (--technique lora)" if not job.method.has_adapters and not passing else "",
        "a smaller --lora-rank" if job.method.has_adapters and states else "",
        "4-bit weights (--technique qlora)" if job.method.has_plain_adapters and not passing and not states else "",
        "sharding (--parallel fsdp)" if job.parallelism.replicates and not passing else "",
        "more or larger GPUs",
    ]
    return "not even one row would fit: try " + ", or ".join(filter(None, remedies))


def recommendation(plans: Sequence[Plan]) -> str:
    """Return what to do, in a sentence or two."""
    best = plans[0]
    sentence = f"{best.name}: {why(best)}."
    if not best.may_fit:
        return f"Nothing fits. Nearest is {sentence}"
    if not best.job.method.has_adapters and best.job.precision == "bf16" and not best.job.parallelism.uses_deepspeed:
        sentence += " In pure bf16 small updates round away: compare with --precision bf16-mixed."
    fastest = max((plan for plan in plans if plan.may_fit), key=lambda plan: plan.tokens_per_s)
    times = fastest.tokens_per_s / best.tokens_per_s
    if times > 1.1:
        sentence += f" Faster, at some cost in quality: {fastest.name}, {times:.1f} times as many tokens per second."
    return sentence[0].upper() + sentence[1:]


# -- the answer


def as_json(model: str, plans: Sequence[Plan], assumptions: Sequence[str], rows_per_epoch: int) -> dict[str, Any]:
    """Return the contract's JSON; numbers are in GiB (2^30 bytes), seconds and US dollars."""
    return {
        "model": model,
        "figures": "projected",
        "sorted_by": SORTED_BY,
        "ranked": [
            {
                "technique": plan.job.technique,
                "parallel": plan.job.parallel,
                "dp_replicate_size": plan.job.dp_replicate_size,
                "precision": plan.job.precision,
                "gradient_checkpointing": plan.job.gradient_checkpointing,
                "micro_batches": plan.job.micro_batches,
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
                "run_peak_gib": plan.run_peak_gib,
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


def table(plans: Sequence[Plan], rows_per_epoch: int) -> str:
    """Format the plans, best first, as a table for a terminal.

    Memory is that of a run's highest phase; where a plan has another one than training, a column has training's, too.
    """
    rows, differ = [], any(plan.higher_phase for plan in plans)
    for plan in plans:
        (_, gpu, phase), usd = plan.highest, plan.epoch_usd(rows_per_epoch)
        rows.append([
            plan.name.replace(plan.job.method.label, plan.job.method.short, 1),
            plan.verdict,
            f"{phase.memory.peak_gib:.1f} to {phase.memory.safe_gib:.1f} / {gpu.memory_gib:.1f}",
            *[f"{plan.training_peak_gib:.1f}"] * differ,
            plan.max_batch_size or "-",
            _seconds(plan.time.total_s),
            f"{plan.tokens_per_s:,.0f}",
            "-" if plan.tokens_per_s_best is None else f"{plan.tokens_per_s_best:,.0f}",
            _seconds(plan.epoch_s(rows_per_epoch)),
            "-" if usd is None else f"{usd:,.2f}",
        ])  # fmt: skip
    headers = ("way", "fits", "likely to safe\n/ GPU, GiB", *["training\nlikely"] * differ, "largest\nbatch", "step",
               "tokens\nper s", "best\nper s", "epoch", "epoch\nUSD")  # fmt: skip
    used: dict[str, dict[str, None]] = {}  # each technique has one precision
    for plan in plans:
        used.setdefault(plan.job.precision, {})[plan.job.method.short] = None
    precisions = "; ".join(f"{', '.join(techniques)} in {precision}" for precision, techniques in used.items())
    return f"{_outlined(rows, headers, text_columns=2)}\nprecision: {precisions}"


def _outlined(rows: Sequence[Sequence[object]], headers: Sequence[str], text_columns: int) -> str:
    aligned = ["left"] * text_columns + ["right"] * (len(headers) - text_columns)
    return tabulate(rows, headers, tablefmt="rounded_outline", colalign=aligned, disable_numparse=True)


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def explanation(plan: Plan) -> str:
    """Unfold the fullest device's phases, the terms of training and of a higher phase, and a step's time."""
    device, gpu, highest = plan.highest
    training = next(phase for phase in plan.phases[device] if phase.name == TRAINING)
    higher = [] if highest is training else [f"{highest.name}, which takes most:", *_unfolded(highest, gpu, plan)]
    of_phases = [
        [phase.name, phase.alive, phase.memory.moment, *(f"{gib:.1f}" for gib in
         (phase.memory.allocated_gib, phase.memory.peak_gib, phase.memory.safe_gib))]
        for phase in plan.phases[device]
    ]  # fmt: skip
    headers = ("phase", "models in memory", "highest moment", "allocated\nGiB", "likely\nGiB", "safe\nGiB")
    on_host = [
        [phase, term.what, term.formula, f"{term.gib:.1f}"]
        for phase, terms in plan.host_moments.items()
        for term in terms
    ]
    on_host.append(["at most", "", "beside what programs take", f"{plan.host_gib:.1f}"])
    return "\n".join([
        f"{plan.name}: device {device} of {len(plan.devices)}, {gpu.name}",
        _outlined(of_phases, headers, text_columns=3),
        "",
        "training: VRAM = weights + gradients + optimizer states + activations + logits + buffers + overhead",
        *_unfolded(training, gpu, plan),
        "",
        *higher,
        "each machine's own memory:",
        _outlined(on_host, ("phase", "what", "formula", "GiB"), text_columns=3),
        "",
        "a step's time:",
        *(f"  {term}" for term in plan.time.terms),
        *([f"beside training: {plan.phase_times.said}"] if plan.phase_times else []),
    ])  # fmt: skip


def _unfolded(phase: Phase, gpu: Gpu, plan: Plan) -> list[str]:
    """Return a phase's terms, and what their letters stand for."""
    letters = _letters(plan) if phase.name == TRAINING else _letters_of_evaluation(plan)
    return [f"its highest moment: {phase.memory.moment}", _term_table(phase.memory, gpu), letters]


def _term_table(memory: DeviceMemory, gpu: Gpu) -> str:
    rows = []
    for part, gib in memory.parts_gib.items():
        terms = [term for term in memory.terms if term.part == part]
        rows += [[part if term is terms[0] else "", term.what, term.formula, f"{term.gib:.3f}"] for term in terms]
        if len(terms) > 1:
            rows.append(["", "", f"{part} together", f"{gib:.3f}"])
    rows.append(["likely", "", f"of {gpu.memory_gib:.2f} GiB", f"{memory.peak_gib:.3f}"])
    rows.append(["safe", "", "with its spread among published peaks", f"{memory.safe_gib:.3f}"])
    return _outlined(rows, ("part", "what", "formula", "GiB"), text_columns=3)


def _letters(plan: Plan) -> str:
    """Return what the letters of the formulas stand for in this plan."""
    architecture, job, batch = part_of_rank(plan.architecture, plan.job), plan.job, plan.job.batch
    rows, target = batch.sequences // job.micro_batches, batch.target_length or batch.length
    lengths = f"S = {batch.length} tokens, T = B S = {rows * batch.length:,}"
    if len(architecture.stacks) > 1:
        lengths = (
            f"encoder S = E = {batch.length} tokens, T = TE = B S = {rows * batch.length:,}, "
            f"decoder S = {target} tokens, T = B S = {rows * target:,}"
        )
    return (
        f"B = {rows} rows, {lengths}, P = {rows * batch.labelled:,}, {_letters_of_tower(architecture, job)}"
        f"H = {architecture.hidden:,}, I = {architecture.intermediate:,}, "
        f"Q = {architecture.heads * architecture.head_dim:,}, K = {architecture.kv_heads * architecture.head_dim:,}, "
        f"V = {architecture.vocab:,}, a = {job.arithmetic_bytes}, x = {hidden_bytes(architecture, job)}, "
        f"w = {job.weight_bytes} bytes"
    )


def _letters_of_tower(architecture: Architecture, job: Job) -> str:
    """Return the same of a vision tower; empty without."""
    if not sees(architecture, job, whole_model(architecture)):
        return ""
    tower = TowerActivations(architecture.tower, job)
    return (
        f"pixels = {tower.pixels:,}, N = {tower.patches:,} patches, tokens = {tower.tokens:,} of pictures, "
        f"Hv = {tower.tower.encoder.hidden:,}, Iv = {tower.tower.encoder.intermediate:,}, "
    )


def _letters_of_evaluation(plan: Plan) -> str:
    """Return the same of the phases beside training."""
    architecture, shape = plan.architecture, plan.job.evaluation
    layers = sum(stack.layers for stack in architecture.stacks if stack.kind != "encoder")
    return (
        f"B = {shape.rows} rows, S = {shape.prompt_length} tokens to read (validated {shape.length}), "
        f"N = {shape.new_tokens} new ones, T = B S, L = {layers} layers, H = {architecture.hidden:,}, "
        f"I = {architecture.intermediate:,}, Q = {architecture.heads * architecture.head_dim:,}, "
        f"K = {architecture.kv_heads * architecture.head_dim:,}, V = {architecture.vocab:,}, "
        f"a = {plan.job.whole_model_bytes} bytes"
    )


# -- runs


def plan_run(
    run: RunConfig, batch: BatchShape, gpu: Gpu | None = None, evaluation: EvaluationShape | None = None
) -> Plan:
    """Plan a run, on the GPU that its folder was made for, or on `gpu`; layers are where the run's device map says.

    `evaluation` is what the phases beside training work on; None: rows like those of the batch. How many of them at
    once is chosen here where the run leaves it to the plan. Accelerate's own map (`auto`) needs the model: such a run
    is planned as balanced.

    Raises:
        BadInputError: The closed form does not know the model, the optimizer or the GPU, or the device map is wrong.
    """
    if gpu is None:
        gpu = cpu_device() if run.device == "cpu" else find_gpu(run.gpu)
    batch = with_tiles(run, batch)
    architecture, job = architecture_of_run(run, batch), job_of_run(run, batch, evaluation)
    gpus = (gpu,) * run.devices
    shares = None
    if job.parallelism.splits_layers and run.device_map == "even":
        shares = even_shares(architecture, job, gpus)
    elif job.parallelism.splits_layers and run.device_map not in ("balanced", "auto"):
        shares = shares_of_map(architecture, read_device_map(run.device_map), len(gpus))
    link = parse_link(run.link, gpu) if run.link and run.device != "cpu" else None
    cluster = Cluster(gpus, run.nodes, link)
    plan = make_plan(architecture, job, cluster, calibration_from(kept_records(), batch.task), shares)
    return with_rows_for(run, plan)


def with_rows_for(run: RunConfig, plan: Plan) -> Plan:
    """Return the run's plan with as many rows validated and answered at once as it chooses, where the run leaves it."""
    return plan if run.per_device_eval_batch_size else plan.with_rows_chosen()


def usual_precision(technique: str, cluster: Cluster) -> Precision:
    """Return what each technique is usually trained in: weights that are updated in fp32, frozen ones in 16 bits."""
    if all(gpu.tflops_dense["bf16"] for gpu in cluster.gpus):
        return "bf16" if TECHNIQUES[technique].has_adapters else "bf16-mixed"
    return "fp16-mixed" if all(gpu.tflops_dense["fp16"] for gpu in cluster.gpus) else "fp32"
