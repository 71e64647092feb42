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
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
import transformers
from peft import PeftModel
from tabulate import tabulate
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import GradientCheckpointingLayer, PretrainedConfig, PreTrainedModel, Trainer, masking_utils

from common.callbacks import WorkDone
from common.data import IGNORED_LABEL, EpochBatches, load_splits, longest_batch, tokens_of
from common.device_maps import device_map_of
from common.hardware import GIB
from common.labelled_data import label_names_of
from common.launch import Rank, name_deepspeeds_device
from common.memory_plan import PARTS, BatchShape, Job, Share
from common.models import (
    ATTENTION,
    add_lora,
    any_shape_config,
    load_tokenizer,
    model_class,
    train_own_weights,
    weight_dtype,
)
from common.pipeline import PassClock, Pipeline, StageModule, cut, hidden_dtype
from common.pipeline_training import PipelineTrainer
from common.placement import place_stages
from common.planner import Plan, architecture_of_run, plan_run, usual_precision
from common.run_config import BadInputError, RunConfig
from common.settings import run_of_folder
from common.time_plan import Cluster
from common.training import OBJECTIVES, keeps_logits, training_arguments, with_head_on_answers

SMALL_DEPTHS = (2, 3)
ALLOCATION_BYTES = 512
"""CUDA's allocator hands out multiples of this (kMinBlockSize in c10/cuda/CUDACachingAllocator)."""
HANDING_ON = "handing on"
"""What follows the last layer of a device without a head: the hidden state is sent, and its gradient received."""
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

    Of a run whose layers are divided among devices: the fullest device's. `as_on_gpu` has it choose operations as a GPU
    does; without it, as the CPU does.

    Raises:
        BadInputError: the model has no known shape, or stacks of different depth, or cannot be divided as asked.
    """
    if run.technique == "qlora":
        raise BadInputError(
            f"technique is qlora, quantization {run.quantization}, but fake tensors cannot be quantized: ask "
            "`python -m common.planner --technique qlora`, or take the real step with `python -m common.preflight`."
        )
    if run.is_sharded or run.parallel == "tp":
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
    return run.parallel == "pp" or (run.parallel == "mp" and run.device != "cpu")


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


def fake_share_step(
    run: RunConfig, config: PretrainedConfig, batch: BatchShape, share: Share, number: int, as_on_gpu: bool
) -> Timeline:
    """An optimizer step of device `number` on fake tensors, with optimizer states from its start.

    The device holds all layers of `config`, and of the ends those that `share` has.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        model = build_share(run, config, batch, share)
    to_fake(model, mode)
    inputs = {name: mode.from_tensor(tensor) for name, tensor in batch_inputs(batch, model).items()}
    with mode, rows_not_packed():
        if run.parallel == "pp":
            return tracked_stage_steps(run, model, inputs, number, as_on_gpu)
        return tracked_steps(run, model, inputs, as_on_gpu, share)


def build_share(
    run: RunConfig, config: PretrainedConfig, batch: BatchShape, share: Share
) -> PreTrainedModel | PeftModel:
    """The run's model without the ends that `share` lacks."""
    model, architecture = build_model(run, config), architecture_of_run(run, batch)
    stack = replace(architecture.stacks[0], layers=config.num_hidden_layers)
    own = replace(share, layers=(stack.layers,))
    before = [] if share.has_embeddings else [Share((0,), has_head=False)]
    after = [] if share.has_head else [Share((0,), has_embeddings=False)]
    held = [*before, own, *after]
    stage_map = device_map_of(replace(architecture, stacks=(stack,)), held, range(len(held)))
    cut(model.get_base_model() if isinstance(model, PeftModel) else model, stage_map, len(before))
    return model


