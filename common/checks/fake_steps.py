"""Training steps on fake tensors: of a whole model, of a device's share, and of a pipeline's stage."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from peft import PeftModel
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.parallel import DistributedDataParallel
from transformers import GradientCheckpointingLayer, PretrainedConfig, PreTrainedModel, Trainer, masking_utils

from common.base.run_config import RunConfig
from common.data.batches import EpochBatches
from common.data.rows import IGNORED_LABEL
from common.models.loading import (
    ATTENTION,
    add_lora,
    model_class,
    train_own_weights,
    weight_dtype,
)
from common.planning.device_maps import device_map_of
from common.planning.job import BatchShape
from common.planning.plans import architecture_of_run
from common.planning.shares import Share
from common.runtime.rank import name_deepspeeds_device
from common.runtime.world import Rank
from common.tasks.objectives import objective_of
from common.training.callbacks import WorkDone
from common.training.memory_tracker import (
    HANDING_ON,
    MemoryTracker,
    Timeline,
    Watch,
    _mark,
    _mark_end,
    like_cuda,
    watch_gradients,
)
from common.training.pipeline import PassClock, Pipeline, StageModule, cut, hidden_dtype
from common.training.pipeline_training import PipelineTrainer
from common.training.trainer import keeps_logits, training_arguments, with_head_on_answers

STEPS = 2
"""The second has optimizer states from its start, and is the one that counts."""


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
        if run.parallelism.pipelines:
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
    if run.method.has_adapters:
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
    trainer_class = partial(trainer_class, compute_loss_func=objective_of(run).loss)
    with ExitStack() as stack:
        trainer = stack.enter_context(trainer_of_run(run, model, as_on_gpu, trainer_class))
        tracker = stack.enter_context(_tracker_of(model, inputs))
        wrapped, optimizer = trainer.accelerator.prepare(model, trainer.optimizer, device_placement=[False, False])
        if run.parallelism.replicates:
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
        counted = {"batches": EpochBatches([1], 1, 1, 0, 0), "work": WorkDone(), "objective": objective_of(run)}
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
    """All stages have said which shapes they send, as `common.training.pipeline` does: there is nobody to ask here."""
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
    alone = run.changed_to(device="cpu", gpu="", parallel="single", devices=1, attention="eager", report_to="none")
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
