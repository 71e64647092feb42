"""How long a step takes and what it costs, in closed form: projections, until a measured run recalibrates them.

    step = computing + what of the communication is not hidden behind it + the optimizer's pass over its states

Floating-point operations are counted as they happen: forward, gradients of the activations, gradients of what is
trained (frozen weights have none), and the second forward pass of gradient checkpointing. A GPU reaches a share of its
dense peak; that share is a published one, or the median of the records kept for that GPU.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from common.base.errors import BadInputError
from common.base.specs import TECHNIQUES
from common.hardware.devices import Gpu, cpu_device, gpu_of_device
from common.planning.architectures import Architecture
from common.planning.job import QUANTIZED_NUMBER_BYTES, Job
from common.planning.memory_plan import ZERO_REUSED_WEIGHTS
from common.planning.shares import Share, part_of_rank, quantized_weights, trained_parameters, trains_head, whole_model

# published share of the dense peak that training reaches, by the start of the GPU's name
ACHIEVED_SHARES = {
    "A100": (0.50, "53 to 64 % without recompute counted: github.com/mosaicml/llm-foundry, scripts/train/benchmarking"),
    "H100": (0.40, "38 to 46 %: github.com/mosaicml/llm-foundry, scripts/train/benchmarking"),
    "RTX 4090": (0.46, "0.57B, sequences of 2048: yandesbiens.com/blog/forgelm-4090-cost"),
    "V100": (0.30, "30 to 48 %: nv-adlr.github.io/MegatronLMV1"),
    "RTX A6000": (0.35, "25 to 47 % in single layers: github.com/fanghostt/transformers-benchmarks"),
}
# the same of the peak in fp32, which is that of other units than the tensor cores
FP32_SHARES = {
    "V100": (
        0.50,
        "49 to 51 %: BERT-large, 7.56 rows/s of 512 tokens and 33.36 of 128: github.com/NVIDIA/DeepLearningExamples, "
        "PyTorch/LanguageModeling/BERT",
    ),
}
# where nothing is published: an assumption, in the midst of the others
ASSUMED_SHARE = 0.35
# share of NVLink's one-direction bandwidth in an all-reduce: 0.67 to 0.82 (github.com/NVIDIA/nccl-tests, issues 149
# and 212)
NVLINK_ACHIEVED = 0.75
# all-reduce over PCIe x16 by generation: 28 GB/s with eight RTX 5090 (github.com/NVIDIA/nccl/issues/1639), the others
# by halves
PCIE_GB_PER_S = {3: 8.0, 4: 16.0, 5: 28.0}
# share of the line: 0.95 at 32 Gbit/s, 0.32 to 0.48 at 100 Gbit/s by TCP (github.com/NVIDIA/nccl/issues/209, 450)
ETHERNET_ACHIEVED, FAST_ETHERNET_ACHIEVED, TCP_GBIT = 0.9, 0.4, 45
ASSUMED_ETHERNET_GBIT = 25
OFFLOADED_GB_PER_S = 12.0  # across PCIe, as measured rarely above
SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Link:
    """The slowest link between two neighbouring ranks; its bandwidth is that of one direction in collectives."""

    name: str
    gb_per_s: float


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a plan.

    Attributes:
        gpus: One per device, in the order of the ranks.
        nodes: Machines, with equally many GPUs each.
        link: Named by the user; None = the best that the GPU has, and Ethernet between machines.
        usd_per_hour: Price of one GPU that overrides the catalogue's.
    """

    gpus: tuple[Gpu, ...]
    nodes: int = 1
    link: Link | None = None
    usd_per_hour: float | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1 or len(self.gpus) % self.nodes:
            raise BadInputError(
                f"--gpus {len(self.gpus)} are all GPUs together, and cannot be spread evenly over --nodes {self.nodes}."
            )

    @property
    def slowest_link(self) -> Link:
        """Between two neighbours of a ring through all GPUs."""
        if self.link or self.nodes > 1:
            return self.link or ethernet(ASSUMED_ETHERNET_GBIT)
        return self.link_in_machine

    def link_among(self, ranks: int) -> Link:
        """Return the slowest link between neighbours of a ring through so many successive GPUs."""
        in_one_machine = self.nodes > 1 and self.gpus_per_machine % ranks == 0
        return self.link_in_machine if in_one_machine else self.slowest_link

    @property
    def gpus_per_machine(self) -> int:
        """GPUs that share a machine's network."""
        return len(self.gpus) // self.nodes

    @property
    def link_in_machine(self) -> Link:
        """The best link between the GPUs of one machine."""
        gpu = self.gpus[0]
        return parse_link("nvlink" if gpu.nvlink_gb_per_s and not gpu.nvlink_bridge else "pcie", gpu)

    @property
    def usd_per_second(self) -> float | None:
        """Rent of all GPUs; None where a price is missing."""
        prices = [self.usd_per_hour or gpu.usd_per_hour for gpu in self.gpus]
        return None if None in prices else sum(prices) / SECONDS_PER_HOUR


