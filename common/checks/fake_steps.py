"""Training steps on fake tensors: of a whole model, of a device's share, and of a pipeline's stage."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import PeftModel
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import _utils as pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from transformers import (
    GradientCheckpointingLayer,
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    masking_utils,
)
from transformers.integrations import moe

from common.base.run_config import RunConfig
from common.data.rows import IGNORED_LABEL
from common.models.loading import ATTENTION, model_class, weight_dtype
from common.models.stages import cut
from common.models.trained_weights import with_trained_weights
from common.planning.device_maps import device_map_of
from common.planning.job import BatchShape
from common.planning.plans import architecture_of_run
from common.planning.shares import Share
from common.runtime.memory_tracker import (
    HANDING_ON,
    MemoryTracker,
    Timeline,
    Watch,
    like_cuda,
    mark,
    watch_gradients,
)
from common.runtime.rank import name_deepspeeds_device
from common.runtime.world import Rank
from common.tasks.objectives import objective_of
from common.training.pipeline import PassClock, Pipeline, StageModule, hidden_dtype
from common.training.pipeline_parallel import PipelineParallel
from common.training.strategy import chunk_loss, loss_is_chunked, tell_of_answers
from common.training.trainer import training_arguments

STEPS = 2  # the second has optimizer states from its start, and is the one that counts
WHOLE = Share(())  # both ends; the model says how many layers there are
HEAD_AND_LOSS = "head and loss"


def fake_step(
    run: RunConfig,
    config: PretrainedConfig,
    batch: BatchShape,
    as_on_gpu: bool,
    share: Share | None = None,
    number: int = 0,
) -> Timeline:
    """Return the timeline of an optimizer step on fake tensors, with optimizer states from its start.

    With `share` the step is that of device `number`, which holds all layers of `config` and the ends that `share` has;
    without it one device holds the whole model.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        model = build_model(run, config)
    with mode:
        model.to_empty(device="cpu")
    _base_of(model).tie_weights()  # each is a tensor of its own now
    if share:
        keep_share(model, run, batch, share)
    inputs = {name: mode.from_tensor(tensor) for name, tensor in batch_inputs(batch, model).items()}
    # whether a row holds several texts cannot be read from fake position numbers
    no_row_is_packed = mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None)
    # of fake experts PyTorch's grouped product takes bf16 alone; Transformers' own stands in, which keeps the same
    grouped_in_bf16 = mock.patch.object(
        moe, "_can_use_grouped_mm", lambda _, weight, __: weight.dtype == torch.bfloat16
    )
    like_gpu = objective_of(run).like_gpu(batch.labelled) if as_on_gpu else nullcontext()
    with mode, no_row_is_packed, grouped_in_bf16, every_tile_counts(model, batch), like_gpu:
        if share and run.parallelism.pipelines:
            return tracked_stage_steps(run, model, inputs, number, as_on_gpu)
        return tracked_steps(run, model, inputs, as_on_gpu, share)


def keep_share(model: PreTrainedModel | PeftModel, run: RunConfig, batch: BatchShape, share: Share) -> None:
    """Take out of the run's model the ends that `share` lacks; all its layers stay."""
    architecture = architecture_of_run(run, batch)
    stack = replace(architecture.stacks[0], layers=model.config.num_hidden_layers)
    before = [] if share.has_embeddings else [Share((0,), has_head=False)]
    after = [] if share.has_head else [Share((0,), has_embeddings=False)]
    held = [*before, replace(share, layers=(stack.layers,)), *after]
    stage_map = device_map_of(replace(architecture, stacks=(stack,)), held, range(len(held)))
    cut(_base_of(model), stage_map, len(before))


def build_model(run: RunConfig, config: PretrainedConfig) -> PreTrainedModel | PeftModel:
    """Return the run's model, with what it trains switched on and its loss in chunks, on the device of the context.

    Without Liger's kernels, which have no fake tensors.
    """
    architecture = model_class(run, config)
    model = architecture._from_config(config, dtype=weight_dtype(run), attn_implementation=ATTENTION[run.attention])
    model = with_trained_weights(model, run)
    chunk_loss(replace(run, use_liger_kernel=False), model)
    prepare = objective_of(run).prepare
    if prepare:
        prepare(model)
    return model


