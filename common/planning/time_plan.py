"""How long a step takes and what it costs, in closed form: projections, until measured runs recalibrate them.

step = computing (`common.planning.step_speed`) + communication that is not hidden behind it + the optimizer's pass
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.base.specs import TASKS, TECHNIQUES
from common.hardware.devices import CPU_DEVICE, Gpu, gpu_of_device
from common.hardware.prices import usual_price
from common.planning.architectures import Architecture, Block, exchanged_keys
from common.planning.between_steps import ZERO_REUSED_WEIGHTS, layer_input_bytes
from common.planning.job import QUANTIZED_NUMBER_BYTES, BatchShape, Job, architecture_of_run, job_of_run
from common.planning.shares import Share, part_of_rank, trained_parameters, trained_weight_bytes, whole_model
from common.planning.step_speed import BANDWIDTH_REACHED, computing_time, peak_tflops, products_per_s, step_flops

# numbers that Adam's pass reads and writes per trained weight (weight, gradient, two states; three of them again), and
# clipping (gradients twice, and again); PyTorch's `foreach` kernels take each operation of the update alone
ADAM_TOUCHES, CLIPPING_TOUCHES, FOREACH = 7, 3, 3
# share of NVLink's one-direction bandwidth in an all-reduce (github.com/NVIDIA/nccl-tests, issues 149 and 212)
NVLINK_ACHIEVED = 0.75
# all-reduce over PCIe x16 by generation: 28 GB/s with eight RTX 5090 (github.com/NVIDIA/nccl/issues/1639), then halves
PCIE_GB_PER_S = {3: 8.0, 4: 16.0, 5: 28.0}
# share of the line: 0.95 at 32 Gbit/s, 0.32 to 0.48 at 100 Gbit/s by TCP (github.com/NVIDIA/nccl/issues/209, 450)
ETHERNET_ACHIEVED, FAST_ETHERNET_ACHIEVED, TCP_GBIT = 0.9, 0.4, 45
ASSUMED_ETHERNET_GBIT = 25
OFFLOADED_GB_PER_S = 12.0  # across PCIe, as measured rarely above
SECONDS_PER_HOUR = 3600
MIN_CALIBRATION_STEPS = 100  # of a run on a GPU: in shorter ones the slow first steps dominate
MEASURED = "measured"  # in the source of a speed that rests on records
# how fast kept runs were, by the device's name: see `calibration_from`
Calibration = dict[str, list[float]]
ETHERNETS_GBIT = (1e-3, 1e4)  # among which a break-even is looked for


@dataclass(frozen=True)
class Link:
    """A link between two neighbouring ranks, with its bandwidth of one direction in collectives."""

    name: str
    gb_per_s: float


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a plan."""

    gpus: tuple[Gpu, ...]
    nodes: int = 1  # machines, with equally many GPUs each
    link: Link | None = None  # the slowest; None = the best that the GPU has, and Ethernet between machines
    usd_per_hour: float | None = None  # of one GPU, instead of its usual price

    def __post_init__(self) -> None:
        if self.nodes < 1 or len(self.gpus) % self.nodes:
            raise BadInputError(
                f"--gpus {len(self.gpus)} are all GPUs together, and cannot be spread evenly over --nodes {self.nodes}."
            )

    @property
    def slowest_link(self) -> Link:
        """Between two neighbours of a ring through all GPUs."""
        return self.link or (ethernet(ASSUMED_ETHERNET_GBIT) if self.nodes > 1 else self.link_in_machine)

    def link_among(self, ranks: int) -> Link:
        """Return the slowest link between neighbours of a ring through so many successive GPUs."""
        is_in_machine = self.nodes > 1 and self.gpus_per_machine % ranks == 0
        return self.link_in_machine if is_in_machine else self.slowest_link

    @property
    def gpus_per_machine(self) -> int:
        """GPUs of each machine."""
        return len(self.gpus) // self.nodes

    @property
    def link_in_machine(self) -> Link:
        """The best link between the GPUs of one machine."""
        gpu = self.gpus[0]
        return parse_link("nvlink" if gpu.nvlink_gb_per_s and not gpu.nvlink_bridge else "pcie", gpu)

    @property
    def usd_per_second(self) -> float | None:
        """Rent of all GPUs; None where a price is missing."""
        if self.usd_per_hour:
            return len(self.gpus) * self.usd_per_hour / SECONDS_PER_HOUR
        prices = list(map(usual_price, self.gpus))
        return None if None in prices else sum(price.usd_per_hour for price in prices) / SECONDS_PER_HOUR