def parse_link(name: str, gpu: Gpu) -> Link:
    """Return the link that a user means by `nvlink`, `pcie` or `ethernet-25`.

    Raises:
        BadInputError: It is none of these, or the GPU has no NVLink.
    """
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
    """Return Ethernet of `gbit` Gbit/s: nearly all of a slow line, then what TCP reaches, or a share of a fast line."""
    reached_gbit = max(min(ETHERNET_ACHIEVED * gbit, TCP_GBIT), FAST_ETHERNET_ACHIEVED * gbit)
    return Link(f"Ethernet {gbit:g} Gbit/s", reached_gbit / 8)


@dataclass(frozen=True)
class Speed:
    """Floating-point operations per second that a GPU reaches, and the source of that number."""

    flops_per_s: float
    source: str


def achieved_speed(gpu: Gpu, job: Job, calibration: dict[str, list[float]]) -> Speed:
    """Return what `gpu` reaches in training: the median of its records kept here, or a published share of its peak.

    Raises:
        BadInputError: The GPU does not compute in the job's precision.
    """
    if measured := calibration.get(gpu.name):
        return Speed(median(measured), f"{gpu.name}: measured, median of {len(measured)} records kept here")
    peak = gpu.tflops_dense[job.precision.removesuffix("-mixed")]
    if peak is None:
        raise BadInputError(f"The {gpu.name} does not compute in {job.precision}: pass --precision fp16-mixed or fp32.")
    published = {**ACHIEVED_SHARES, **(FP32_SHARES if job.precision == "fp32" else {})}
    share, source = next(
        (entry for name, entry in published.items() if gpu.name.startswith(name)),
        (ASSUMED_SHARE, "an assumption: nothing published was found"),
    )
    if job.method.has_adapters:
        source += f"; times {job.method.speed_factor} for {job.technique}, github.com/QwenLM/Qwen"
    share *= job.method.speed_factor
    return Speed(peak * 1e12 * share, f"{gpu.name}, {job.technique}: {share:.0%} of {peak:g} TFLOP/s ({source})")


def calibration_from(records: Iterable[dict[str, Any]], task: str = "chat") -> dict[str, list[float]]:
    """Return the floating-point operations per second that kept runs on one device reached, by the GPU's name.

    Of runs of the same task alone: those of others have models and rows of other sizes.

    The operations are the record's own count, which leaves out that checkpointing computes the forward pass again: 2N
    more than full training's 6N, or LoRA's 4N.
    """
    reached: dict[str, list[float]] = {}
    for record in records:
        config, devices = record["config"], record["environment"]["devices"]
        gpu = cpu_device() if config["device"] == "cpu" else gpu_of_device(devices[0])
        is_other = config.get("task", "chat") != task  # older records know one task only
        if record["status"] != "completed" or gpu is None or is_other or len(record["world"]) > 1:
            continue  # several ranks also wait for each other
        again = 3 / 2 if TECHNIQUES[record["technique"]].has_adapters else 4 / 3
        flops_per_s = record["tokens_per_s"] * record["flops_per_token"]
        reached.setdefault(gpu.name, []).append(flops_per_s * (again if config["gradient_checkpointing"] else 1))
    return reached


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of one step on one data-parallel rank, or of one device's share of the layers."""

    forward: float
    activation_gradients: float
    weight_gradients: float
    recomputed: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.forward + self.activation_gradients + self.weight_gradients + self.recomputed


