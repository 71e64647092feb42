"""What GPU training to do? Memory, time and cost of every way to share the work, before a GPU is rented.

    python -m common.planner --model qwen2.5-7b --gpu a6000 --gpus 2 --batch-size 4 --seq-len 1024
    python -m common.planner --model llama-3.1-8b --technique lora --parallel ddp --gpu a6000 --gpus 4 --explain
    python -m common.planner --model llama-3.1-70b --gpu h100 --gpus 512 --nodes 64 --json

Every figure is `projected`: memory from common/memory_plan.py, time from common/time_plan.py. Exit code 0: it fits;
1: it does not; 2: the question is wrong.
"""

import argparse
import json
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn, get_args

from tabulate import tabulate

from common.architectures import Architecture, UnknownArchitectureError, as_classifier, read_architecture
from common.device_maps import balanced_shares, even_shares, read_device_map, shares_of_map, shares_that_fit
from common.gpu_overhead import CONTEXT_GIB, GAP_SHARE, memory_with_overhead
from common.hardware import Gpu, cpu_device, find_gpu, gpu_of_device, gpus
from common.memory_plan import (
    ALL_LINEAR,
    OPTIMIZER_BYTES,
    WHY_NOT_QUANTIZED_FULL,
    BatchShape,
    DeviceMemory,
    Job,
    Parallel,
    Precision,
    Quantization,
    Share,
    Technique,
    part_of_rank,
    whole_model,
)
from common.run_config import CLASSIFIED_WITH, BadInputError, RunConfig
from common.run_record import kept_records
from common.time_plan import (
    Cluster,
    StepTime,
    achieved_speed,
    break_even_gbit,
    calibration_from,
    parse_link,
    step_time,
    with_rows,
)

TIGHT = 0.9
"""Of a GPU's memory: above it a plan that fits is called tight, and `preflight` should have the last word."""
LARGEST_BATCH = 4096
"""Beyond it nobody asks."""
DEFAULT_ROWS_PER_EPOCH = 10_000
QUALITY_ORDER = ("full", "lora", "qlora")
"""Best, good, OK."""
SIMPLEST_FIRST = ("single", "ddp", "fsdp", "zero1", "zero2", "zero3", "pp", "tp", "mp")
"""Ways to share work, from the one that needs least care; ZeRO needs DeepSpeed besides PyTorch."""
ABOUT_AS_FAST = 0.9
"""Projected times are not good to a tenth: nearer than that, the simpler way is better."""
TECHNIQUE_WORDS = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}
WAYS: dict[str, tuple[Parallel, ...]] = {
    "full": ("ddp", "fsdp", "zero1", "zero2", "zero3", "mp", "pp"),
    "lora": ("ddp", "fsdp", "zero3", "mp", "pp"),
    "qlora": ("ddp", "fsdp", "mp", "pp"),
}
"""Ways to share work among several GPUs that make sense; ZeRO-1 and 2 would divide next to nothing of an adapter."""
NOT_IN_4_BITS = ("zero1", "zero2", "zero3", "tp")
"""Ways that divide no matrices in 4 bits: `Job` refuses them with qlora."""