def parse_link(name: str, gpu: Gpu) -> Link:
    """Return the link that `nvlink`, `pcie` or `ethernet-25` means; refuse others, and NVLink that a GPU lacks."""
    if name == "nvlink":
        if gpu.nvlink_gb_per_s is None:
            raise BadInputError(f"The {gpu.name} has no NVLink: pass --link pcie.")
        return Link(f"NVLink {gpu.nvlink_gb_per_s:g} GB/s", gpu.nvlink_gb_per_s / 2 * NVLINK_ACHIEVED)
    if name == "pcie":
        return Link(f"PCIe {gpu.pcie_generation}", PCIE_GB_PER_S[gpu.pcie_generation])
    found = re.fullmatch(r"ethernet-(\d+(?:\.\d+)?)", name)
    if not found or float(found[1]) == 0:
        raise BadInputError(f"--link is {name!r}: pass nvlink, pcie, or ethernet- and its Gbit/s, such as ethernet-25.")
    return ethernet(float(found[1]))


def ethernet(gbit: float) -> Link:
    """Return Ethernet of `gbit` Gbit/s: nearly all of a slow line, what TCP reaches, or a share of a fast line."""
    reached_gbit = max(min(ETHERNET_ACHIEVED * gbit, TCP_GBIT), FAST_ETHERNET_ACHIEVED * gbit)
    return Link(f"Ethernet {gbit:g} Gbit/s", reached_gbit / 8)


@dataclass(frozen=True)
class Speed:
    """How fast a GPU trains, and the source of that."""

    flops_per_s: float | None  # of a CPU, as measured; None = by the model of `common.planning.step_speed`
    source: str
    times: float = 1.0  # as fast as that model has it, as measured

    def compute_s(self, architecture: Architecture, job: Job, share: Share, gpu: Gpu) -> float:
        """Return the seconds that one device computes in a step."""
        if self.flops_per_s is None:
            return computing_time(architecture, job, share, gpu).total_s / self.times
        weights = sum(layers * stack.layer_parameters for stack, layers in share.stacks_of(architecture))
        passes = 3 if job.gradient_checkpointing else 2
        read_s = passes * weights * job.arithmetic_bytes / (gpu.memory_bandwidth_gb_per_s * 1e9)
        return max(step_flops(architecture, job, share).total / self.flops_per_s, read_s)

    def in_words(self, architecture: Architecture, job: Job, share: Share, gpu: Gpu) -> str:
        """Return where the seconds of `compute_s` go; empty where they were measured as a whole."""
        if self.flops_per_s is not None:
            return ""
        parts = computing_time(architecture, job, share, gpu)
        return (
            f": matrix products {parts.products_s:.3g} s, other kernels {parts.others_s:.3g} s; launches take "
            f"{parts.launches_s:.3g} s meanwhile"
        )


def speed_of(gpu: Gpu, job: Job, calibration: Calibration) -> Speed:
    """Return the speed of `gpu`: by published rates, times what was measured; a CPU's as measured."""
    measured = calibration.get(gpu.name)
    if measured and gpu.name == CPU_DEVICE:
        return Speed(median(measured), f"{gpu.name}: {MEASURED}, median of {len(measured)} records kept here")
    peak = peak_tflops(gpu, job)
    share = products_per_s(gpu, job) / (peak * 1e12)
    source = (
        f"{gpu.name}: matrix products at {share:.0%} of {peak:g} TFLOP/s, all else at {BANDWIDTH_REACHED:.0%} of "
        f"{gpu.memory_bandwidth_gb_per_s:,g} GB/s"
    )
    if not measured:
        return Speed(None, source)
    times = median(measured)
    return Speed(
        None, f"{source}; {MEASURED} {times:.2f} times as fast, median of {len(measured)} records kept here", times
    )