def build_model(run: RunConfig, config: PretrainedConfig) -> PreTrainedModel:
    """The run's model with its adapters, or with what it does not train frozen, on the device of the context."""
    architecture = model_class(run, config)
    model = architecture._from_config(config, dtype=weight_dtype(run), attn_implementation=ATTENTION[run.attention])
    if run.technique == "lora":
        return add_lora(model, run)
    train_own_weights(model, run)
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
    if batch.classes:
        labels = torch.zeros(batch.rows, dtype=torch.long)
    elif batch.target_length:
        labels = torch.zeros((batch.rows, batch.target_length), dtype=torch.long)
    else:
        labels = torch.full_like(ids, IGNORED_LABEL)
        labels[:, batch.length - batch.labelled :] = 0
    inputs = {"input_ids": ids, "labels": labels}
    if batch.target_length:
        inputs["decoder_input_ids"] = torch.zeros_like(labels)
    if batch.padded:
        mask = torch.ones_like(ids)
        mask[0, -1] = 0
        inputs["attention_mask"] = mask
    return with_head_on_answers(inputs) if keeps_logits(model) else inputs


def tracked_steps(
    run: RunConfig,
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    as_on_gpu: bool,
    share: Share | None = None,
) -> Timeline:
    """Two optimizer steps by the run's own trainer, tracked; the timeline of the second.

    `share` is what the model holds of a divided one; None: it is whole.
    """
    trainer_class = partial(ShareTrainer, share=share) if share else StepTrainer
    trainer_class = partial(trainer_class, compute_loss_func=OBJECTIVES[run.task].loss)
    with ExitStack() as stack:
        trainer = stack.enter_context(trainer_of_run(run, model, as_on_gpu, trainer_class))
        tracker = stack.enter_context(_tracker_of(model, inputs))
        wrapped, optimizer = trainer.accelerator.prepare(model, trainer.optimizer, device_placement=[False, False])
        if run.parallel == "ddp":
            tracker.enter("load", "gradients")  # its buckets hold them
            wrapped = stack.enter_context(one_of_many_ranks(wrapped, run.world_size))
        mark_segments(model, tracker, trainer.after_layers)
        watch_gradients(model, tracker)
        for _ in range(STEPS):
            tracker.timeline.clear()
            take_step(trainer, wrapped, optimizer, inputs, tracker)
    return tracker.timeline


