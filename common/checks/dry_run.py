"""The real training step on fake tensors: how much memory it takes, part by part, without a GPU and without weights.

    python -m common.dry_run 2.1_lora_finetuning/run_1_a6000_48g_x1
    python -m common.dry_run 2.1_lora_finetuning/run_1_a6000_48g_x1 --batch_size 4 --model llama-3.1-70b

A fake tensor has a shape, a dtype and a storage of the right size, but no bytes: every operation of the step runs,
and computes nothing. A mode counts the storages that are alive. Two small depths are run, and as every further layer
adds the same, their figures are extrapolated to all layers, segment by segment of the step. Of a model that is divided
among devices each device's share is run alone: with pp by the real schedule, which sends nothing.

On a GPU PyTorch chooses other operations here and there than on a CPU, where this runs: dropout keeps a mask of one
byte per element, autocast computes layer norms and softmax in fp32, unfused optimizers work on lists of tensors. The
dry run of a run on a GPU does as a GPU does. What it cannot see: the CUDA context, gaps between allocated blocks, and
what is on its way between devices.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

from tabulate import tabulate
from transformers import PretrainedConfig

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.base.specs import PARALLELISMS, TECHNIQUES
from common.checks.fake_steps import fake_share_step, fake_step
from common.checks.folder_runs import run_of_folder
from common.data.batches import longest_batch
from common.data.splits import label_names_of, load_splits, tokens_of
from common.hardware.devices import GIB
from common.models.loading import (
    any_shape_config,
    load_tokenizer,
)
from common.planning.job import BatchShape, Job
from common.planning.plans import Plan, plan_run, usual_precision
from common.planning.shares import Share
from common.planning.terms import PARTS
from common.planning.time_plan import Cluster
from common.training.memory_tracker import Bytes, Timeline
from common.training.placement import place_stages

SMALL_DEPTHS = (2, 3)


@dataclass(frozen=True)
class DryRun:
    """What a step would take on one device, in bytes; `timeline` is extrapolated to all layers."""

    timeline: Timeline

    @property
    def peak_segment(self) -> str:
        """The segment in which most is alive."""
        return max(self.timeline, key=lambda segment: sum(self.timeline[segment].values()))

    @property
    def peak(self) -> Bytes:
        """The parts alive at the peak."""
        return self.timeline[self.peak_segment]

    @property
    def peak_gib(self) -> float:
        """The peak of allocated memory, in GiB."""
        return sum(self.peak.values()) / GIB

    def phases(self) -> dict[str, tuple[str, Bytes]]:
        """The highest segment of each phase and its parts: loaded, forward, backward, optimizer step."""
        found = {}
        for phase in ("load", "forward", "backward", "optimizer"):
            segments = [segment for segment in self.timeline if segment.startswith(phase)]
            highest = max(segments, key=lambda segment: sum(self.timeline[segment].values()))
            found[phase] = highest, self.timeline[highest]
        return found


def dry_run(run: RunConfig, batch: BatchShape, as_on_gpu: bool = True) -> DryRun:
    """A training step of `run` on a batch of the given shape, on fake tensors, extrapolated to all layers.

    Of a run whose layers are divided among devices: the fullest device's. `as_on_gpu` has it choose operations as a GPU
    does; without it, as the CPU does.

    Raises:
        BadInputError: the model has no known shape, or stacks of different depth, or cannot be divided as asked.
    """
    if run.method.quantizes:
        raise BadInputError(
            f"technique is qlora, quantization {run.quantization}, but fake tensors cannot be quantized: ask "
            "`python -m common.planner --technique qlora`, or take the real step with `python -m common.preflight`."
        )
    if run.is_sharded or run.parallelism.splits_matrices:
        raise BadInputError(
            f"parallel is {run.parallel}, but fake tensors are not divided among ranks: ask `python -m common.planner "
            f"--parallel {run.parallel}`, or take the real step with `python -m common.preflight`."
        )
    if divides_layers(run):
        return max(dry_runs_of_shares(run, batch, as_on_gpu), key=lambda device: device.peak_gib)
    config, run = config_for(run, batch), in_bf16(run)
    return DryRun(_at_depth(lambda part: fake_step(run, part, batch, as_on_gpu), config, _depth(config)))


def config_for(run: RunConfig, batch: BatchShape) -> PretrainedConfig:
    """The run's model as it is trained on `batch`: with classification its head has so many classes."""
    config = any_shape_config(run.model)
    if batch.classes:
        config.num_labels = batch.classes
    return config