def calibration_from(records: Iterable[dict[str, Any]], task: str = "chat") -> Calibration:
    """Return how fast kept runs of the task on one device were, by the device's name.

    Of a GPU: how many times as fast as the model of `common.planning.step_speed` has it, short runs left out. Of a CPU,
    which that model is not made for: floating-point operations per second.
    """
    reached: Calibration = {}
    for record in records:
        config, devices = record["config"], record["environment"]["devices"]
        # older records know one task only; of an MLP in tiles a part comes again that `_times_counted` does not count
        is_other = config.get("task", "chat") != task or config.get("tiled_mlp")
        if record["status"] != "completed" or is_other or len(record["world"]) > 1:
            continue  # several ranks also wait for each other
        if config["device"] == "cpu":
            flops_per_s = record["tokens_per_s"] * record["flops_per_token"]
            reached.setdefault(CPU_DEVICE, []).append(flops_per_s * _times_counted(record))
        elif record["steps"] < MIN_CALIBRATION_STEPS:
            continue
        elif devices and (gpu := gpu_of_device(devices[0])) and (times := _times_as_fast(record, gpu)):
            reached.setdefault(gpu.name, []).append(times)
    return reached


def _times_as_fast(record: dict[str, Any], gpu: Gpu) -> float | None:
    """Return a run's measured tokens per second over those that the model has for its mean row; None: unknown."""
    rank, planned = record["world"][0], record.get("planned")
    if not planned or not rank.get("samples"):
        return None
    longest = planned["batch"]
    try:
        run = RunConfig.of_record(record["config"])
        length = max(1, round(rank["tokens"] / rank["samples"] / run.goal.sequences_per_row))
        batch = BatchShape(longest["rows"], length, min(longest["labelled"], length), task=run.task)
        architecture = architecture_of_run(run, batch)
        seconds = computing_time(architecture, job_of_run(run, batch), whole_model(architecture), gpu).total_s
    except BadInputError:
        return None
    return record["tokens_per_s"] / (batch.tokens / seconds)


