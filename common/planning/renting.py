"""Which machine to rent: a whole run planned on every priced GPU, by its hours and its bill; all are projected."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product

from common.base.specs import PARALLELISMS
from common.hardware.devices import Gpu, find_gpu, hours_text
from common.hardware.prices import SPOT, Price
from common.planning.architectures import Architecture
from common.planning.gpu_overhead import memory_with_overhead
from common.planning.job import Job, Precision, why_not_in_4_bits
from common.planning.phase_times import DISK_GB_PER_S, FILE_BYTES
from common.planning.plans import Plan, make_plan
from common.planning.published_rates import slowest
from common.planning.ranking import planned_techniques, usual_precision
from common.planning.shares import trained_parameters, whole_model
from common.planning.time_plan import SECONDS_PER_HOUR, Calibration, Cluster

COUNTS = (1, 2, 4, 8)  # GPUs of one machine
WORTH_IT = 0.95  # a dearer machine is named where it takes at most this share of the time of all cheaper ones
# ways that a rented machine is planned with: those that divide rows, which are the fastest where they fit
PARALLELS = ("single", "ddp", "fsdp")
STARTING_S, DOWNLOAD_GB_PER_S = 600, 0.125  # assumed: of starting a machine and installing; at 1 Gbit/s


@dataclass(frozen=True)
class Training:
    """What is to be trained, whatever the machine."""

    architecture: Architecture
    job: Job  # of one row as long as the longest
    length_of: Callable[[int, int, int], int]  # tokens of a row, padded: by a rank's rows, ranks and accumulation
    rows: int  # of all epochs
    rows_per_step: int
    techniques: tuple[str, ...]
    precision: Precision | None = None  # None: each technique's usual one, as the GPU has it
    checkpointing: bool | None = None  # None: where it is faster, or needed
    parallel: str | None = None


@dataclass(frozen=True)
class Rental:
    """A machine at a price, and a run on it: hours and dollars, likely and at most."""

    price: Price
    plan: Plan  # of a step of the longest rows
    training_s: float
    factor: float  # as many times as long, at most, by the evidence for this card's speed

    @cached_property
    def saving_s(self) -> float:
        """Of writing what was trained."""
        job, architecture = self.plan.job, self.plan.architecture
        count = trained_parameters(architecture, job, whole_model(architecture))
        return count * job.trained_bytes / (DISK_GB_PER_S * 1e9)

    @cached_property
    def preparing_s(self) -> float:
        """Of starting the machine, installing, and downloading the model."""
        return STARTING_S + self.plan.architecture.parameters * FILE_BYTES / (DOWNLOAD_GB_PER_S * 1e9)

    @cached_property
    def run_s(self) -> float:
        """Of loading, answering before and after, training and saving."""
        return self.plan.phase_times.loading_s + 2 * self.plan.phase_times.answering_s + self.training_s + self.saving_s

    @property
    def hours(self) -> float:
        """Of preparing and running."""
        return (self.preparing_s + self.run_s) / SECONDS_PER_HOUR

    @property
    def most_hours(self) -> float:
        """The same at most."""
        return (self.preparing_s + self.factor * self.run_s) / SECONDS_PER_HOUR

    @property
    def usd_per_hour(self) -> float:
        """Of the whole machine."""
        return self.price.usd_per_hour * len(self.plan.cluster.gpus)

    @property
    def usd(self) -> float:
        """The likely bill."""
        return self.hours * self.usd_per_hour

    @property
    def most_usd(self) -> float:
        """The bill at most."""
        return self.most_hours * self.usd_per_hour

    @property
    def is_spot(self) -> bool:
        """Whether the provider may take the machine back."""
        return self.price.kind == SPOT

    @property
    def machine(self) -> str:
        """Its GPUs, in words."""
        return f"{len(self.plan.cluster.gpus)} x {self.price.gpu}"

    @property
    def said(self) -> str:
        """What is rented, and what it takes, in words."""
        kind = ", spot" * self.is_spot
        machine = f" ({self.price.machine})" if self.price.machine else ""
        named = f"{self.machine} at {self.price.provider}{machine}{kind}"
        return (
            f"{named}, {self.plan.name}: {hours_text(self.hours)} and {self.usd:,.2f} USD, at most "
            f"{hours_text(self.most_hours)} and {self.most_usd:,.2f} USD"
        )

    def interruption_s(self, max_lost_minutes: float) -> float:
        """Return what an interruption costs on average: half of the time between checkpoints, and beginning again."""
        return min(max_lost_minutes * 60, self.training_s) / 2 + self.preparing_s + self.plan.phase_times.loading_s


def rentals(
    training: Training, prices: Iterable[Price], counts: Sequence[int], calibration: Calibration
) -> Iterator[Rental]:
    """Yield each technique's fastest way on each priced machine with so many GPUs, where training fits."""
    ways = cache(lambda gpu, count: list(_ways(training, find_gpu(gpu), count, calibration)))
    for price, count in product(prices, counts):
        is_sold = count % price.gpus == 0 and (not price.machine or count == price.gpus)
        if is_sold and training.rows_per_step % count == 0:
            factor = slowest(find_gpu(price.gpu), training.architecture)
            yield from (Rental(price, plan, seconds, factor) for plan, seconds in ways(price.gpu, count))