@dataclass(frozen=True)
class Plan:
    """One way to train: memory per device, time and cost, all projected."""

    architecture: Architecture
    job: Job
    cluster: Cluster
    shares: tuple[Share, ...]
    devices: tuple[DeviceMemory, ...]
    time: StepTime
    speed_sources: tuple[str, ...]
    placed_by_hand: bool = False
    """`shares` was given, not searched: another batch size has the same."""

    @property
    def fits(self) -> bool:
        """Whether every device holds its part."""
        return all(
            memory.peak_gib <= gpu.memory_gib for memory, gpu in zip(self.devices, self.cluster.gpus, strict=True)
        )

    @property
    def is_tight(self) -> bool:
        """Whether a device is so full that the plan's own error, or gaps between blocks, may decide."""
        return self.devices[self.tightest].peak_gib > TIGHT * self.cluster.gpus[self.tightest].memory_gib

    @property
    def tightest(self) -> int:
        """The device whose memory is fullest."""
        return max(range(len(self.devices)), key=lambda i: self.devices[i].peak_gib / self.cluster.gpus[i].memory_gib)

    @property
    def shortfall_gib(self) -> float:
        """What the tightest device lacks; negative where it has room."""
        return self.devices[self.tightest].peak_gib - self.cluster.gpus[self.tightest].memory_gib

    @property
    def rows_per_step(self) -> int:
        """Of all data-parallel ranks."""
        return self.job.batch.rows * self.job.data_parallel_ranks

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks together; of an encoder-decoder those of texts and of summaries."""
        of_a_row = sum({stack.kind: self.job.batch.length_in(stack) for stack in self.architecture.stacks}.values())
        return self.rows_per_step * of_a_row / self.time.total_s

    def epoch_s(self, rows: int) -> float:
        """Seconds to go once through so many rows."""
        return self.time.total_s * rows / self.rows_per_step

    def epoch_usd(self, rows: int) -> float | None:
        """Rent of all GPUs for an epoch."""
        price = self.cluster.usd_per_second
        return None if price is None else price * self.epoch_s(rows)

    @cached_property
    def max_batch_size(self) -> int:
        """The largest number of rows per data-parallel rank that fits; 0 = not even one."""
        return _largest_that_fits(self)

    @property
    def name(self) -> str:
        """`LoRA, ddp, checkpointed`."""
        checkpointed = ", checkpointed" if self.job.gradient_checkpointing else ""
        return f"{TECHNIQUE_WORDS[self.job.technique]}, {self.job.parallel}{checkpointed}"


def _largest_that_fits(plan: Plan) -> int:
    architecture, job, gpus = plan.architecture, plan.job, plan.cluster.gpus
    step = job.micro_batches

    def fits(rows: int) -> bool:
        changed = with_rows(job, rows)
        if job.parallel in ("mp", "pp") and not plan.placed_by_hand:
            return shares_that_fit(architecture, changed, gpus) is not None
        return all(
            memory_with_overhead(architecture, changed, share, gpu).peak_gib <= gpu.memory_gib
            for share, gpu in dict.fromkeys(zip(plan.shares, gpus, strict=True))
        )

    if not fits(step):
        return 0
    low, high = 1, 2  # in steps
    while fits(high * step):
        if high * step >= LARGEST_BATCH:
            return high * step
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step


# -- plans


def make_plan(
    architecture: Architecture,
    job: Job,
    cluster: Cluster,
    calibration: dict[str, list[float]],
    shares: Sequence[Share] | None = None,
) -> Plan:
    """The plan of one way to train.

    `shares` is what each device of a job with mp or pp holds; None: so that the fullest device is least full.

    Raises:
        BadInputError: settings contradict each other or the model.
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
    by_hand = shares is not None
    if shares is None:
        shares = place(architecture, job, cluster.gpus)
    shares = tuple(replace(share, in_flight=job.in_flight(stage)) for stage, share in enumerate(shares))
    known = {
        pair: memory_with_overhead(architecture, job, *pair)
        for pair in dict.fromkeys(zip(shares, cluster.gpus, strict=True))
    }
    speeds = {gpu: achieved_speed(gpu, job, calibration) for gpu in dict.fromkeys(cluster.gpus)}
    return Plan(
        architecture,
        job,
        cluster,
        shares,
        tuple(known[pair] for pair in zip(shares, cluster.gpus, strict=True)),
        step_time(architecture, job, cluster, shares, [speeds[gpu] for gpu in cluster.gpus]),
        tuple(speed.source for speed in speeds.values()),
        by_hand,
    )


def place(architecture: Architecture, job: Job, gpus: Sequence[Gpu]) -> tuple[Share, ...]:
    """Each device's share: all layers, or with mp and pp contiguous ones, so that the fullest device is least full.

    Raises:
        BadInputError: there are more stages than layers.
    """
    if job.parallel in ("mp", "pp"):
        return balanced_shares(architecture, job, gpus)
    return (whole_model(architecture),) * len(gpus)


def ranked_plans(
    architecture: Architecture,
    asked: Job,
    cluster: Cluster,
    techniques: Iterable[Technique],
    parallels: Iterable[Parallel] | None,
    checkpointing: bool | None,
    calibration: dict[str, list[float]],
    precision: Precision | None = None,
    micro_batches: int | None = None,
) -> list[Plan]:
    """Plans, best first: what fits, then by quality (full, LoRA, QLoRA), then by speed, then by simplicity.

    Of ways that are about as fast as the fastest of their technique the simplest comes first. What does not fit is
    sorted by how much it lacks.

    `precision` None: the usual one of each technique. `checkpointing` None: with gradient checkpointing only where it
    does not fit without. `micro_batches` None: with pp as many as make sense.
    """
    plans = []
    for technique in techniques:
        for parallel in parallels or _usual_ways(technique, architecture, cluster):
            if parallel in ("mp", "pp") and parallels is None and len(cluster.gpus) > architecture.layers:
                continue
            job = replace(
                asked,
                technique=technique,
                parallel=parallel,
                devices=len(cluster.gpus),
                precision=precision or usual_precision(technique, cluster),
                micro_batches=_micro_batches(asked, parallel, len(cluster.gpus), micro_batches if parallels else None),
            )
            tries = [False, True] if checkpointing is None else [checkpointing]
            found = [
                make_plan(architecture, replace(job, gradient_checkpointing=on), cluster, calibration) for on in tries
            ]
            roomy = [plan for plan in found if not plan.is_tight]
            plans.append([*roomy, *(plan for plan in found if plan.fits), found[-1]][0])
    return [*_best_first([plan for plan in plans if plan.fits]),
            *sorted((plan for plan in plans if not plan.fits), key=lambda plan: plan.shortfall_gib)]  # fmt: skip