def step_flops(architecture: Architecture, job: Job, share: Share) -> StepFlops:
    """Count the operations of a step: a product of (m, k) and (k, n) takes 2 m k n (Kaplan et al. 2020, section 2.1).

    Causal attention reads half of the earlier tokens on average.
    """
    batch, queries = job.batch, architecture.heads * architecture.head_dim
    layers, attention, adapters, trained = 0.0, 0.0, 0.0, 0.0
    for stack, count in zip(architecture.stacks, share.layers, strict=True):
        for linear in stack.linears:
            twice_tokens = count * 2 * batch.tokens_into(linear, stack)
            layers += twice_tokens * linear.inputs * linear.outputs
            trained += twice_tokens * linear.inputs * linear.outputs * job.trains(linear)
            adapters += twice_tokens * linear.lora_parameters(job.lora_rank) * job.adapts(linear)
        for number, (asking, asked) in enumerate(batch.attentions_in(stack)):
            is_causal = stack.kind != "encoder" and number == 0  # cross attention reads the whole text
            attention += count * 4 * batch.rows * asking * asked * queries * (0.5 if is_causal else 1.0)
    positions = batch.rows * batch.labelled
    head = 2 * positions * architecture.vocab * architecture.hidden if share.has_head else 0.0
    forward = layers + attention + adapters + head
    trained += adapters + (head if trains_head(architecture, job) else 0.0)
    recomputed = forward - head if job.gradient_checkpointing else 0.0
    if job.schedule == "gpipe" and job.micro_batches > 1:  # losses that wait come again in the backward pass
        recomputed += head
    return StepFlops(forward, layers + 2 * attention + adapters + head, trained, recomputed)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, and where they go; with accumulation, of one of its micro-batches on average.

    Attributes:
        compute_s: Of the device that computes longest; with mp of all devices, one after the other.
        exposed_s: Of the communication, what computing does not hide.
        bubble_s: With pp: seconds in which a device waits for others.
        sent_gb: Sent by one rank, in 10^9 bytes.
        terms: All of it in words, for `--explain`.
    """

    compute_s: float
    exposed_s: float
    bubble_s: float
    optimizer_s: float
    sent_gb: float
    terms: tuple[str, ...] = field(default=(), repr=False)

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.exposed_s + self.bubble_s + self.optimizer_s


def step_time(
    architecture: Architecture, job: Job, cluster: Cluster, shares: Sequence[Share], speeds: Sequence[Speed]
) -> StepTime:
    """Compute how long a step takes; `shares` and `speeds` have one entry per device.

    Rules: gradients are sent while the backward pass goes on, and gathered weights while a layer computes, so that only
    what is longer than that shows; what tensor parallel sums is waited for. A device's layers take at least as long as
    reading their weights once per pass. With accumulation all update once per optimizer step, and DDP sends once.
    """
    part, parallelism = part_of_rank(architecture, job), job.parallelism
    devices = list(zip(cluster.gpus, shares, speeds, strict=True))
    seconds = [_compute_s(part, job, gpu, share, speed) for gpu, share, speed in devices]
    optimizer_s = max(_optimizer_s(part, job, gpu, share) for gpu, share, _ in devices) / job.accumulation_steps
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
        sent, communication_s, exposed_s = (
            each / job.accumulation_steps for each in (sent, communication_s, exposed_s)
        )
    return StepTime(
        slowest, exposed_s, bubble_s, optimizer_s, sent / 1e9,
        (
            f"computing: {step_flops(part, job, shares[0]).total / 1e12:,.1f} TFLOP, {slowest:.3g} s",
            f"communication: {sent / 1e9:,.3g} GB by {links}, {communication_s:.3g} s, "
            f"of which {exposed_s:.3g} s are not hidden",
            f"waiting: {bubble_s:.3g} s",
            f"optimizer: {optimizer_s:.3g} s",
        ),
    )  # fmt: skip


def _communication(architecture: Architecture, job: Job, cluster: Cluster) -> tuple[float, float, str]:
    """Return the bytes that a rank sends in a step, the seconds that they take, and by which links in words."""
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


def _compute_s(architecture: Architecture, job: Job, gpu: Gpu, share: Share, speed: Speed) -> float:
    passes = 3 if job.gradient_checkpointing else 2
    weights = sum(
        layers * stack.layer_parameters for stack, layers in zip(architecture.stacks, share.layers, strict=True)
    )
    read_s = passes * weights * job.arithmetic_bytes / (gpu.memory_bandwidth_gb_per_s * 1e9)
    return max(step_flops(architecture, job, share).total / speed.flops_per_s, read_s)


def _optimizer_s(architecture: Architecture, job: Job, gpu: Gpu, share: Share) -> float:
    """Return the seconds of Adam's pass: it reads weight, gradient and two states, and writes three of them."""
    touched = trained_parameters(architecture, job, share) / job.shard_ranks * 7 * job.trained_bytes
    bandwidth_gb_per_s = OFFLOADED_GB_PER_S if job.offload else gpu.memory_bandwidth_gb_per_s
    return touched / (bandwidth_gb_per_s * 1e9)


