"""The real training step on fake tensors: how much memory it takes, part by part, without a GPU and without weights.

    python -m common.dry_run 2.1_lora_finetuning/run_1_a6000_48g_x1
    python -m common.dry_run 2.1_lora_finetuning/run_1_a6000_48g_x1 --batch_size 4 --model llama-3.1-70b

A fake tensor has a shape, a dtype and a storage of the right size, but no bytes: every operation of the step runs,
and computes nothing. A mode counts the storages that are alive. Two small depths are run, and as every further layer
adds the same, their figures are extrapolated to all layers, segment by segment of the step.

On a GPU PyTorch chooses other operations here and there than on a CPU, where this runs: dropout keeps a mask of one
byte per element, autocast computes layer norms and softmax in fp32, unfused optimizers work on lists of tensors. The
dry run does as a GPU does. What it cannot see: the CUDA context, and gaps between allocated blocks.
"""

import argparse
import json
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
import transformers
from tabulate import tabulate
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import GradientCheckpointingLayer, PretrainedConfig, PreTrainedModel, Trainer, masking_utils

from common.data import IGNORED_LABEL, load_splits, longest_batch, tokenize_rows
from common.hardware import GIB
from common.memory_plan import PARTS, BatchShape, Job
from common.models import ATTENTION, add_lora, any_shape_config, load_tokenizer, train_linear_layers, weight_dtype
from common.planner import plan_run, usual_precision
from common.run_config import BadInputError, RunConfig, parse_overrides
from common.siblings import literal_of
from common.time_plan import Cluster
from common.training import keeps_logits, training_arguments, with_head_on_answers

SMALL_DEPTHS = (2, 4)
ALLOCATION_BYTES = 512
"""CUDA's allocator hands out multiples of this (kMinBlockSize in c10/cuda/CUDACachingAllocator)."""
STEPS = 2
"""The second has optimizer states from its start, and is the one that counts."""

Bytes = dict[str, float]
"""Bytes of each of `PARTS`."""
Timeline = dict[str, Bytes]
"""What is alive at the highest moment of each segment of the step."""