def _base_of(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    return model.get_base_model() if isinstance(model, PeftModel) else model


@contextmanager
def every_tile_counts(model: PreTrainedModel | PeftModel, batch: BatchShape) -> Iterator[None]:
    """Let a fake batch's pictures through a vision tower.

    Models of Idefics3's kind leave out tiles and patches that are padding, and compare the numbers of image tokens and
    of tiles, none of which fake tensors tell. Where a picture's tiles are whole, as those of `batch` are, nothing is
    left out, and patches need no mask.
    """
    if not batch.tiles:
        yield
        return
    room = sys.modules[type(_base_of(model)).__module__]
    mask = room.create_bidirectional_mask

    def without_padding(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        return mask(*args, **{**kwargs, "attention_mask": None})

    def unchecked(*_: object) -> None:  # a `Mock` would keep what it is called with alive
        return None

    with (
        mock.patch.object(room, "create_bidirectional_mask", without_padding),
        mock.patch.object(room, "torch_compilable_check", unchecked),
        _AllTiles(batch.tiles),
    ):
        yield


class _AllTiles(TorchFunctionMode):
    """Answers what only a tensor's numbers tell: every tile is chosen, and a row has so many of them."""

    def __init__(self, tiles: int) -> None:
        super().__init__()
        self.tiles = tiles

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__ and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool:
            return args[0].clone()
        if func is torch.Tensor.item:
            return self.tiles
        return func(*args, **(kwargs or {}))


def batch_inputs(batch: BatchShape, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a batch of real tensors: token 0 everywhere; padded batches have a mask with a hole.

    With pictures a row begins with the tokens of its tiles, which are white.
    """
    ids = torch.zeros((batch.sequences, batch.length), dtype=torch.long)
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
    if batch.tiles:
        inputs |= picture_inputs(batch, model.config)
        ids[:, : batch.tiles * tokens_of_tile(model.config)] = model.config.image_token_id
    return inputs if batch.goal.compares else tell_of_answers(inputs, model)


def picture_inputs(batch: BatchShape, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Return white tiles, of shape (rows, tiles, channels, height, width), and the pixels that count: all."""
    vision = config.vision_config
    size = (vision.image_size, vision.image_size)
    return {
        "pixel_values": torch.ones((batch.rows, batch.tiles, vision.num_channels, *size)),
        "pixel_attention_mask": torch.ones((batch.rows, batch.tiles, *size), dtype=torch.long),
    }


def tokens_of_tile(config: PretrainedConfig) -> int:
    """Return how many tokens of a decoder stand for a square of a picture."""
    vision = config.vision_config
    return (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2


def tracked_steps(
    run: RunConfig,
    model: PreTrainedModel | PeftModel,
    inputs: dict[str, torch.Tensor],
    as_on_gpu: bool,
    share: Share | None = None,
) -> Timeline:
    """Take two optimizer steps by the run's own trainer; return the timeline of the second.

    `share` is the part of a divided model that `model` holds; None: it is whole.
    """
    with ExitStack() as stack:
        trainer, tracker = stack.enter_context(tracked_trainer(run, model, inputs, as_on_gpu, share or WHOLE))
        wrapped, optimizer = trainer.accelerator.prepare(model, trainer.optimizer, device_placement=[False, False])
        if run.parallelism.replicates:
            tracker.enter("load", "gradients")  # its buckets hold them
            wrapped = stack.enter_context(one_of_many_ranks(wrapped, run.world_size))
        for _ in range(STEPS):
            tracker.timeline.clear()
            take_step(trainer, wrapped, optimizer, inputs, tracker)
    return tracker.timeline


def tracked_stage_steps(
    run: RunConfig, model: PreTrainedModel | PeftModel, inputs: dict[str, torch.Tensor], stage: int, as_on_gpu: bool
) -> Timeline:
    """Take an optimizer step of one stage by the run's own pipeline, which sends and receives nothing.

    Optimizer states are there before it, from an update without passes.
    """
    share = Share((), has_embeddings=stage == 0, has_head=stage == run.devices - 1)
    with (
        tracked_trainer(run, model, inputs, as_on_gpu, share) as (trainer, tracker),
        fake_group(stage, run.devices),
        mock.patch.object(PipelineScheduleSingle, "_warmup_p2p", _without_a_vote, create=True),
    ):
        strategy = stage_alone(run, model, stage, "attention_mask" in inputs, tracker, trainer)
        batch = {"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs}
        make_optimizer_states(trainer, tracker)
        tracker.timeline.clear()
        take_stage_step(strategy, batch, tracker)
    return tracker.timeline


def make_optimizer_states(trainer: Trainer, tracker: Watch) -> None:
    """Update once, by gradients from nowhere: a step's passes for all micro-batches would take longer."""
    tracker.enter("load", "gradients")
    for weight in trainer.model.parameters():
        if weight.requires_grad:
            weight.grad = torch.empty_like(weight)
    tracker.enter("load", "optimizer")
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def stage_alone(
    run: RunConfig,
    model: PreTrainedModel | PeftModel,
    stage: int,
    padded: bool,
    tracker: Watch,
    trainer: "StepTrainer",
) -> PipelineParallel:
    """Return the strategy of one stage, on the CPU, which tells `tracker` of its passes."""
    on_cpu, rank = replace(run, device="cpu", gpu="", attention="sdpa"), Rank(stage, run.devices, "cpu", "python")
    strategy = PipelineParallel(on_cpu, rank)
    strategy.attach(model)
    strategy.prepare(trainer.optimizer, trainer.accelerator)
    strategy.pipeline = pipeline_alone(on_cpu, model, rank, padded, tracker)
    return strategy


def pipeline_alone(
    run: RunConfig, model: PreTrainedModel | PeftModel, rank: Rank, padded: bool, tracker: Watch
) -> Pipeline:
    """Return the pipeline of one stage, on the CPU; `tracker` is told when a pass begins."""
    pipeline = Pipeline((StageModule if padded else _UnpaddedStage)(model, run, rank), run, rank)
    begins = {
        "forward": "forward: embeddings" if pipeline.module.is_first else "forward: received hidden state",
        "backward": f"backward: {HEAD_AND_LOSS if pipeline.module.is_last else HANDING_ON}",
    }

    def timed(kind: str, *args: Any, **kwargs: Any) -> Any:
        if kind in begins:
            tracker.enter(begins[kind])
        return PassClock.timed(pipeline.clock, kind, *args, **kwargs)

    pipeline.clock.timed = timed
    return pipeline


class _UnpaddedStage(StageModule):
    """A stage that drops the mask: that it is of ones alone cannot be read from a fake one."""

    def forward(self, given: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return super().forward(given, None)


def _without_a_vote(schedule: PipelineScheduleSingle, stages: list[PipelineStage], *_: object) -> None:
    """Skip the exchange of shapes that PyTorch 2.12 and later do first: stages know them; there is no other rank."""
    for stage in stages:
        stage._inference_mode = pipelining.InferenceMode.STATIC


class StepTrainer(Trainer):
    """A Trainer that leaves the fake model where it is, and may have a part of the model alone.

    Hidden states and gradients of other devices come from nowhere then.
    """

    def __init__(self, *, share: Share = WHOLE, run: RunConfig | None = None, **kwargs: Any) -> None:
        """Train the part of a model that has the ends of `share`, by the loss of `run`'s task; None: the model's."""
        super().__init__(**kwargs)
        self.share = share
        self.fake_loss = partial(objective_of(run).fake_loss, run) if run and objective_of(run).fake_loss else None
        self.after_layers = HEAD_AND_LOSS if share.has_head else HANDING_ON

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Leave the model where it is: a fake tensor cannot be moved in place."""

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], **kwargs: Any) -> torch.Tensor:
        """Return the loss, or without a head something in its place that can be back-propagated."""
        if self.fake_loss:
            with self.compute_loss_context_manager():
                return self.fake_loss(self.model, model, inputs)
        if not self.share.has_embeddings:  # a hidden state of shape (rows, tokens, hidden) from the device before
            base = _base_of(self.model)
            dtype = hidden_dtype(base, base.dtype, autocasts=self.accelerator.mixed_precision != "no")
            shape = (*inputs["input_ids"].shape, base.config.hidden_size)
            hidden = torch.empty(shape, dtype=dtype, requires_grad=True)
            inputs = {"inputs_embeds": hidden} | {name: inputs[name] for name in inputs if name != "input_ids"}
        if self.share.has_head:
            return super().compute_loss(model, inputs, **kwargs)
        kept = ("input_ids", "inputs_embeds", "attention_mask")
        return _LossElsewhere.apply(model(**{name: inputs[name] for name in kept if name in inputs}).logits)


class _LossElsewhere(torch.autograd.Function):
    """The layers of other devices: a number for their loss, and a gradient as it comes back from them."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.empty(ctx.shape, dtype=ctx.dtype)


def step_trainer(
    model: PreTrainedModel,
    arguments: TrainingArguments,
    trainer_class: Callable[..., StepTrainer] = StepTrainer,
) -> StepTrainer:
    """Return a trainer of single steps, with its optimizer, and with gradient checkpointing where it is asked for."""
    name_deepspeeds_device()
    trainer = trainer_class(model=model, args=arguments, train_dataset=[0], eval_dataset=[0])
    trainer.create_optimizer()
    if arguments.gradient_checkpointing:  # as `Trainer.train` does first
        model.gradient_checkpointing_enable(arguments.gradient_checkpointing_kwargs)
    return trainer


@contextmanager
def tracked_trainer(
    run: RunConfig,
    model: PreTrainedModel | PeftModel,
    inputs: dict[str, torch.Tensor],
    as_on_gpu: bool,
    share: Share,
) -> Iterator[tuple[StepTrainer, MemoryTracker]]:
    """Make the run's trainer as for one rank on a CPU, with the operations that a GPU or a CPU chooses.

    Beside it comes a tracker, which counts the weights and `inputs` and what the steps make.
    """
    one = {"device": "cpu", "gpu": "", "parallel": "single", "devices": 1}
    alone = run.changed_to(**one, attention="eager", padding_free="auto", max_batch_tokens=0, report_to="none")
    own_loss = None if loss_is_chunked(run, model) else objective_of(run).loss
    trainer_class = partial(StepTrainer, share=share, run=run, compute_loss_func=own_loss)
    tracker = MemoryTracker(_base_of(model).config.get_text_config().vocab_size)
    for part, tensors in (("weights", (*model.parameters(), *model.buffers())), ("buffers", inputs.values())):
        for tensor in tensors:
            tracker.add(tensor, part)
    with tempfile.TemporaryDirectory() as folder, like_cuda() if as_on_gpu else nullcontext():
        trainer = step_trainer(model, training_arguments(alone, Path(folder)), trainer_class)
        if as_on_gpu:
            for group in trainer.optimizer.param_groups:
                group["foreach"] = not group.get("fused")
        with tracker:
            mark_segments(model, tracker, trainer.after_layers)
            watch_gradients(model, tracker)
            yield trainer, tracker


def take_step(
    trainer: StepTrainer, model: torch.nn.Module, optimizer: Any, inputs: dict[str, torch.Tensor], tracker: Watch
) -> None:
    """Take one optimizer step as the Trainer does; `tracker` is told of its phases."""
    back_propagate = trainer.accelerator.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        tracker.enter(f"backward: {trainer.after_layers}")
        back_propagate(*args, **kwargs)

    tracker.enter("load")
    tracker.enter("forward: embeddings")
    with mock.patch.object(trainer.accelerator, "backward", backward):
        trainer.training_step(model, dict(inputs), num_items_in_batch=1)
    tracker.enter("optimizer: clipping and step", "optimizer")
    if trainer.args.max_grad_norm:
        trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
    optimizer.step()
    model.zero_grad()


def take_stage_step(strategy: PipelineParallel, batch: dict[str, torch.Tensor], tracker: Watch) -> None:
    """Take one optimizer step of a stage as `LoopTrainer` does; `tracker` is told of its phases."""
    tracker.enter("load", "buffers")  # what the schedule receives into; its clock tells of the passes
    strategy.backward(batch, num_items_in_batch=1, is_last=True)
    tracker.enter("optimizer: tied weights and clipping", "buffers")
    strategy.finish_gradients()
    tracker.enter("optimizer: step", "optimizer")
    strategy.update()


def mark_segments(model: torch.nn.Module, tracker: Watch, after_layers: str = HEAD_AND_LOSS) -> None:
    """Have the tracker enter a segment where a stack's first, middle and last layers begin, forward and backward.

    A layer's `__call__` is wrapped, not its `forward`: gradient checkpointing happens inside it.
    """
    stacks = {
        name.rpartition("model.")[2]: stack
        for name, stack in model.named_modules()
        if isinstance(stack, torch.nn.ModuleList) and isinstance(stack[0], GradientCheckpointingLayer)
    }
    for name, stack in stacks.items():
        for number, layer in enumerate(stack):
            place = {0: "first layer", len(stack) - 1: "last layer"}.get(number, "middle layers")
            mark(layer, tracker, f"{name}, {place}")
        is_last = name == next(reversed(stacks))
        mark(stack[-1], tracker, after=after_layers if is_last else f"after {name}")


@contextmanager
def one_of_many_ranks(model: torch.nn.Module, world_size: int) -> Iterator[DistributedDataParallel]:
    """Wrap `model` as rank 0 of `world_size` under DDP, with collectives that send nothing."""
    with fake_group(0, world_size):
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)  # with no other rank
        wrapped.register_comm_hook(None, noop_hook)
        wrapped.reducer = _ReducerWithoutRebuild(wrapped.reducer)
        yield wrapped


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Start a process group as rank `rank` sees it, which sends and receives nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


class _ReducerWithoutRebuild:
    """DDP's reducer, which after the first step asks rank 0 for the buckets' order; there is no rank 0 to ask."""

    def __init__(self, reducer: torch.distributed.Reducer) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