def divides_layers(run: RunConfig) -> bool:
    """Whether devices hold different layers; on CPU one device holds all of a run with mp."""
    return run.parallelism.pipelines or (run.parallelism.layers_in_turn and run.device != "cpu")


def dry_runs_of_shares(run: RunConfig, batch: BatchShape, as_on_gpu: bool = True) -> list[DryRun]:
    """A training step of each device of a run with mp or pp, with the layers that the run's device map gives it.

    Raises:
        BadInputError: layers cannot be placed, for which the planner must know the model.
    """
    shares = place_stages(run, batch).plan.shares
    different = {share: number for number, share in enumerate(shares)}
    known = {share: dry_run_of_share(run, batch, shares, number, as_on_gpu) for share, number in different.items()}
    return [known[share] for share in shares]


def dry_run_of_share(
    run: RunConfig, batch: BatchShape, shares: Sequence[Share], number: int, as_on_gpu: bool = True
) -> DryRun:
    """A training step of device `number` alone, which holds its one of `shares`."""
    config, run = config_for(run, batch), in_bf16(run)

    def step(part: PretrainedConfig) -> Timeline:
        return fake_share_step(run, part, batch, shares[number], number, as_on_gpu)

    return DryRun(_at_depth(step, config, sum(shares[number].layers)))


def _at_depth(step: Callable[[PretrainedConfig], Timeline], config: PretrainedConfig, layers: int) -> Timeline:
    if layers <= SMALL_DEPTHS[1]:
        return step(with_depth(config, layers))
    few, more = (step(with_depth(config, depth)) for depth in SMALL_DEPTHS)
    return extrapolated(few, more, layers)


def in_bf16(run: RunConfig) -> RunConfig:
    """A run in fp16 as one in bf16, which takes the same bytes, and which a CPU computes without a gradient scaler."""
    if run.precision != "fp16-mixed":
        return run
    return replace(run, precision="bf16" if run.method.has_plain_adapters else "bf16-mixed")


def extrapolated(few: Timeline, more: Timeline, layers: int) -> Timeline:
    """The line through two depths, at `layers` layers: every layer adds the same to every part of every segment."""
    times = (layers - SMALL_DEPTHS[0]) / (SMALL_DEPTHS[1] - SMALL_DEPTHS[0])
    return {
        segment: {part: few[segment][part] + times * (more[segment][part] - few[segment][part]) for part in PARTS}
        for segment in few
        if not segment.endswith("middle layers")  # never above both ends: a line between them
    }


def _depth(config: PretrainedConfig) -> int:
    depths = {getattr(config, name) for name in _depth_names(config)}
    if len(depths) != 1:
        raise BadInputError(
            f"The stacks of this {config.model_type} have {sorted(depths)} layers: only equal ones are known."
        )
    return depths.pop()


def _depth_names(config: PretrainedConfig) -> list[str]:
    names = ("encoder_layers", "decoder_layers") if config.is_encoder_decoder else ("num_hidden_layers",)
    return [config.attribute_map.get(name, name) for name in names]


def with_depth(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """The same architecture with `layers` layers (in each stack)."""
    small = deepcopy(config)
    for name in _depth_names(config):
        setattr(small, name, layers)
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:layers]
    return small


# -- the command line