class Watch(Protocol):
    """What is told where in the step it goes on."""

    def enter(self, segment: str, new_part: str = "activations") -> None:
        """`segment` begins; what it makes counts as `new_part`."""


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of live storages by part, and remembers the highest moment of each segment.

    A storage counts once, from the operation that makes it until nothing refers to it any more.
    """

    def __init__(self, vocab_size: int, rounded_to: int = ALLOCATION_BYTES) -> None:
        """`vocab_size` tells logits by their last dimension; sizes are rounded up to `rounded_to` bytes."""
        super().__init__()
        self.vocab_size, self.rounded_to = vocab_size, rounded_to
        self.part_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.live: Counter[str] = Counter()
        self.segment, self.new_part = "load", "activations"
        self.timeline: Timeline = {}

    def enter(self, segment: str, new_part: str = "activations") -> None:
        """From now on the peak is of `segment`, and what is made counts as `new_part`."""
        self.segment, self.new_part = segment, new_part
        self._remember()

    def add(self, tensor: torch.Tensor, part: str) -> None:
        """Count a tensor's storage as `part`; one that was counted as another part moves."""
        storage = tensor.untyped_storage()
        if storage in self.part_of:
            entry = self.part_of[storage]
            self.live[entry[0]] -= entry[1]
        else:
            entry = [part, -(-storage.nbytes() // self.rounded_to) * self.rounded_to]
            self.part_of[storage] = entry
            weakref.finalize(storage, self._free, entry)
        entry[0] = part
        self.live[part] += entry[1]

    def _free(self, entry: list) -> None:
        self.live[entry[0]] -= entry[1]

    def _remember(self) -> None:
        highest = self.timeline.get(self.segment)
        if highest is None or sum(self.live.values()) > sum(highest.values()):
            self.timeline[self.segment] = {part: self.live[part] for part in PARTS}

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run the operation, and count what it made."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.part_of:
                self.add(tensor, self._part_of_new(func, args, tensor))
        self._remember()
        return made

    def _part_of_new(self, func: Callable, args: tuple, tensor: torch.Tensor) -> str:
        if func is torch.ops.aten._to_copy.default and self._part(args[0]) == "weights":
            return "weights"  # autocast's copy in the precision of the arithmetic
        if self.new_part == "activations" and tensor.dim() and tensor.shape[-1] == self.vocab_size:
            return "logits"
        return self.new_part

    def _part(self, tensor: torch.Tensor) -> str | None:
        entry = self.part_of.get(tensor.untyped_storage())
        return entry[0] if entry else None


def like_cuda() -> AbstractContextManager:
    """Has a CPU choose the operations that a GPU would.

    Dropout keeps a mask of bytes; attention's kernels keep a seed for theirs; autocast computes layer norms and softmax
    in fp32.
    """
    layer_norm, softmax, attention = functional.layer_norm, functional.softmax, functional.scaled_dot_product_attention

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p > 0 else input

    return mock.patch.multiple(
        functional,
        dropout=dropout,
        scaled_dot_product_attention=lambda *args, **kwargs: attention(*args, **{**kwargs, "dropout_p": 0.0}),
        layer_norm=_in_fp32_under_autocast(layer_norm),
        softmax=_in_fp32_under_autocast(softmax),
    )


def _in_fp32_under_autocast(function: Callable) -> Callable:
    def cast(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and torch.is_autocast_enabled("cpu") else value

    def in_fp32(*args: Any, **kwargs: Any) -> torch.Tensor:
        return function(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

    return in_fp32


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

    `as_on_gpu` has it choose operations as a GPU does; without it, as the CPU does.

    Raises:
        BadInputError: the model has no known shape, or stacks of different depth, or is divided among devices.
    """
    if run.parallel == "pp" or (run.parallel == "mp" and run.device != "cpu"):
        raise BadInputError(
            f"parallel is {run.parallel}, but the dry run knows no divided models: ask the planner, with "
            f"`python -m common.planner --parallel {run.parallel}`."
        )
    config, run = any_shape_config(run.model), in_bf16(run)
    layers = _depth(config)
    if layers <= SMALL_DEPTHS[1]:
        return DryRun(fake_step(run, config, batch, as_on_gpu))
    few, more = (fake_step(run, with_depth(config, depth), batch, as_on_gpu) for depth in SMALL_DEPTHS)
    return DryRun(extrapolated(few, more, layers))


def in_bf16(run: RunConfig) -> RunConfig:
    """A run in fp16 as one in bf16, which takes the same bytes, and which a CPU computes without a gradient scaler."""
    if run.precision != "fp16-mixed":
        return run
    return replace(run, precision="bf16" if run.technique == "lora" else "bf16-mixed")


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


def fake_step(run: RunConfig, config: PretrainedConfig, batch: BatchShape, as_on_gpu: bool) -> Timeline:
    """Two optimizer steps on fake tensors; the timeline of the second."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        model = build_model(run, config)
    to_fake(model, mode)
    inputs = {name: mode.from_tensor(tensor) for name, tensor in batch_inputs(batch, model).items()}
    with mode, rows_not_packed():
        return tracked_steps(run, model, inputs, as_on_gpu)


def build_model(run: RunConfig, config: PretrainedConfig) -> PreTrainedModel:
    """The run's model with its adapters, or with what it does not train frozen, on the device of the context."""
    architecture = getattr(transformers, config.architectures[0])
    model = architecture._from_config(config, dtype=weight_dtype(run), attn_implementation=ATTENTION[run.attention])
    if run.technique == "lora":
        return add_lora(model, run)
    train_linear_layers(model, run.target_modules)
    return model


def to_fake(model: PreTrainedModel, mode: FakeTensorMode) -> None:
    """Put fake tensors on the CPU in the place of parameters and buffers on `meta`; tied ones stay tied."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            stand_in = FakeTensor(mode, torch.empty_like(tensor, device="meta"), torch.device("cpu"))
            is_weight = isinstance(tensor, torch.nn.Parameter)
            made[id(tensor)] = torch.nn.Parameter(stand_in, tensor.requires_grad) if is_weight else stand_in
        return made[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: fake(tensor) for name, tensor in tensors.items() if tensor is not None})


def batch_inputs(batch: BatchShape, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A batch of real, small tensors: token 0 everywhere; padded batches have a mask with a hole."""
    ids = torch.zeros((batch.rows, batch.length), dtype=torch.long)
    labels = torch.full_like(ids, IGNORED_LABEL)
    labels[:, batch.length - batch.labelled :] = 0
    inputs = {"input_ids": ids, "labels": labels}
    if batch.padded:
        mask = torch.ones_like(ids)
        mask[0, -1] = 0
        inputs["attention_mask"] = mask
    return with_head_on_answers(inputs) if keeps_logits(model) else inputs


def tracked_steps(run: RunConfig, model: PreTrainedModel, inputs: dict[str, torch.Tensor], as_on_gpu: bool) -> Timeline:
    """Two optimizer steps by the run's own trainer, tracked; the timeline of the second."""
    tracker = MemoryTracker(model.config.vocab_size)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        trainer = step_trainer(model, step_arguments(run, folder))
        if as_on_gpu:
            stack.enter_context(like_cuda())
            for group in trainer.optimizer.param_groups:
                group["foreach"] = not group.get("fused")
        for part, tensors in (("weights", (*model.parameters(), *model.buffers())), ("buffers", inputs.values())):
            for tensor in tensors:
                tracker.add(tensor, part)
        stack.enter_context(tracker)
        wrapped, optimizer = trainer.accelerator.prepare(model, trainer.optimizer, device_placement=[False, False])
        if run.parallel == "ddp":
            tracker.enter("load", "buffers")
            wrapped = stack.enter_context(one_of_many_ranks(wrapped, run.world_size))
        mark_segments(model, tracker)
        watch_gradients(model, tracker)
        for _ in range(STEPS):
            tracker.timeline.clear()
            take_step(trainer, wrapped, optimizer, inputs, tracker)
    return tracker.timeline


def rows_not_packed() -> AbstractContextManager:
    """Has Transformers know that no row holds several texts: it cannot read it from fake position numbers."""
    return mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None)


class StepTrainer(Trainer):
    """A Trainer that leaves the fake model where it is."""

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """A fake tensor cannot be moved in place."""


def step_trainer(model: PreTrainedModel, arguments: transformers.TrainingArguments) -> StepTrainer:
    """The trainer of single steps, with its optimizer, and checkpointing on where it is asked for."""
    trainer = StepTrainer(model=model, args=arguments, train_dataset=[0], eval_dataset=[0])
    trainer.create_optimizer()
    if arguments.gradient_checkpointing:  # as `Trainer.train` does first
        model.gradient_checkpointing_enable(arguments.gradient_checkpointing_kwargs)
    return trainer


def step_arguments(run: RunConfig, folder: str) -> transformers.TrainingArguments:
    """The run's own training arguments, for a CPU and one rank."""
    alone = replace(
        run,
        device="cpu",
        gpu="",
        parallel="single",
        devices=1,
        stages=0,
        attention="eager",
        report_to="none",
    )
    return training_arguments(alone, Path(folder))


def take_step(
    trainer: Trainer, model: torch.nn.Module, optimizer: Any, inputs: dict[str, torch.Tensor], tracker: Watch
) -> None:
    """One optimizer step as the Trainer takes it, told to the tracker phase by phase."""
    tracker.enter("load")
    tracker.enter("forward: embeddings")
    with at_backward(trainer, lambda: tracker.enter("backward: head and loss")):
        trainer.training_step(model, dict(inputs), num_items_in_batch=1)
    tracker.enter("optimizer: clipping and step", "optimizer")
    if trainer.args.max_grad_norm:
        trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
    optimizer.step()
    model.zero_grad()


def at_backward(trainer: Trainer, act: Callable[[], None]) -> AbstractContextManager:
    """Calls `act` when the trainer begins the backward pass."""
    backward = trainer.accelerator.backward

    def announced(*args: Any, **kwargs: Any) -> None:
        act()
        backward(*args, **kwargs)

    return mock.patch.object(trainer.accelerator, "backward", announced)


def mark_segments(model: torch.nn.Module, tracker: Watch) -> None:
    """Have the tracker enter a segment where a stack's first, middle and last layers begin, forward and backward.

    A layer's `__call__` is wrapped, not its `forward`: gradient checkpointing happens inside it.
    """
    for name, stack in model.named_modules():
        if isinstance(stack, torch.nn.ModuleList) and isinstance(stack[0], GradientCheckpointingLayer):
            for number, layer in enumerate(stack):
                place = {0: "first layer", len(stack) - 1: "last layer"}.get(number, "middle layers")
                _mark(layer, f"{name.rpartition('model.')[2]}, {place}", number == len(stack) - 1, tracker)


def _mark(layer: torch.nn.Module, place: str, is_last: bool, tracker: Watch) -> None:
    class Marked(type(layer)):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            tracker.enter(f"forward: {place}")
            output = super().__call__(*args, **kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: tracker.enter(f"backward: {place}"))
            if is_last:
                tracker.enter("forward: head and loss")
            return output

    layer.__class__ = Marked


def watch_gradients(model: torch.nn.Module, tracker: MemoryTracker) -> None:
    """Have the tracker count each weight's gradient as such once it is there."""
    for weight in model.parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(lambda weight: tracker.add(weight.grad, "gradients"))


@contextmanager
def one_of_many_ranks(model: torch.nn.Module, world_size: int) -> Iterator[DistributedDataParallel]:
    """`model` as rank 0 of `world_size` under DDP, with collectives that send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    # what DDP does when it is made would read the other ranks' weights
    nothing = dict.fromkeys(
        ("_verify_param_shape_across_processes", "_sync_module_states"), lambda *args, **kwargs: None
    )
    try:
        with mock.patch.multiple(torch.nn.parallel.distributed, **nothing):
            wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, _send_nothing)
        wrapped.reducer = _ReducerWithoutRebuild(wrapped.reducer)
        yield wrapped
    finally:
        torch.distributed.destroy_process_group()


def _send_nothing(state: None, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    sent = torch.futures.Future()
    sent.set_result(bucket.buffer())
    return sent


class _ReducerWithoutRebuild:
    """DDP's reducer, which after the first step asks rank 0 for the buckets' order; there is no rank 0 to ask."""

    def __init__(self, reducer: torch.distributed.Reducer) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


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
        longest = BatchShape(run.batch_size, run.max_length, run.max_length - 1)
        return longest, f"rows of max_length {run.max_length}, all learnt, as the model's tokenizer is not here"
    batch = longest_batch(tokenize_rows(rows, tokenizer, run.max_length), run.batch_size)
    return batch, f"the longest {batch.rows} of the run's {len(rows):,} rows"


def report(run: RunConfig, batch: BatchShape, where_from: str) -> str:
    """The dry run's phases and parts in GiB, for a terminal."""
    result = dry_run(run, batch)
    rows = [
        [phase, segment.partition(": ")[2], *(f"{parts[part] / GIB:.3f}" for part in PARTS), f"{_sum_gib(parts):.3f}"]
        for phase, (segment, parts) in result.phases().items()
    ]
    shape = f"{batch.rows} rows of {batch.length} tokens, logits at {batch.labelled} positions ({where_from})"
    return "\n".join([
        f"{run.technique} of {run.model}, {run.precision}, checkpointing {run.gradient_checkpointing}, {run.parallel}: "
        f"{shape}",
        tabulate(rows, ["phase", "highest in", *PARTS, "GiB"], tablefmt="rounded_outline", disable_numparse=True,
                 colalign=("left", "left", *["right"] * (len(PARTS) + 1))),
        f"peak of allocated memory: {result.peak_gib:.3f} GiB per device, in {result.peak_segment}; a GPU's own "
        "context and gaps between blocks come on top",
        verdict(run, batch),
    ])  # fmt: skip


def verdict(run: RunConfig, batch: BatchShape) -> str:
    """What the closed form says of the same step, and whether its GPU holds it."""
    try:
        plan = plan_run(run, batch)
    except BadInputError as unknown:
        return f"no verdict: {unknown}"
    memory, gpu = plan.devices[0], plan.cluster.gpus[0]
    return (
        f"closed form: {memory.allocated_gib:.3f} GiB, with overhead {memory.peak_gib:.2f} of {gpu.memory_gib:.1f} GiB "
        f"on {gpu.name}: {'fits' if plan.fits else 'does not fit'}"
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
    if technique == "qlora" or parallel not in ("single", "ddp"):
        raise BadInputError(f"{unknown} The dry run stands in for lora and full, with single and ddp: pass these.")
    run = RunConfig(
        technique=technique,
        parallel=parallel,
        devices=devices,
        model=options.model,
        weights="random",
        precision=options.precision or usual_precision(technique, cluster),
        optimizer=job.optimizer,
        attention=job.attention if job.attention != "flash" else "sdpa",
        gradient_checkpointing="non-reentrant" if options.gradient_checkpointing else "none",
        lora_rank=job.lora_rank,
        lora_dropout=job.lora_dropout,
        target_modules=options.target_modules or ("all" if technique == "full" else "all-linear"),
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
            "per_device": [{"device": number, **device, "fits": fits} for number in range(run.devices)],
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
        run = parse_overrides(literal_of(known.run_folder), overrides)
        if known.seq_len is not None and known.seq_len < 2:
            raise BadInputError(f"--seq-len is {known.seq_len}, but must be at least 2.")
        longest = BatchShape(run.batch_size, known.seq_len, known.seq_len - 1) if known.seq_len else None
        print(report(run, *((longest, "by --seq-len") if longest else batch_of_run(run))))
    except BadInputError as mistake:
        parser.exit(2, f"error: {mistake}\n")


if __name__ == "__main__":
    main()
