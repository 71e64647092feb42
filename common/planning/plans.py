"""Plans of runs: a job's memory, time and cost on a cluster; all numbers are projected."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import NamedTuple

from common.base.errors import NotPlannedError
from common.base.run_config import RunConfig
from common.base.settings import MOST_EVALUATED_AT_ONCE
from common.hardware.devices import GIB, Gpu, cpu_device, find_gpu
from common.planning import device_maps
from common.planning.architectures import Architecture, check_shares_heads
from common.planning.gpu_overhead import memory_with_overhead
from common.planning.host_memory import host_moments
from common.planning.job import BatchShape, EvaluationShape, Job, architecture_of_run, job_of_run, with_tiles
from common.planning.phase_times import PhaseTimes, generating_time, phase_times
from common.planning.phases import TRAINING, Phase, PhaseSums
from common.planning.published_rates import best_tokens_per_s
from common.planning.searches import largest
from common.planning.shares import Share, stages_of, whole_model
from common.planning.terms import DeviceMemory, Term
from common.planning.time_plan import Calibration, Cluster, StepTime, calibration_from, parse_link, speed_of, step_time
from common.records.store import kept_records

LARGEST_BATCH = 4096  # beyond it nobody asks
TOKENS_STEP, LONGEST_ROW = 1024, 2**21  # the same of tokens of a row
DEFAULT_ROWS_PER_EPOCH = 10_000
ROOMY_SHARE = 0.25  # of a device, that validation and answers may take whatever training takes


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
    """A job on a cluster: memory per device, time and cost, all projected."""

    architecture: Architecture
    job: Job
    cluster: Cluster
    shares: tuple[Share, ...]  # what each device holds
    devices: tuple[DeviceMemory, ...]  # of each in training
    time: StepTime
    speed_sources: tuple[str, ...]
    placed_by_hand: bool = False  # `shares` was given, not searched: another batch size has the same

    @cached_property
    def phases(self) -> tuple[tuple[Phase, ...], ...]:
        """Each device's phases; training alone where the job has no evaluation."""
        stages = stages_of(self.architecture, self.job)
        is_alone, numbers = self.job.parallelism.in_one_process, range(len(self.shares))
        merges = [is_alone or number < stages for number in numbers]  # the first rank, or group of ranks
        reloads = [merging or stages > 1 for merging in merges]  # every group compares
        parts = device_maps.answering_shares(self.architecture, stages) if stages > 1 else (None,)
        of_devices = [parts[number % stages] for number in numbers]
        # of equal devices once: 512 GPUs are alike
        phases_of = cache(lambda *device: PhaseSums(self.architecture, self.job, *device).phases())
        return tuple(map(phases_of, self.shares, self.cluster.gpus, reloads, merges, of_devices))

    @cached_property
    def _each_phase(self) -> list[Highest]:
        return [
            Highest(number, gpu, phase)
            for number, (gpu, phases) in enumerate(zip(self.cluster.gpus, self.phases, strict=True))
            for phase in phases
        ]

    @property
    def _beside_training(self) -> list[Highest]:
        return [each for each in self._each_phase if each.phase.name != TRAINING]

    @cached_property
    def highest(self) -> Highest:
        """The device and the phase in which a device is fullest, by the safe figure."""
        return max(self._each_phase, key=lambda each: each.share)

    @cached_property
    def highest_likely(self) -> Highest:
        """The same by the likely figure."""
        return max(self._each_phase, key=lambda each: each.likely_share)

    @property
    def training_peak_gib(self) -> float:
        """What the fullest device is likely to need in training."""
        return max(memory.peak_gib for memory in self.devices)

    @property
    def run_peak(self) -> Phase:
        """The phase in which a device is likely to need most, whatever it has."""
        return max((each.phase for each in self._each_phase), key=lambda phase: phase.memory.peak_gib)

    @property
    def higher_phase(self) -> str:
        """Which phase takes more than training, and how much; empty = none does."""
        highest = self.run_peak
        return "" if highest.name == TRAINING else f"{highest.name} takes {highest.memory.peak_gib:.1f} GiB"

    @property
    def fits(self) -> bool:
        """Whether every device is safe to hold its part in every phase."""
        return self.highest.share <= 1

    @property
    def may_fit(self) -> bool:
        """Whether every device is likely to hold its part in every phase."""
        return self.highest_likely.likely_share <= 1

    @cached_property
    def _training_share(self) -> float:
        gpus = self.cluster.gpus
        return max(memory.peak_gib / gpu.memory_gib for memory, gpu in zip(self.devices, gpus, strict=True))

    @property
    def trains(self) -> bool:
        """Whether every device is likely to hold its part of a training step, whatever the other phases take."""
        return self._training_share <= 1

    @property
    def verdict(self) -> str:
        """`yes`: it fits; `tight`: it is likely to, but what PyTorch's allocator wastes may decide; `no`."""
        return "yes" if self.fits else "tight" if self.may_fit else "no"

    @cached_property
    def host_moments(self) -> dict[str, list[Term]]:
        """By phase, what the fullest machine's own memory holds for its GPUs."""
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
        """Of the phase that needs most of it."""
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
        most = self.job.evaluation.rows
        return largest(
            lambda rows: all(each.share <= 1 for each in self._evaluating(rows)._beside_training), most, most
        )

    def with_rows_chosen(self) -> "Plan":
        """Return the plan with as many rows validated and answered at once as leave training the highest phase.

        At least one row; one where training does not fit. Up to `ROOMY_SHARE` of the device no phase need be below
        training: a small model would answer row by row for nothing. A phase that is above training with one row already
        may fill the device, by the safe figure: its models are, say a judge beside a tiny base.
        """
        if self.job.evaluation is None:
            return self
        evaluating = cache(self._evaluating)  # what was tried need not be planned again
        alone = evaluating(1)
        if not self.trains:
            return alone

        def fits_beside(rows: int) -> bool:
            return all(
                each.likely_share <= max(self._training_share, ROOMY_SHARE)
                or (one.likely_share > self._training_share and each.share <= 1)
                for one, each in zip(alone._beside_training, evaluating(rows)._beside_training, strict=True)
            )

        return evaluating(largest(fits_beside, MOST_EVALUATED_AT_ONCE, MOST_EVALUATED_AT_ONCE) or 1)

    def _evaluating(self, rows: int) -> "Plan":
        job = replace(self.job, evaluation=replace(self.job.evaluation, rows=rows))
        generating_s = generating_time(self.architecture, job, self.cluster.gpus[0])
        return replace(self, job=job, time=replace(self.time, generating_s=generating_s))

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
        """See `best_tokens_per_s`."""
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
        return step * self._most(lambda steps: self._job_with(rows=steps * step), LARGEST_BATCH // step, 1)

    @cached_property
    def longest_row(self) -> int:
        """How long a row may be that fits in training, in steps of `TOKENS_STEP`; 0 = not even one."""
        return self._most(self.job_with_row, self.architecture.max_length // TOKENS_STEP, 16)

    def _most(self, job_with: Callable[[int], Job], most: int, tried: int) -> int:
        """Return the largest number of rows or tokens, of which `job_with` makes jobs, that fits.

        The search starts where it would be if all devices shared all memory, and it grew as from `tried` to its double.
        """
        devices = list(zip(self.shares, self.cluster.gpus, strict=True))
        need, twice_need = (
            sum(memory_with_overhead(self.architecture, job, *device).safe_gib for device in devices)
            for job in map(job_with, (tried, 2 * tried))
        )
        room = sum(gpu.memory_gib for _, gpu in devices) - need
        guess = int(tried * (1 + room / max(twice_need - need, 1 / GIB)))
        return largest(lambda number: self._fits_with(job_with(number)), max(1, most), guess)

    def _fits_with(self, job: Job) -> bool:
        architecture, gpus = self.architecture, self.cluster.gpus
        if job.parallelism.splits_layers and not self.placed_by_hand:
            return device_maps.shares_that_fit(architecture, job, gpus) is not None
        return all(
            memory_with_overhead(architecture, job, share, gpu).safe_gib <= gpu.memory_gib
            for share, gpu in dict.fromkeys(zip(self.shares, gpus, strict=True))
        )

    def _job_with(self, **shape: int) -> Job:
        return replace(self.job, batch=replace(self.job.batch, **shape))

    def job_with_row(self, steps: int) -> Job:
        """Return the job with rows of so many steps of tokens, learnt as a whole where they are."""
        batch, tokens = self.job.batch, steps * TOKENS_STEP
        return self._job_with(length=tokens, labelled=tokens if batch.labelled == batch.length else batch.labelled)

    @property
    def name(self) -> str:
        """`LoRA, ddp, checkpointed`."""
        checkpointed = ", checkpointed" if self.job.gradient_checkpointing else ""
        offloaded = ", offloaded" if self.job.offload else ""
        return f"{self.job.method.label}, {self.job.sharing}{checkpointed}{offloaded}"


def make_plan(
    architecture: Architecture,
    job: Job,
    cluster: Cluster,
    calibration: Calibration,
    shares: Sequence[Share] | None = None,
) -> Plan:
    """Plan a job on a cluster; refuse settings that contradict each other or the model.

    `shares` is what each device of a job with mp or pp holds; None: so that the fullest device is least full.
    """
    check_fit(architecture, job)
    placed = shares or [whole_model(architecture)] * job.devices
    if job.parallelism.splits_layers and not shares:
        placed = device_maps.balanced_shares(architecture, job, cluster.gpus)
    placed = tuple(
        replace(share, in_flight=job.in_flight(number), keeps_first_gradients=job.keeps_first_gradients(number))
        for number, share in enumerate(placed)
    )
    memory_of = cache(partial(memory_with_overhead, architecture, job))
    memories = tuple(memory_of(share, gpu) for share, gpu in zip(placed, cluster.gpus, strict=True))
    speeds = list(map(cache(lambda gpu: speed_of(gpu, job, calibration)), cluster.gpus))
    time, sources = step_time(architecture, job, cluster, placed, speeds), dict.fromkeys(each.source for each in speeds)
    time = replace(time, generating_s=generating_time(architecture, job, cluster.gpus[0]))
    return Plan(architecture, job, cluster, placed, memories, time, tuple(sources), placed_by_hand=shares is not None)


def check_fit(architecture: Architecture, job: Job) -> None:
    """Refuse target modules, pipelines, ranks that share rows, lengths and pictures that the model does not take."""
    job.check_targets(architecture)
    check_shares_heads(job.sp_size, architecture.heads, architecture.kv_heads)
    batch, name, tower = job.batch, architecture.name, architecture.tower
    if job.attention != "eager" and architecture.family.is_gpt_oss_like:
        raise NotPlannedError(f"--attention {job.attention}: {name} has eager attention alone: pass --attention eager.")
    if job.parallelism.pipelines and architecture.family.positions:
        raise NotPlannedError(f"--parallel pp: {name} adds its positions in every stage: pass --parallel ddp or mp.")
    for option, length in (("--seq-len", batch.length), ("--target-len", batch.target_length)):
        if length > architecture.max_length:
            raise NotPlannedError(
                f"{option} {length} is longer than {name} can read: pass {option} {architecture.max_length} or less."
            )
    if batch.target_length and len(architecture.stacks) == 1:
        raise NotPlannedError(
            f"--target-len is {batch.target_length}, but {name} is no encoder-decoder, and has no summaries of another "
            "length than its rows: leave it out, or pass --model bart-large-cnn."
        )
    if not batch.tiles:
        return
    if tower is None:
        raise NotPlannedError(
            f"--tiles is {batch.tiles}, but {name} has no vision tower: leave it out, or pass --model smolvlm-instruct."
        )
    if (tokens := batch.tiles * tower.tokens) >= batch.length:
        raise NotPlannedError(
            f"--seq-len is {batch.length}, but a picture of {batch.tiles} squares takes {batch.tiles} x {tower.tokens} "
            f"= {tokens:,} tokens of {name}: pass a longer --seq-len, or fewer --tiles."
        )
    for option, value, known in (
        ("--technique", job.technique, batch.goal.techniques),
        ("--parallel", job.parallel, batch.goal.parallelisms),
    ):
        if value not in known:
            known = " or ".join(known)
            raise NotPlannedError(f"{option} is {value}, but models with pictures are trained with {known}.")


def plan_run(
    run: RunConfig, batch: BatchShape, gpu: Gpu | None = None, evaluation: EvaluationShape | None = None
) -> Plan:
    """Plan a run on `gpu`, or on that of its folder, with layers where its device map says; refuse what is not known.

    `evaluation` is what the phases beside training work on; None: rows like those of the batch. Accelerate's own device
    map (`auto`) needs the model: such a run is planned as balanced.
    """
    gpu, batch = gpu or gpu_of_run(run), with_tiles(run, batch)
    architecture, job = architecture_of_run(run, batch), job_of_run(run, batch, evaluation)
    gpus, shares = (gpu,) * run.devices, None
    if job.parallelism.splits_layers and run.device_map == "even":
        shares = device_maps.even_shares(architecture, job, gpus)
    elif job.parallelism.splits_layers and run.device_map not in ("balanced", "auto"):
        device_map = device_maps.read_device_map(run.device_map)
        shares = device_maps.shares_of_map(architecture, device_map, len(gpus))
    link = parse_link(run.link, gpu) if run.link and run.device != "cpu" else None
    calibration = calibration_from(kept_records(), batch.task)
    return with_rows_for(run, make_plan(architecture, job, Cluster(gpus, run.nodes, link), calibration, shares))


def gpu_of_run(run: RunConfig) -> Gpu:
    """Return the GPU that a run's folder was made for, or the CPU."""
    return cpu_device() if run.device == "cpu" else find_gpu(run.gpu)


def with_rows_for(run: RunConfig, plan: Plan) -> Plan:
    """Return the run's plan, with rows evaluated at once as `Plan.with_rows_chosen` where the run leaves them open."""
    return plan if run.per_device_eval_batch_size else plan.with_rows_chosen()