def _times_counted(record: dict[str, Any]) -> float:
    """Return a run's operations over those counted: forward passes that come again, 2N each beside 6N or LoRA's 4N."""
    config, has_adapters = record["config"], TECHNIQUES[record["technique"]].has_adapters
    counted = 4 if has_adapters else 6
    again = bool(config["gradient_checkpointing"]) + (has_adapters and TASKS[config.get("task", "chat")].compares)
    return (counted + 2 * again) / counted


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step; with accumulation, of one of its micro-batches on average."""

    compute_s: float  # of the device that computes longest
    exposed_s: float  # of the communication, what computing does not hide
    bubble_s: float  # in which a device waits for others
    optimizer_s: float
    sent_gb: float  # by one rank, in 10^9 bytes
    generating_s: float = 0.0  # with rewards: the answers that are learnt from
    terms: tuple[str, ...] = field(default=(), repr=False)  # in words, for `--explain`

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.exposed_s + self.bubble_s + self.optimizer_s + self.generating_s


def step_time(
    architecture: Architecture, job: Job, cluster: Cluster, shares: Sequence[Share], speeds: Sequence[Speed]
) -> StepTime:
    """Compute how long a step takes; `shares` and `speeds` have one entry per device.

    Gradients are sent while the backward pass goes on, and gathered weights while a layer computes: only what takes
    longer shows; what tensor parallel sums, and what ranks exchange that share rows, is waited for. With accumulation
    DDP sends once per optimizer step.
    """
    part, parallelism = part_of_rank(architecture, job), job.parallelism
    devices = list(zip(cluster.gpus, shares, speeds, strict=True))
    known = {(gpu, share, speed): speed.compute_s(part, job, share, gpu) for gpu, share, speed in set(devices)}
    seconds = [known[device] for device in devices]
    updates_s = [_optimizer_s(part, job, gpu, share) for gpu, share, _ in known]
    optimizer_s = max(updates_s) / job.accumulation_steps
    sent, communication_s, links = _communication(architecture, job, cluster)
    exposed_s = communication_s
    slowest, bubble_s = max(seconds), 0.0
    if parallelism.pipelines:
        # every micro-batch passes the slowest stage; filling and draining takes one pass through all but one stage
        bubble_s = (len(seconds) - 1) / job.micro_batches * slowest
        exposed_s = communication_s / job.micro_batches
    elif parallelism.layers_in_turn:
        bubble_s = sum(seconds) - slowest
    elif parallelism.shards_weights:
        exposed_s = max(0.0, communication_s - slowest)
    elif not parallelism.splits_matrices:
        flops = step_flops(architecture, job, shares[0])
        backward_share = (flops.activation_gradients + flops.weight_gradients) / flops.total
        exposed_s = max(0.0, communication_s - slowest * backward_share)
    if parallelism.replicates:  # gradients stay where they are until the last micro-batch
        sent /= job.accumulation_steps
        communication_s /= job.accumulation_steps
        exposed_s /= job.accumulation_steps
    # layers' inputs go to the host and come back while others are computed
    offloaded = 2 * part.stacks[0].layers * layer_input_bytes(part, job) * job.offloads_layer_inputs
    exposed_s += max(0.0, offloaded / (OFFLOADED_GB_PER_S * 1e9) - slowest)
    exchanged, near = exchanged_bytes(architecture, job), cluster.link_among(job.sp_size)
    exchanged_s = exchanged / (near.gb_per_s * 1e9)
    exchange = f"exchange of heads: {exchanged / 1e9:,.3g} GB by {near.name}, {exchanged_s:.3g} s, not hidden"
    return StepTime(
        slowest, exposed_s + exchanged_s, bubble_s, optimizer_s, (sent + exchanged) / 1e9, terms=
        (
            f"computing: {step_flops(part, job, shares[0]).total / 1e12:,.1f} TFLOP, {slowest:.3g} s"
            + speeds[0].in_words(part, job, shares[0], cluster.gpus[0]),
            f"communication: {sent / 1e9:,.3g} GB by {links}, {communication_s:.3g} s, "
            f"of which {exposed_s:.3g} s are not hidden",
            *[exchange] * (job.sp_size > 1),
            f"waiting: {bubble_s:.3g} s",
            f"optimizer: {optimizer_s:.3g} s",
        ),
    )  # fmt: skip


def _communication(architecture: Architecture, job: Job, cluster: Cluster) -> tuple[float, float, str]:
    """Return the bytes that a rank sends in a step, their seconds, and by which links in words."""
    in_copy, between_copies = traffic(architecture, job)
    link, near = cluster.slowest_link, cluster.link_among(job.shard_ranks)
    named = f"{link.name} at {link.gb_per_s:,.3g} GB/s"
    if job.dp_replicate_size == 1:
        return in_copy + between_copies, (in_copy + between_copies) / (link.gb_per_s * 1e9), named
    between_copies /= job.accumulation_steps  # copies average their gradients after the last micro-batch
    # a machine's ranks average their shards in rings of their own, which share its network
    rings = min(job.shard_ranks, cluster.gpus_per_machine) if cluster.nodes > 1 else 1
    near_s, far_s = in_copy / (near.gb_per_s * 1e9), rings * between_copies / (link.gb_per_s * 1e9)
    words = (
        f"two links: {in_copy / 1e9:,.3g} GB within a copy by {near.name}, {near_s:.3g} s, and "
        f"{between_copies / 1e9:,.3g} GB between copies by {named} that {rings} rings share, {far_s:.3g} s; together"
    )
    return in_copy + between_copies, near_s + far_s, words


def _optimizer_s(architecture: Architecture, job: Job, gpu: Gpu, share: Share) -> float:
    touches = CLIPPING_TOUCHES + ADAM_TOUCHES * (FOREACH if job.optimizer == "adamw_torch" else 1)
    touched = trained_weight_bytes(architecture, job, share) / job.shard_ranks * touches
    if job.offload:
        return touched / (OFFLOADED_GB_PER_S * 1e9)
    return touched / (gpu.memory_bandwidth_gb_per_s * 1e9 * BANDWIDTH_REACHED)


def traffic(architecture: Architecture, job: Job) -> tuple[float, float]:
    """Count the bytes that one rank sends in a step within a sharded copy of the model, and between copies.

    A ring's all-reduce sends 2 (n - 1) / n of the gradients (nccl-tests, doc/PERFORMANCE.md). Sharded weights are
    gathered twice, and their gradients scattered once (Rajbhandari et al. 2020, "ZeRO", section 7); FSDP keeps what is
    in its root (embeddings, final norm and head) between the passes, DeepSpeed weights that are soon used again.
    Between stages goes one hidden state each way.
    """
    n, batch = job.devices, job.batch
    around = (n - 1) / n
    if job.parallelism.is_single:
        return 0.0, 0.0
    if job.parallelism.splits_layers:
        x = 4 if job.precision == "fp32" else 2
        borders = n - 1 if job.parallelism.layers_in_turn else 1
        return 0.0, 2.0 * borders * batch.tokens * architecture.hidden * x
    if job.parallelism.splits_matrices:
        return 0.0, 2 * around * summed_bytes(architecture, job)
    trained = trained_parameters(architecture, job)
    if job.parallelism.shards_weights:
        a, has_adapters = job.arithmetic_bytes, job.method.has_adapters
        layers = sum(stack.layers * stack.layer_parameters for stack in architecture.stacks)
        quantized = architecture.matrix_weights * job.method.quantizes  # sent as they are stored
        of_layers = quantized * QUANTIZED_NUMBER_BYTES[job.quantization] + (layers - quantized) * a
        of_layers += trained * job.trained_bytes * has_adapters  # the adapters, too
        ends = (architecture.parameters - layers) * a
        again = of_layers if job.parallelism.uses_fsdp else a * max(0, architecture.parameters - ZERO_REUSED_WEIGHTS)
        shards, copies = job.shard_ranks, job.dp_replicate_size
        gradients = trained * (job.trained_bytes if job.parallelism.uses_fsdp or has_adapters else a)
        in_copy = (shards - 1) / shards * (of_layers + ends + again + gradients)
        return in_copy, 2 * (copies - 1) / copies * gradients / shards
    is_zero = job.parallelism.uses_deepspeed and not job.method.has_adapters
    sent = trained * job.arithmetic_bytes if is_zero else trained_weight_bytes(architecture, job)
    return 0.0, 2 * around * sent


def summed_bytes(architecture: Architecture, job: Job) -> float:
    """Count the bytes of activations, and of their gradients, that tensor-parallel ranks sum up in a step.

    In the forward pass the results of attention and MLP; in the backward pass the gradients of their inputs, in fp32
    (common/training/tensor_parallel.py: `shared_input`), but where nothing before them is trained. Between an adapter's
    matrices there is one such sum, as wide as its rank.
    """
    passes, hidden = 1 + job.gradient_checkpointing, job.batch.tokens * architecture.hidden
    between, a, total = job.batch.tokens * job.lora_rank, job.arithmetic_bytes, 0.0
    for stack in architecture.stacks:
        adapted = [linear for linear in stack.linears if job.adapts(linear)]
        by_columns = sum(not linear.ends_block for linear in adapted)
        trained = adapted or [linear for linear in stack.linears if job.trains(linear)]
        trains_attention = any(linear.block == Block.ATTENTION for linear in trained)
        # of the first layer's two sums in the backward pass, those of inputs that depend on nothing trained
        needless = 0 if job.trains_all else 2 - trains_attention
        total += stack.layers * (by_columns + passes * (len(adapted) - by_columns)) * between * a
        total += stack.layers * 2 * passes * hidden * a
        total += (stack.layers * 2 - needless) * hidden * 4
    return total


def exchanged_bytes(architecture: Architecture, job: Job) -> float:
    """Count the bytes that a rank sends in a step to ranks that share its rows (Jacobs et al. 2023, section 3).

    In each layer its tokens' queries, keys and values, and the results back; as much in the backward pass, and again
    where checkpointing repeats the forward pass. Of each (n - 1) / n goes to others.
    """
    n, passes, layers = job.sp_size, 2 + job.gradient_checkpointing, sum(stack.layers for stack in architecture.stacks)
    of_token = 2 * (architecture.query_size + exchanged_keys(architecture, n)) * job.arithmetic_bytes
    return (n - 1) / n * passes * layers * job.own_batch.tokens * of_token


def fast_enough_from_gbit(
    architecture: Architecture, job: Job, machines: Cluster, most_s: float, calibration: Calibration
) -> float | None:
    """Return the Ethernet, in Gbit/s, from which on a step of `machines` takes at most `most_s`; None: never."""
    shares = [whole_model(architecture)] * len(machines.gpus)
    speeds = [speed_of(gpu, job, calibration) for gpu in machines.gpus]

    def is_fast_enough(gbit: float) -> bool:
        cluster = replace(machines, link=ethernet(gbit))
        return step_time(architecture, job, cluster, shares, speeds).total_s <= most_s

    low, high = ETHERNETS_GBIT
    if not is_fast_enough(high):
        return None
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_fast_enough(middle) else (middle, high)
    return high