def tracked_stage_steps(
    run: RunConfig, model: PreTrainedModel | PeftModel, inputs: dict[str, torch.Tensor], stage: int, as_on_gpu: bool
) -> Timeline:
    """An optimizer step of one stage by the run's own pipeline, which sends and receives nothing, tracked.

    Optimizer states are there before it, from an update without passes.
    """
    with ExitStack() as stack:
        tracker = _tracker_of(model, inputs)
        pipeline = pipeline_alone(run, model, stage, "attention_mask" in inputs, tracker)
        counted = {"batches": EpochBatches([1], 1, 1, 0, 0), "work": WorkDone(), "objective": OBJECTIVES[run.task]}
        trainer_class = partial(StageTrainer, pipeline=pipeline, **counted)
        trainer = stack.enter_context(trainer_of_run(run, model, as_on_gpu, trainer_class))
        stack.enter_context(tracker)
        mark_segments(model, tracker, trainer.after_layers)
        watch_gradients(model, tracker)
        stack.enter_context(fake_group(stage, run.devices))
        stack.enter_context(mock.patch.object(PipelineScheduleSingle, "_warmup_p2p", _without_a_vote))
        batch = {"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs}
        make_optimizer_states(trainer, tracker)
        tracker.timeline.clear()
        take_stage_step(trainer, batch, tracker)
    return tracker.timeline


def make_optimizer_states(trainer: Trainer, tracker: Watch) -> None:
    """Update once by gradients from nowhere: a step's passes for all micro-batches take longer than all the rest."""
    tracker.enter("load", "gradients")
    for weight in trainer.model.parameters():
        if weight.requires_grad:
            weight.grad = torch.empty_like(weight)
    tracker.enter("load", "optimizer")
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def pipeline_alone(
    run: RunConfig, model: PreTrainedModel | PeftModel, stage: int, padded: bool, tracker: Watch
) -> Pipeline:
    """The pipeline of one stage, on the CPU, which tells `tracker` of its passes."""
    rank, on_cpu = Rank(stage, run.devices, "cpu", "python"), replace(run, device="cpu", gpu="", attention="sdpa")
    pipeline = Pipeline((StageModule if padded else UnpaddedStage)(model, on_cpu, rank), on_cpu, rank)
    pipeline.clock = TellingClock(tracker, pipeline.module)
    pipeline.keeps_logits = False  # where logits are computed cannot be read from fake labels: `batch_inputs` says it
    return pipeline


class UnpaddedStage(StageModule):
    """A stage that drops the mask: that it is of ones alone cannot be read from a fake one."""

    def forward(self, given: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """As the stage does with a mask of ones."""
        return super().forward(given, None)


class TellingClock(PassClock):
    """A clock that tells which pass begins."""

    def __init__(self, tracker: Watch, module: StageModule) -> None:
        """`tracker` is told."""
        super().__init__("cpu")
        self.begins = {
            "forward": "forward: embeddings" if module.is_first else "forward: received hidden state",
            "backward": "backward: head and loss" if module.is_last else f"backward: {HANDING_ON}",
        }
        self.tracker = tracker

    def timed(self, kind: str, micro_batch: int, work: Callable, *args: Any, **kwargs: Any) -> Any:
        """What `work` returns."""
        if kind in self.begins:
            self.tracker.enter(self.begins[kind])
        return super().timed(kind, micro_batch, work, *args, **kwargs)


def _without_a_vote(schedule: PipelineScheduleSingle, stages: list[PipelineStage], *_: object) -> None:
    """All stages have said which shapes they send, as `common.pipeline` does: there is nobody to ask here."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def _tracker_of(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> MemoryTracker:
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    tracker = MemoryTracker(base.config.vocab_size)
    for part, tensors in (("weights", (*model.parameters(), *model.buffers())), ("buffers", inputs.values())):
        for tensor in tensors:
            tracker.add(tensor, part)
    return tracker


def rows_not_packed() -> AbstractContextManager:
    """Has Transformers know that no row holds several texts: it cannot read it from fake position numbers."""
    return mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None)


class StepTrainer(Trainer):
    """A Trainer that leaves the fake model where it is."""

    after_layers = "head and loss"
    """What follows the last layer."""

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """A fake tensor cannot be moved in place."""


class StageTrainer(StepTrainer, PipelineTrainer):
    """A pipeline's trainer that leaves the fake stage where it is."""

    def __init__(self, *, pipeline: Pipeline, **kwargs: Any) -> None:
        """`pipeline` holds the stage."""
        super().__init__(pipeline=pipeline, **kwargs)
        if not pipeline.module.is_last:
            self.after_layers = HANDING_ON


class ShareTrainer(StepTrainer):
    """A trainer of one device's layers: hidden states and gradients come from nowhere."""

    def __init__(self, *, share: Share, **kwargs: Any) -> None:
        """`share` says which ends the model has."""
        super().__init__(**kwargs)
        self.share = share
        if not share.has_head:
            self.after_layers = HANDING_ON

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], **kwargs: Any) -> torch.Tensor:
        """The loss, or without a head something in its place that can be back-propagated."""
        batch = inputs["input_ids"].shape
        if not self.share.has_embeddings:
            inputs = {name: tensor for name, tensor in inputs.items() if name != "input_ids"}
            inputs["inputs_embeds"] = self._received(batch)
        if self.share.has_head:
            return super().compute_loss(model, inputs, **kwargs)
        kept = ("input_ids", "inputs_embeds", "attention_mask")
        return LossElsewhere.apply(model(**{name: inputs[name] for name in kept if name in inputs}).logits)

    def _received(self, batch: torch.Size) -> torch.Tensor:
        """A hidden state from the device before, for `batch` (rows, tokens)."""
        base = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        dtype = hidden_dtype(base, autocasts=self.accelerator.mixed_precision != "no")
        return torch.empty((*batch, base.config.hidden_size), dtype=dtype, requires_grad=True)