def batch_of_run(run: RunConfig) -> tuple[BatchShape, str]:
    """The largest batch of a run, and where it comes from: its own rows; without its tokenizer, rows of `max_length`.

    Raises:
        BadInputError: the rows are missing or malformed.
    """
    rows = load_splits(run).train
    try:
        tokenizer = load_tokenizer(run)
    except BadInputError:
        of_max_length = f"rows of max_length {run.max_length}"
        return batch_of_length(run, run.max_length), f"{of_max_length}, as the model's tokenizer is not here"
    batch = longest_batch(tokens_of(rows, tokenizer, run), run.per_device_train_batch_size)
    return batch, f"the longest {batch.rows} of the run's {len(rows):,} rows"


def batch_of_length(run: RunConfig, tokens: int) -> BatchShape:
    """A batch of rows of exactly so many tokens, all learnt.

    With classification each row has its one label, with summarization a summary of `max_target_length` tokens.
    """
    if run.goal.classifies:
        return BatchShape(run.per_device_train_batch_size, tokens, labelled=1, classes=len(label_names_of(run)))
    if run.goal.summarizes:
        summary = run.max_target_length
        return BatchShape(run.per_device_train_batch_size, tokens, labelled=summary, target_length=summary)
    return BatchShape(run.per_device_train_batch_size, tokens, tokens - 1)


def report(run: RunConfig, batch: BatchShape, where_from: str) -> str:
    """The dry run's phases and parts in GiB, for a terminal; of a divided model for each device."""
    logits = f"logits of {batch.classes} classes" if batch.classes else f"logits at {batch.labelled} positions"
    summaries = f" with summaries of {batch.target_length}" if batch.target_length else ""
    shape = f"{batch.rows} rows of {batch.length} tokens{summaries}, {logits} ({where_from})"
    way = run.parallel
    if run.parallelism.pipelines:
        way = f"pp ({run.schedule}, {run.micro_batches} micro-batches)"
    checkpointed = "checkpointed, " if run.gradient_checkpointing else ""
    lines = [f"{run.technique} of {run.model}, {run.precision}, {checkpointed}{way}: {shape}"]
    as_on_gpu = run.device != "cpu"
    if not divides_layers(run):
        device = dry_run(run, batch, as_on_gpu)
        return "\n".join([*lines, *report_of_device(device, as_on_gpu), verdict(run, batch)])
    plan = place_stages(run, batch).plan
    devices = dry_runs_of_shares(run, batch, as_on_gpu)
    for number, (device, share) in enumerate(zip(devices, plan.shares, strict=True)):
        ends = ", embeddings" * share.has_embeddings + ", head" * share.has_head
        lines += [f"device {number}: {sum(share.layers)} layers{ends}", *report_of_device(device, as_on_gpu)]
        lines.append(verdict_of_device(plan, number))
    return "\n".join(lines)


def report_of_device(device: DryRun, is_gpu: bool) -> list[str]:
    """Phases, parts and peak."""
    on_top = "a GPU's own context and gaps between blocks" if is_gpu else "the process's own memory and what it keeps"
    rows = [
        [phase, segment.partition(": ")[2], *(f"{parts[part] / GIB:.3f}" for part in PARTS), f"{_sum_gib(parts):.3f}"]
        for phase, (segment, parts) in device.phases().items()
    ]
    return [
        tabulate(rows, ["phase", "highest in", *PARTS, "GiB"], tablefmt="rounded_outline", disable_numparse=True,
                 colalign=("left", "left", *["right"] * (len(PARTS) + 1))),
        f"peak of allocated memory: {device.peak_gib:.3f} GiB per device, in {device.peak_segment}; {on_top} come on "
        "top",
    ]  # fmt: skip


def verdict(run: RunConfig, batch: BatchShape) -> str:
    """What the closed form says of the same step, and whether its GPU holds it."""
    try:
        plan = plan_run(run, batch)
    except BadInputError as unknown:
        return f"no verdict: {unknown}"
    return verdict_of_device(plan, 0)