def sent_bytes(architecture: Architecture, job: Job) -> float:
    """Count the bytes that one rank sends in a step."""
    return sum(traffic(architecture, job))


def traffic(architecture: Architecture, job: Job) -> tuple[float, float]:
    """Count the bytes that one rank sends in a step within a sharded copy of the model, and between copies.

    A ring's all-reduce sends 2 (n - 1) / n of the gradients (nccl-tests, doc/PERFORMANCE.md). Sharded weights are
    gathered twice, and their gradients scattered once: 3 (n - 1) / n of the weights, 1.5 times as much (Rajbhandari et
    al. 2020, "ZeRO", section 7). FSDP keeps what is in its root (embeddings, final norm and head) between the passes;
    so does DeepSpeed with weights that are soon used again. Between stages one hidden state each way and border.
    Tensor parallel sums activations, not gradients. With hybrid sharding the copies all-reduce each rank's shard of the
    gradients.
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
        quantized = quantized_weights(architecture) if job.method.quantizes else 0  # sent as they are stored
        of_layers = quantized * QUANTIZED_NUMBER_BYTES[job.quantization] + (layers - quantized) * a
        of_layers += trained * job.trained_bytes * has_adapters  # the adapters, too
        ends = (architecture.parameters - layers) * a
        again = of_layers if job.parallelism.uses_fsdp else a * max(0, architecture.parameters - ZERO_REUSED_WEIGHTS)
        shards, copies = job.shard_ranks, job.dp_replicate_size
        gradients = trained * (job.trained_bytes if job.parallelism.uses_fsdp or has_adapters else a)
        in_copy = (shards - 1) / shards * (of_layers + ends + again + gradients)
        return in_copy, 2 * (copies - 1) / copies * gradients / shards
    is_zero = job.parallelism.uses_deepspeed and not job.method.has_adapters
    return 0.0, 2 * around * trained * (job.arithmetic_bytes if is_zero else job.trained_bytes)


def summed_bytes(architecture: Architecture, job: Job) -> float:
    """Count the bytes of activations, and of their gradients, that tensor-parallel ranks sum up in a step.

    In the forward pass the results of attention and MLP; in the backward pass the gradients of their inputs, in fp32,
    each once (common/training/tensor_parallel.py: `shared_input`), except where nothing before them is trained. Between
    an adapter's matrices there is one such sum, as wide as its rank.
    """
    passes, hidden = 1 + job.gradient_checkpointing, job.batch.tokens * architecture.hidden
    between, a, total = job.batch.tokens * job.lora_rank, job.arithmetic_bytes, 0.0
    for stack in architecture.stacks:
        adapted = [linear for linear in stack.linears if job.adapts(linear)]
        by_columns = sum(not linear.ends_block for linear in adapted)
        trained = adapted or [linear for linear in stack.linears if job.trains(linear)]
        trains_attention = any(linear.block == "attention" for linear in trained)
        # of the first layer's two sums in the backward pass, those of inputs that depend on nothing trained
        needless = 0 if job.trains_all else 2 - trains_attention
        total += stack.layers * (by_columns + passes * (len(adapted) - by_columns)) * between * a
        total += stack.layers * 2 * passes * hidden * a
        total += (stack.layers * 2 - needless) * hidden * 4
    return total


def break_even_gbit(
    architecture: Architecture,
    job: Job,
    one_machine: Cluster,
    many_machines: Cluster,
    calibration: dict[str, list[float]],
) -> float | None:
    """Return the Ethernet, in Gbit/s, from which on many machines bill no more than one machine; None: never.

    Many machines of one cheap GPU send their gradients over Ethernet, and every machine is paid while it waits.
    """

    def bill(cluster: Cluster) -> float:
        speeds = [achieved_speed(gpu, job, calibration) for gpu in cluster.gpus]
        shares = [whole_model(architecture)] * len(cluster.gpus)
        price = cluster.usd_per_second
        if price is None:
            raise BadInputError("A GPU of the comparison has no price in the catalogue: pass --usd-per-hour.")
        return step_time(architecture, job, cluster, shares, speeds).total_s * price

    target = bill(one_machine)
    low, high = 1e-3, 1e4
    if bill(replace(many_machines, link=ethernet(high))) > target:
        return None
    for _ in range(60):
        middle = (low * high) ** 0.5
        reached = bill(replace(many_machines, link=ethernet(middle))) <= target
        low, high = (low, middle) if reached else (middle, high)
    return high