def _usual_ways(technique: Technique, architecture: Architecture, cluster: Cluster) -> tuple[Parallel, ...]:
    """What this repository does with the technique and so many devices."""
    if len(cluster.gpus) == 1:
        return ("single",)
    return CLASSIFIED_WITH[1:] if architecture.classes and technique != "qlora" else WAYS[technique]


def _micro_batches(asked: Job, parallel: Parallel, stages: int, named: int | None) -> int:
    if named is not None:
        return named
    return sensible_micro_batches(asked.batch.rows, stages) if parallel == "pp" else 1


def _best_first(plans: list[Plan]) -> list[Plan]:
    fastest = dict.fromkeys(QUALITY_ORDER, 0.0)
    for plan in plans:
        fastest[plan.job.technique] = max(fastest[plan.job.technique], plan.tokens_per_s)

    def rank(plan: Plan) -> tuple[int, bool, float, float]:
        technique, tokens_per_s = plan.job.technique, plan.tokens_per_s
        is_slow = tokens_per_s < ABOUT_AS_FAST * fastest[technique]
        simplicity = 0 if is_slow else SIMPLEST_FIRST.index(plan.job.parallel)
        return QUALITY_ORDER.index(technique), is_slow, simplicity, -tokens_per_s

    return sorted(plans, key=rank)


def sensible_micro_batches(rows: int, stages: int) -> int:
    """The most equal parts of a batch, up to four per stage, beyond which the bubble hardly shrinks."""
    return max(parts for parts in range(1, min(rows, 4 * stages) + 1) if rows % parts == 0)


def why(plan: Plan) -> str:
    """The reason for a plan, or against it, in words."""
    job, n = plan.job, len(plan.devices)
    tightest, gpu = plan.devices[plan.tightest], plan.cluster.gpus[plan.tightest]
    if not plan.fits:
        parts = sorted(tightest.parts_gib.items(), key=lambda part: -part[1])[:2]
        largest = " and ".join(f"{name} {gib:.1f}" for name, gib in parts)
        help_ = f"--batch-size {plan.max_batch_size} would fit" if plan.max_batch_size else _what_would_help(plan)
        return (
            f"does not fit: {tightest.peak_gib:.1f} of {gpu.memory_gib:.1f} GiB on device {plan.tightest}, most of it "
            f"{largest}; {help_}"
        )
    reasons = {
        "single": "one GPU holds it all",
        "ddp": f"each GPU holds it all, so that {n} work on rows of their own; only gradients are sent",
        "fsdp": f"weights, gradients and optimizer states are divided by {n}, and gathered layer by layer",
        "zero1": f"optimizer states are divided by {n}",
        "zero2": f"gradients and optimizer states are divided by {n}",
        "zero3": f"weights, gradients and optimizer states are divided by {n}, and gathered layer by layer",
        "mp": f"layers are divided among {n} GPUs, which work one after the other: {1 - 1 / n:.0%} idle",
        "pp": f"layers are divided among {n} GPUs, and the batch into {job.micro_batches} micro-batches: "
        f"{(n - 1) / (job.micro_batches + n - 1):.0%} idle",
        "tp": f"each layer's matrices are divided among {n} GPUs, which sum up its results: each works on every row",
    }
    reason = reasons[job.parallel]
    if plan.time.exposed_s > 0.1 * plan.time.total_s:
        reason += (
            f"; waits {plan.time.exposed_s / plan.time.total_s:.0%} of the time for {plan.cluster.slowest_link.name}"
        )
        reason += "" if job.parallel == "tp" else ", which more rows per step hide"
    if job.gradient_checkpointing:
        reason += "; gradient checkpointing, so that activations are computed twice"
    if plan.is_tight:
        reason += "; tight: let `python -m common.preflight` have the last word"
    return f"{reason}; {-plan.shortfall_gib:.1f} GiB to spare, up to {plan.max_batch_size} rows"