def verdict_of_device(plan: Plan, number: int) -> str:
    """What the closed form says of one device, and whether it holds its part."""
    memory, gpu = plan.devices[number], plan.cluster.gpus[number]
    return (
        f"closed form: {memory.allocated_gib:.3f} GiB, with overhead {memory.peak_gib:.2f} of {gpu.memory_gib:.1f} GiB "
        f"on {gpu.name}: {'fits' if memory.peak_gib <= gpu.memory_gib else 'does not fit'}"
    )


def _sum_gib(parts: Bytes) -> float:
    return sum(parts.values()) / GIB


def answer_planner(options: argparse.Namespace, job: Job, cluster: Cluster, unknown: str) -> int:
    """The planner's answer for an architecture that its closed form does not know: memory alone, by dry run.

    Raises:
        BadInputError: the technique or the way to share work is not one that the dry run knows.
    """
    gpu, devices, technique = cluster.gpus[0], len(cluster.gpus), options.technique or "lora"
    parallel = options.parallel or ("ddp" if devices > 1 else "single")
    if TECHNIQUES[technique].quantizes or not (PARALLELISMS[parallel].is_single or PARALLELISMS[parallel].replicates):
        raise BadInputError(f"{unknown} The dry run stands in for lora and full, with single and ddp: pass these.")
    has_adapters = TECHNIQUES[technique].has_adapters
    adapters = {"lora_r": job.lora_rank, "lora_dropout": job.lora_dropout} if has_adapters else {}
    run = RunConfig(
        technique=technique,
        parallel=parallel,
        devices=devices,
        model=options.model,
        weights="random",
        precision=options.precision or usual_precision(technique, cluster),
        optim=job.optimizer,
        attention=job.attention if job.attention != "flash" else "sdpa",
        gradient_checkpointing=bool(options.gradient_checkpointing),
        target_modules=options.target_modules or ("all-linear" if adapters else "all"),
        **adapters,
    )
    result = dry_run(run, job.batch)
    fits = result.peak_gib <= gpu.memory_gib
    advice = f"{result.peak_gib:.1f} of {gpu.memory_gib:.1f} GiB on each {gpu.name}, without its overhead"
    if options.json:
        parts = {f"{part}_gib": size / GIB for part, size in result.peak.items()}
        device = {
            **parts,
            "overhead_gib": None,
            "peak_gib": result.peak_gib,
            "capacity_gib": gpu.memory_gib,
            "fits": fits,
        }
        entry = {
            "technique": technique,
            "parallel": parallel,
            "per_device": [{"device": number, **device} for number in range(run.devices)],
            **dict.fromkeys(("max_batch_size", "step_time_s", "tokens_per_s", "cost_usd_per_epoch")),
            "why": advice,
        }
        answer = {"model": options.model, "ranked": [entry], "recommendation": advice, "assumptions": [unknown]}
        print(json.dumps(answer, indent=2))
    else:
        print(f"{unknown} The dry run stands in, for memory alone.\n")
        print(report(run, job.batch, "as asked"))
        print(advice)
    return 0 if fits else 1


def main() -> None:
    """`python -m common.dry_run RUN_FOLDER [--field value]`."""
    parser = argparse.ArgumentParser(prog="python -m common.dry_run", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("run_folder", type=Path, help="such as 2.1_lora_finetuning/run_1_a6000_48g_x1")
    parser.add_argument("--seq-len", type=int, help="rows of exactly so many tokens, all learnt, in place of the run's")
    known, overrides = parser.parse_known_args()
    try:
        run = run_of_folder(known.run_folder, overrides)
        if known.seq_len is not None and known.seq_len < 2:
            raise BadInputError(f"--seq-len is {known.seq_len}, but must be at least 2.")
        longest = batch_of_length(run, known.seq_len) if known.seq_len else None
        print(report(run, *((longest, "by --seq-len") if longest else batch_of_run(run))))
    except BadInputError as mistake:
        parser.exit(2, f"error: {mistake}\n")