class LossElsewhere(torch.autograd.Function):
    """The layers of other devices: a number for their loss, and a gradient as it comes back from them."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        """A number."""
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient of the hidden state."""
        return torch.empty(ctx.shape, dtype=ctx.dtype)


def step_trainer(
    model: PreTrainedModel,
    arguments: transformers.TrainingArguments,
    trainer_class: Callable[..., StepTrainer] = StepTrainer,
) -> StepTrainer:
    """The trainer of single steps, with its optimizer, and checkpointing on where it is asked for."""
    name_deepspeeds_device()
    trainer = trainer_class(model=model, args=arguments, train_dataset=[0], eval_dataset=[0])
    trainer.create_optimizer()
    if arguments.gradient_checkpointing:  # as `Trainer.train` does first
        model.gradient_checkpointing_enable(arguments.gradient_checkpointing_kwargs)
    return trainer


@contextmanager
def trainer_of_run(
    run: RunConfig, model: PreTrainedModel, as_on_gpu: bool, trainer_class: Callable[..., StepTrainer]
) -> Iterator[StepTrainer]:
    """The trainer of single steps, with the operations that a GPU or a CPU chooses."""
    with tempfile.TemporaryDirectory() as folder, like_cuda() if as_on_gpu else nullcontext():
        trainer = step_trainer(model, step_arguments(run, folder), trainer_class)
        if as_on_gpu:
            for group in trainer.optimizer.param_groups:
                group["foreach"] = not group.get("fused")
        yield trainer


def step_arguments(run: RunConfig, folder: str) -> transformers.TrainingArguments:
    """The run's own training arguments, for a CPU and one rank."""
    alone = replace(
        run,
        device="cpu",
        gpu="",
        parallel="single",
        devices=1,
        stages=0,
        micro_batches=1,
        device_map="balanced",
        attention="eager",
        report_to="none",
    )
    return training_arguments(alone, Path(folder))


def take_step(
    trainer: StepTrainer, model: torch.nn.Module, optimizer: Any, inputs: dict[str, torch.Tensor], tracker: Watch
) -> None:
    """One optimizer step as the Trainer takes it, told to the tracker phase by phase."""
    tracker.enter("load")
    tracker.enter("forward: embeddings")
    with at_backward(trainer, lambda: tracker.enter(f"backward: {trainer.after_layers}")):
        trainer.training_step(model, dict(inputs), num_items_in_batch=1)
    tracker.enter("optimizer: clipping and step", "optimizer")
    if trainer.args.max_grad_norm:
        trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
    optimizer.step()
    model.zero_grad()


def take_stage_step(trainer: PipelineTrainer, batch: dict[str, torch.Tensor], tracker: Watch) -> None:
    """One optimizer step of a stage as `PipelineTrainer` takes it, told to the tracker phase by phase."""
    tracker.enter("load", "buffers")  # what the schedule receives into; its clock tells of the passes
    trainer.pipeline.train_step(batch, 1.0)
    tracker.enter("optimizer: tied weights and clipping", "buffers")
    trainer.complete_gradients()
    tracker.enter("optimizer: step", "optimizer")
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def at_backward(trainer: Trainer, act: Callable[[], None]) -> AbstractContextManager:
    """Calls `act` when the trainer begins the backward pass."""
    backward = trainer.accelerator.backward

    def announced(*args: Any, **kwargs: Any) -> None:
        act()
        backward(*args, **kwargs)

    return mock.patch.object(trainer.accelerator, "backward", announced)