def _what_would_help(plan: Plan) -> str:
    """Remedies against the largest part of what does not fit."""
    job, parts = plan.job, plan.devices[plan.tightest].parts_gib
    passing = parts["activations"] + parts["logits"] > 0.5 * sum(parts.values())
    states = parts["optimizer"] + parts["gradients"] > parts["weights"]
    remedies = [
        "gradient checkpointing" if not job.gradient_checkpointing and parts["activations"] > parts["weights"] else "",
        "shorter rows (--seq-len)" if passing else "",
        "adapters instead of all weights (--technique lora)" if job.technique == "full" and not passing else "",
        "a smaller --lora-rank" if job.technique != "full" and states else "",
        "4-bit weights (--technique qlora)" if job.technique == "lora" and not passing and not states else "",
        "sharding (--parallel fsdp)" if job.parallel == "ddp" and not passing else "",
        "more or larger GPUs",
    ]
    return "not even one row would fit: try " + ", or ".join(filter(None, remedies))


def recommendation(plans: Sequence[Plan]) -> str:
    """What to do, in a sentence or two."""
    best = plans[0]
    if not best.fits:
        return f"Nothing fits. Nearest is {best.name}: {why(best)}."
    sentence = f"{best.name}: {why(best)}."
    if best.job.technique == "full" and best.job.precision == "bf16" and not best.job.parallel.startswith("zero"):
        sentence += " In pure bf16 small updates round away: compare with --precision bf16-mixed."
    fitting = [plan for plan in plans if plan.fits]
    fastest = max(fitting, key=lambda plan: plan.tokens_per_s)
    if fastest is not best and fastest.tokens_per_s > 1.1 * best.tokens_per_s:
        times = fastest.tokens_per_s / best.tokens_per_s
        sentence += f" Faster, at some cost in quality: {fastest.name}, {times:.1f} times as many tokens per second."
    return sentence[0].upper() + sentence[1:]


# -- the answer