def _ways(training: Training, gpu: Gpu, count: int, calibration: Calibration) -> Iterator[tuple[Plan, float]]:
    """Yield each technique's fastest plan on so many GPUs, with its seconds of training."""
    cluster = Cluster((gpu,) * count)
    parallels = [training.parallel] if training.parallel else None
    for technique in planned_techniques(training.architecture, training.techniques, parallels, training.checkpointing):
        asked = [each for each in parallels or PARALLELS if PARALLELISMS[each].is_single == (count == 1)]
        found = filter(None, (_fastest(training, technique, each, cluster, calibration) for each in asked))
        if fastest := min(found, key=lambda way: way[1], default=None):
            yield fastest


def _fastest(
    training: Training, technique: str, parallel: str, cluster: Cluster, calibration: Calibration
) -> tuple[Plan, float] | None:
    """Return the fastest plan that fits, with its seconds of training; None where none does."""
    count, found = len(cluster.gpus), []
    of_rank = training.rows_per_step // count  # rows of a step
    evenly = [rows for rows in range(of_rank, 0, -1) if of_rank % rows == 0]
    precision = training.precision or usual_precision(technique, cluster)
    if precision == "fp16-mixed" and PARALLELISMS[parallel].shards:  # its losses are scaled, which sharding lacks here
        return None
    job = replace(training.job, technique=technique, parallel=parallel, devices=count, precision=precision)
    job = job.suited_to(training.architecture)
    ways = (False, True) if training.checkpointing is None else (training.checkpointing,)
    if training.architecture.experts and job.method.quantizes:
        ways = tuple(each for each in ways if not why_not_in_4_bits(job.parallelism, each))
    for checkpointing in ways:
        for rows in evenly:
            batch, gpu = replace(job.batch, rows=rows), cluster.gpus[0]
            tried = replace(job, gradient_checkpointing=checkpointing, batch=batch, accumulation_steps=of_rank // rows)
            memory = memory_with_overhead(training.architecture, tried, whole_model(training.architecture), gpu)
            if memory.safe_gib <= gpu.memory_gib:
                found.append(_timed(training, tried, cluster, calibration))
                break
        if found and found[-1][0].job.accumulation_steps == 1:
            break  # the whole step at once, and nothing computed again
    return min(found, key=lambda way: way[1], default=None)


def _timed(training: Training, job: Job, cluster: Cluster, calibration: Calibration) -> tuple[Plan, float]:
    """Return the plan of a step of the longest rows, and the seconds of training on rows as they are."""
    plan = make_plan(training.architecture, job, cluster, calibration)
    length = training.length_of(job.batch.rows, job.devices, job.accumulation_steps)
    usual = replace(job, batch=replace(job.batch, length=length, labelled=min(length, job.batch.labelled)))
    mean = plan if usual == job else make_plan(training.architecture, usual, cluster, calibration)
    return plan, mean.epoch_s(training.rows)


def frontier(found: Iterable[Rental]) -> list[Rental]:
    """Return those that nothing else beats in both dollars and hours, at most, cheapest first.

    They are planned with all phases of a run, and left out where one does not fit, until none is left that was not.
    """
    left, whole = list(found), dict[int, Plan]()
    while True:
        best: list[Rental] = []
        for rental in sorted(left, key=lambda each: (each.most_usd, each.most_hours)):
            if not best or rental.most_hours < best[-1].most_hours:
                best.append(rental)
        if not (new := {id(each.plan): each.plan for each in best if id(each.plan) not in whole}):
            return best
        planned = {number: plan.with_rows_chosen() for number, plan in new.items()}
        whole |= {id(plan): plan for plan in planned.values()}
        left = [
            replace(each, plan=planned.get(id(each.plan), each.plan))
            for each in left
            if id(each.plan) not in planned or planned[id(each.plan)].fits
        ]


def worth_naming(best: Iterable[Rental], choice: Rental | None = None) -> list[Rental]:
    """Return those of a frontier that are sooner than all cheaper ones by 5 % at least, and the one that is chosen."""
    named: list[Rental] = []
    for rental in best:
        if rental is choice or not named or rental.most_hours < WORTH_IT * named[-1].most_hours:
            named.append(rental)
    return named


def chosen(found: Sequence[Rental], budget_usd: float | None = None, deadline_h: float | None = None) -> Rental | None:
    """Return the cheapest that keeps budget and deadline even at most; with a budget alone the fastest; None: none."""
    within = [
        rental
        for rental in found
        if (budget_usd is None or rental.most_usd <= budget_usd)
        and (deadline_h is None or rental.most_hours <= deadline_h)
    ]
    by_time = budget_usd is not None and deadline_h is None
    return min(within, key=lambda each: each.most_hours if by_time else each.most_usd, default=None)