def mark_segments(model: torch.nn.Module, tracker: Watch, after_layers: str = StepTrainer.after_layers) -> None:
    """Have the tracker enter a segment where a stack's first, middle and last layers begin, forward and backward.

    A layer's `__call__` is wrapped, not its `forward`: gradient checkpointing happens inside it.
    """
    for name, stack in model.named_modules():
        if isinstance(stack, torch.nn.ModuleList) and isinstance(stack[0], GradientCheckpointingLayer):
            for number, layer in enumerate(stack):
                place = {0: "first layer", len(stack) - 1: "last layer"}.get(number, "middle layers")
                _mark(layer, f"{name.rpartition('model.')[2]}, {place}", tracker)
            _mark_end(stack[-1], after_layers, tracker)


def _mark(layer: torch.nn.Module, place: str, tracker: Watch) -> None:
    class Marked(type(layer)):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            tracker.enter(f"forward: {place}")
            output = super().__call__(*args, **kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: tracker.enter(f"backward: {place}"))
            return output

    layer.__class__ = Marked


def _mark_end(layer: torch.nn.Module, after_layers: str, tracker: Watch) -> None:
    class Marked(type(layer)):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = super().__call__(*args, **kwargs)
            tracker.enter(f"forward: {after_layers}")
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
    # what DDP does when it is made would read the other ranks' weights
    nothing = dict.fromkeys(
        ("_verify_param_shape_across_processes", "_sync_module_states"), lambda *args, **kwargs: None
    )
    with fake_group(0, world_size):
        with mock.patch.multiple(torch.nn.parallel.distributed, **nothing):
            wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        wrapped.register_comm_hook(None, _send_nothing)
        wrapped.reducer = _ReducerWithoutRebuild(wrapped.reducer)
        yield wrapped


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """A process group as rank `rank` sees it, which sends and receives nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
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
        of_max_length = f"rows of max_length {run.max_length}"
        return batch_of_length(run, run.max_length), f"{of_max_length}, as the model's tokenizer is not here"
    batch = longest_batch(tokens_of(rows, tokenizer, run), run.batch_size)
    return batch, f"the longest {batch.rows} of the run's {len(rows):,} rows"


def batch_of_length(run: RunConfig, tokens: int) -> BatchShape:
    """A batch of rows of exactly so many tokens, all learnt.

    With classification each row has its one label, with summarization a summary of `max_summary_length` tokens.
    """
    if run.task == "classification":
        return BatchShape(run.batch_size, tokens, labelled=1, classes=len(label_names_of(run)))
    if run.task == "summarization":
        summary = run.max_summary_length
        return BatchShape(run.batch_size, tokens, labelled=summary, target_length=summary)
    return BatchShape(run.batch_size, tokens, tokens - 1)


def report(run: RunConfig, batch: BatchShape, where_from: str) -> str:
    """The dry run's phases and parts in GiB, for a terminal; of a divided model for each device."""
    logits = f"logits of {batch.classes} classes" if batch.classes else f"logits at {batch.labelled} positions"
    summaries = f" with summaries of {batch.target_length}" if batch.target_length else ""
    shape = f"{batch.rows} rows of {batch.length} tokens{summaries}, {logits} ({where_from})"
    way = run.parallel
    if run.parallel == "pp":
        way = f"pp ({run.schedule}, {run.micro_batches} micro-batches)"
    lines = [
        f"{run.technique} of {run.model}, {run.precision}, checkpointing {run.gradient_checkpointing}, {way}: {shape}"
    ]
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
        run = run_of_folder(known.run_folder, overrides)
        if known.seq_len is not None and known.seq_len < 2:
            raise BadInputError(f"--seq-len is {known.seq_len}, but must be at least 2.")
        longest = batch_of_length(run, known.seq_len) if known.seq_len else None
        print(report(run, *((longest, "by --seq-len") if longest else batch_of_run(run))))
    except BadInputError as mistake:
        parser.exit(2, f"error: {mistake}\n")


if __name__ == "__main__":
    main()