def as_json(model: str, plans: Sequence[Plan], assumptions: Sequence[str], rows_per_epoch: int) -> dict[str, Any]:
    """The contract's JSON; figures in GiB (2^30 bytes), seconds and US dollars."""
    return {
        "model": model,
        "figures": "projected",
        "ranked": [
            {
                "technique": plan.job.technique,
                "parallel": plan.job.parallel,
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
                        "peak_gib": memory.peak_gib,
                        "capacity_gib": gpu.memory_gib,
                        "fits": memory.peak_gib <= gpu.memory_gib,
                    }
                    for number, (memory, gpu, share) in enumerate(
                        zip(plan.devices, plan.cluster.gpus, plan.shares, strict=True)
                    )
                ],
                "max_batch_size": plan.max_batch_size,
                "step_time_s": plan.time.total_s,
                "tokens_per_s": plan.tokens_per_s,
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
    """The plans, best first, as a table for a terminal."""
    rows = []
    for plan in plans:
        memory, gpu = plan.devices[plan.tightest], plan.cluster.gpus[plan.tightest]
        usd = plan.epoch_usd(rows_per_epoch)
        rows.append([
            plan.name,
            plan.job.precision,
            "no" if not plan.fits else "tight" if plan.is_tight else "yes",
            f"{memory.peak_gib:.1f} / {gpu.memory_gib:.1f}",
            plan.max_batch_size or "-",
            _seconds(plan.time.total_s),
            f"{plan.tokens_per_s:,.0f}",
            _seconds(plan.epoch_s(rows_per_epoch)),
            "-" if usd is None else f"{usd:,.2f}",
        ])  # fmt: skip
    headers = [
        "way",
        "precision",
        "fits",
        "peak / GPU\nGiB",
        "largest\nbatch",
        "step",
        "tokens\nper s",
        "epoch",
        "epoch\nUSD",
    ]
    aligned = ("left", "left", "left", *["right"] * 6)
    return tabulate(rows, headers, tablefmt="rounded_outline", colalign=aligned, disable_numparse=True)


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def explanation(plan: Plan) -> str:
    """The fullest device's memory, unfolded into its terms, and the step's time."""
    memory, gpu = plan.devices[plan.tightest], plan.cluster.gpus[plan.tightest]
    architecture, batch = part_of_rank(plan.architecture, plan.job), plan.job.batch
    lines = [
        f"{plan.name}: device {plan.tightest} of {len(plan.devices)}, {gpu.name}",
        "VRAM = weights + gradients + optimizer states + activations + logits + buffers + overhead",
        f"its highest moment: {memory.moment}",
        "",
    ]
    rows = []
    for part, gib in memory.parts_gib.items():
        terms = [term for term in memory.terms if term.part == part]
        rows += [
            [part if number == 0 else "", term.what, term.formula, f"{term.gib:.3f}"]
            for number, term in enumerate(terms)
        ]
        if len(terms) > 1:
            rows.append(["", "", f"{part} together", f"{gib:.3f}"])
    rows.append(["peak", "", f"of {gpu.memory_gib:.2f} GiB", f"{memory.peak_gib:.3f}"])
    lines.append(tabulate(rows, ["part", "what", "formula", "GiB"], tablefmt="rounded_outline", disable_numparse=True,
                          colalign=("left", "left", "left", "right")))  # fmt: skip
    rows_in_step = batch.rows // plan.job.micro_batches
    x = plan.job.hidden_bytes if architecture.is_llama_like else 4
    lengths = f"S = {batch.length} tokens, T = B S = {rows_in_step * batch.length:,}"
    if len(architecture.stacks) > 1:
        target = batch.target_length or batch.length
        lengths = (
            f"encoder S = E = {batch.length} tokens, T = TE = B S = {rows_in_step * batch.length:,}, "
            f"decoder S = {target} tokens, T = B S = {rows_in_step * target:,}"
        )
    lines += [
        f"B = {rows_in_step} rows, {lengths}, P = {rows_in_step * batch.labelled:,}, "
        f"H = {architecture.hidden:,}, I = {architecture.intermediate:,}, "
        f"Q = {architecture.heads * architecture.head_dim:,}, K = {architecture.kv_heads * architecture.head_dim:,}, "
        f"V = {architecture.vocab:,}, a = {plan.job.arithmetic_bytes}, x = {x}, w = {plan.job.weight_bytes} bytes",
        "",
        "a step's time:",
        *(f"  {term}" for term in plan.time.terms),
    ]
    return "\n".join(lines)


# -- runs


def job_of_run(run: RunConfig, batch: BatchShape) -> Job:
    """The job of a run folder's run; on one device, which holds all stages or rows, as if it were not divided.

    A batch is filled up until the micro-batches divide it, as training does (`PipelineTrainer.collated`).
    """
    filled_up = -(-batch.rows // run.micro_batches) * run.micro_batches
    targets = {"all": (), "all-linear": ALL_LINEAR if run.technique == "full" else ()}
    return Job(
        technique=run.technique,
        parallel="single" if run.devices == 1 else run.parallel,
        batch=replace(batch, rows=filled_up),
        devices=run.devices,
        precision=run.precision,
        quantization=run.quantization,
        optimizer=run.optimizer,
        attention="flash" if run.attention == "flash3" else run.attention,
        gradient_checkpointing=run.gradient_checkpointing != "none",
        lora_rank=run.lora_rank,
        target_modules=targets.get(run.target_modules, tuple(run.target_modules.split(","))),
        lora_dropout=0.0 if run.technique == "full" else run.lora_dropout,
        micro_batches=run.micro_batches,
        schedule=run.schedule,
        accumulation_steps=run.accumulation_steps,
        offload=run.offload == "cpu",
        cpu_operations=run.device == "cpu" and batch.classes > 0,  # runs in chat are planned as on a GPU
    )


def architecture_of_run(run: RunConfig, batch: BatchShape) -> Architecture:
    """The run's model as `job_of_run` trains it: for a batch with labels with a classifier's head.

    Raises:
        BadInputError: there is no shape of the model, or it is no encoder and cannot classify.
    """
    return _with_head_for(read_architecture(run.model), batch.classes)


def _with_head_for(architecture: Architecture, classes: int) -> Architecture:
    return as_classifier(architecture, classes) if classes else architecture


def plan_run(run: RunConfig, batch: BatchShape, gpu: Gpu | None = None, shares: Sequence[Share] | None = None) -> Plan:
    """The plan of a run, on the GPU that its folder was made for, or on `gpu`.

    `shares` is what each device holds, where that is known; None: what the run's device map says. Accelerate's own map
    (`auto`) needs the model: without `shares`, such a run is planned as balanced.

    Raises:
        BadInputError: the closed form does not know the model, the optimizer or the GPU, or the device map is wrong.
    """
    if gpu is None:
        gpu = cpu_device() if run.device == "cpu" else find_gpu(run.gpu)
    architecture, job, gpus = architecture_of_run(run, batch), job_of_run(run, batch), (gpu,) * run.devices
    if job.parallel not in ("mp", "pp"):
        shares = None
    elif shares is None:
        shares = _shares_of_run(run, architecture, job, gpus)
    return make_plan(architecture, job, Cluster(gpus), calibration_from(kept_records(), batch.task), shares)


def _shares_of_run(
    run: RunConfig, architecture: Architecture, job: Job, gpus: Sequence[Gpu]
) -> tuple[Share, ...] | None:
    if run.device_map in ("balanced", "auto"):
        return None
    if run.device_map == "even":
        return even_shares(architecture, job, gpus)
    return shares_of_map(architecture, read_device_map(run.device_map), len(gpus))


# -- the command line


class OneSentenceParser(argparse.ArgumentParser):
    """A parser that refuses in one sentence, as the rest does."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"error: {message}; --help lists the options\n")


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    made = OneSentenceParser(
        prog="python -m common.planner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    made.add_argument("--model", required=True, help="name in assets/model_configs, Hub id, folder, or config.json")
    made.add_argument("--technique", choices=get_args(Technique), help="without it, all are ranked")
    made.add_argument("--parallel", choices=get_args(Parallel), help="without it, all that make sense are ranked")
    made.add_argument("--gpu", action="append", default=[], help="once for all GPUs, or once for each, in their order; "
                      "without it, this machine's")  # fmt: skip
    made.add_argument("--gpus", type=int, help="how many there are, over all nodes")
    made.add_argument("--nodes", type=int, default=1, help="machines")
    made.add_argument("--gpu-memory-gib", type=float, help="of a GPU that the catalogue lacks")
    made.add_argument("--gpu-tflops", type=float, help="of such a GPU: dense, in the precision of the run")
    made.add_argument("--link", help="nvlink, pcie, or ethernet-GBITS: the slowest link between two GPUs")
    made.add_argument("--batch-size", type=int, default=1, help="rows per data-parallel rank and step (1)")
    made.add_argument("--seq-len", type=int, default=1024, help="tokens per row (1024)")
    made.add_argument("--target-len", type=int, help="with encoder-decoders: tokens per summary; without it, as many "
                      "as per row")  # fmt: skip
    made.add_argument("--classes", type=int, default=0, help="labels of a classifier; 0 = the model's own head")
    made.add_argument("--lora-rank", type=int, default=8)
    made.add_argument("--target-modules", help="linear layers that get adapters or, with full, are trained: "
                      "q_proj,v_proj (of BERT and RoBERTa query,value) or all-linear; without it: all-linear, with "
                      "full every weight")  # fmt: skip
    made.add_argument("--lora-dropout", type=float, default=0.0)
    made.add_argument("--precision", choices=get_args(Precision), help="without it: bf16 for adapters and bf16-mixed "
                      "for full fine-tuning; fp16-mixed where the GPU lacks bf16")  # fmt: skip
    made.add_argument("--quantization", choices=get_args(Quantization), help="of qlora's weights (nf4)")
    made.add_argument("--optimizer", default="adamw_torch_fused", help=f"one of {', '.join(OPTIMIZER_BYTES)}")
    made.add_argument("--attention", choices=("eager", "sdpa", "flash"), default="sdpa")
    made.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction,
                      help="without it: where it does not fit otherwise")  # fmt: skip
    made.add_argument("--micro-batches", type=int, help="with --parallel pp; without it, as many as make sense")
    made.add_argument("--offload", action="store_true", help="optimizer states wait in the host's memory")
    made.add_argument("--rows-per-epoch", type=int, default=DEFAULT_ROWS_PER_EPOCH)
    made.add_argument("--usd-per-hour", type=float, help="of one GPU, instead of the catalogue's price")
    made.add_argument("--against-nodes", type=int, help="compare the bill with the same GPUs on so many machines")
    made.add_argument("--explain", action="store_true", help="unfold the first plan's memory into its terms")
    made.add_argument("--json", action="store_true")
    return made


def cluster_of(options: argparse.Namespace) -> Cluster:
    """The GPUs that the command line means.

    Raises:
        BadInputError: a GPU is unknown, or their number does not fit their names.
    """
    for name in ("gpus", "nodes", "batch_size", "seq_len", "target_len", "lora_rank", "micro_batches", "rows_per_epoch",
                 "gpu_memory_gib", "gpu_tflops", "usd_per_hour", "against_nodes"):  # fmt: skip
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise BadInputError(f"--{name.replace('_', '-')} is {value:g}, but must be above 0.")
    by_hand = ["this GPU"] if options.gpu_memory_gib else []
    chosen = [_one_gpu(name, options) for name in options.gpu or by_hand] or _gpus_here()
    count = options.gpus or len(chosen)
    if len(chosen) not in (1, count):
        raise BadInputError(
            f"--gpus is {count}, but {len(chosen)} GPUs are named: name one for all, or each of them in order."
        )
    chosen = chosen * count if len(chosen) == 1 else chosen
    per_node = count // options.nodes
    if options.link == "nvlink" and chosen[0].nvlink_bridge and per_node > 2:
        raise BadInputError(f"An NVLink bridge joins two {chosen[0].name}, not {per_node}: pass --link pcie.")
    link = parse_link(options.link, chosen[0]) if options.link else None
    return Cluster(tuple(chosen), options.nodes, link, options.usd_per_hour)


def _one_gpu(name: str, options: argparse.Namespace) -> Gpu:
    if options.gpu_memory_gib:
        tflops = options.gpu_tflops
        if tflops is None:
            raise BadInputError(
                f"--gpu-memory-gib describes {name}, so pass its --gpu-tflops, too (dense, of its data sheet)."
            )
        rates = dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), tflops)
        return Gpu(name, options.gpu_memory_gib, 0, rates, 1000, 4, "by hand")
    if name.lower() == "cpu":
        return cpu_device()
    try:
        return find_gpu(name)
    except BadInputError as unknown:
        raise BadInputError(
            f"{unknown} Or describe it: --gpu {name!r} --gpu-memory-gib 24 --gpu-tflops 70 (dense, in your precision)."
        ) from None


def _gpus_here() -> list[Gpu]:
    names = gpus()[1]
    found = [gpu_of_device(name) for name in names]
    if not names or None in found:
        seen = ", ".join(names) or "none"
        raise BadInputError(
            f"No --gpu is named, and of this machine's GPUs ({seen}) not all are known: pass --gpu a6000."
        )
    return [gpu for gpu in found if gpu is not None]


def job_of(options: argparse.Namespace) -> Job:
    """The job that the command line means, as one GPU would do it; `ranked_plans` fills in technique and parallel."""
    if options.quantization and options.technique == "full":
        raise BadInputError(WHY_NOT_QUANTIZED_FULL)
    if options.quantization and options.technique == "lora":
        raise BadInputError("LoRA on quantized weights is QLoRA: pass --technique qlora.")
    if options.classes < 0 or options.classes == 1:
        raise BadInputError(f"--classes is {options.classes}, but a classifier has at least 2: pass 2 or more, or 0.")
    labelled = 1 if options.classes else options.target_len or options.seq_len
    shape = BatchShape(
        options.batch_size, options.seq_len, labelled, classes=options.classes, target_length=options.target_len or 0
    )
    return Job(
        technique="lora",
        parallel="single",
        batch=shape,
        precision=options.precision or "bf16",
        quantization=options.quantization or "nf4",
        optimizer=options.optimizer,
        attention=options.attention,
        lora_rank=options.lora_rank,
        target_modules=tuple(options.target_modules.split(",")) if options.target_modules else (),
        lora_dropout=options.lora_dropout,
        offload=options.offload,
        cpu_operations=options.gpu == ["cpu"] and options.classes > 0,
    )


def usual_precision(technique: Technique, cluster: Cluster) -> Precision:
    """What each technique is usually trained in: weights that are updated in fp32, frozen ones in 16 bits."""
    if all(gpu.tflops_dense["bf16"] for gpu in cluster.gpus):
        return "bf16-mixed" if technique == "full" else "bf16"
    return "fp16-mixed" if all(gpu.tflops_dense["fp16"] for gpu in cluster.gpus) else "fp32"


def assumptions_of(plans: Sequence[Plan], options: argparse.Namespace) -> list[str]:
    """What the answer rests on."""
    best = plans[0]
    job, link = best.job, best.cluster.slowest_link
    learnt = f"with one of {job.batch.classes} labels each" if job.batch.classes else "learnt as a whole"
    summaries = f" with summaries of {job.batch.target_length:,}" if job.batch.target_length else ""
    said = [
        f"rows of {job.batch.length:,} tokens{summaries}, {learnt}; {job.optimizer}, {job.attention} attention"
        + (f", LoRA rank {job.lora_rank}" if any(plan.job.technique != "full" for plan in plans) else ""),
        *dict.fromkeys(f"speed of {source}" for plan in plans for source in plan.speed_sources),
        f"overhead of a GPU: {CONTEXT_GIB} GiB context, {GAP_SHARE:.0%} of what comes and goes for gaps",
        f"an epoch is {options.rows_per_epoch:,} rows",
    ]
    if len(best.devices) > 1:
        yours = "; name yours with --link" if best.cluster.nodes > 1 and not options.link else ""
        said.append(f"between GPUs: {link.name}, of which {link.gb_per_s:.3g} GB/s are reached{yours}")
    if any(plan.job.parallel == "pp" for plan in plans):
        said.append(
            "pp: 1F1B, so that a stage holds at most as many micro-batches as stages follow it, itself included"
        )
    for gpu in dict.fromkeys(best.cluster.gpus):
        if options.usd_per_hour:
            said.append(f"{gpu.name}: {options.usd_per_hour} USD per hour, as given")
        elif gpu.usd_per_hour:
            said.append(f"{gpu.name}: {gpu.usd_per_hour} USD per hour, read {gpu.price_date} ({gpu.price_source})")
    return said


def techniques_asked(options: argparse.Namespace) -> tuple[Technique, ...]:
    """The one that is named, else all that go with the task and the way to share work; quantization needs qlora."""
    if options.technique:
        return (options.technique,)
    if (options.classes or options.parallel in NOT_IN_4_BITS) and not options.quantization:
        return tuple(technique for technique in QUALITY_ORDER if technique != "qlora")
    return QUALITY_ORDER


def answer(options: argparse.Namespace) -> int:
    """Print the answer; 0 if the recommended plan fits, else 1."""
    cluster = cluster_of(options)
    job = job_of(options)
    techniques = techniques_asked(options)
    try:
        architecture = _with_head_for(read_architecture(options.model), options.classes)
    except UnknownArchitectureError as unknown:
        if options.classes:
            raise
        from common.dry_run import answer_planner  # here: it imports torch

        return answer_planner(options, job, cluster, str(unknown))
    calibration = calibration_from(kept_records(), job.batch.task)
    plans = ranked_plans(
        architecture,
        job,
        cluster,
        techniques,
        (options.parallel,) if options.parallel else None,
        options.gradient_checkpointing,
        calibration,
        options.precision,
        options.micro_batches,
    )
    assumptions = assumptions_of(plans, options)
    compared = comparison(plans[0], options.against_nodes, calibration) if options.against_nodes else ""
    if options.json:
        print(json.dumps(as_json(options.model, plans, assumptions, options.rows_per_epoch), indent=2))
        return 0 if plans[0].fits else 1
    machines = f" on {cluster.nodes} machines" if cluster.nodes > 1 else ""
    names = " + ".join(f"{cluster.gpus.count(gpu)} x {gpu.name}" for gpu in dict.fromkeys(cluster.gpus))
    size = f"{architecture.parameters / 1e9:.2f}B parameters"
    print(f"{options.model}: {size}, {names}{machines}; every figure is projected\n")
    print(table(plans, options.rows_per_epoch))
    print(f"\n{recommendation(plans)}")
    if options.explain:
        print(f"\n{explanation(plans[0])}")
    if compared:
        print(f"\n{compared}")
    print("\nassumed:\n" + "\n".join(f"- {line}" for line in assumptions))
    return 0 if plans[0].fits else 1


def comparison(plan: Plan, nodes: int, calibration: dict[str, list[float]]) -> str:
    """The same GPUs on several machines: time, bill, and the network from which on they bill no more.

    Raises:
        BadInputError: the plan's way of sharing is not a data-parallel one.
    """
    job = plan.job
    if job.parallel in ("single", "mp", "pp", "tp"):
        raise BadInputError("--against-nodes compares data-parallel plans: pass --parallel ddp or fsdp.")
    spread = replace(plan.cluster, nodes=nodes, link=None)
    other = make_plan(plan.architecture, job, spread, calibration)
    gbit = break_even_gbit(plan.architecture, job, plan.cluster, spread, calibration)
    slower = other.time.total_s / plan.time.total_s
    network = "no network is fast enough" if gbit is None else f"{gbit:.3g} Gbit/s between them would do"
    return (
        f"on {nodes} machines over {other.cluster.slowest_link.name} a step takes {slower:.2f} times as long, and "
        f"at the same price per GPU bills as much more; to bill no more, {network}"
    )


def main() -> None:
    """`python -m common.planner`."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly
    options = parser().parse_args()
    try:
        sys.exit(answer(options))
    except BadInputError as mistake:
        parser().exit(2, f"error: {mistake}\n")


if __name__ == "__main__":
    main()
