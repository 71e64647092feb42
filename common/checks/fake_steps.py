"""Training steps on fake tensors: of a whole model, of a device's share, and of a pipeline's stage."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import trl.trainer.utils
from peft import PeftModel
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.pipelining import PipelineStage, _utils as pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from transformers import GradientCheckpointingLayer, PretrainedConfig, PreTrainedModel, masking_utils
from transformers.integrations import moe
from trl.kernels import chunked_logprob

from common.base.errors import NotPlannedError
from common.base.run_config import RunConfig
from common.data.rows import IGNORED_LABEL
from common.models.loading import ATTENTION, model_class, weight_dtype
from common.models.stages import cut
from common.models.trained_weights import with_trained_weights
from common.planning.device_maps import device_map_of
from common.planning.job import BatchShape, architecture_of_run
from common.planning.shares import Share
from common.planning.terms import Kind
from common.runtime.memory_tracker import HANDING_ON, MemoryTracker, Timeline, Watch, like_cuda, mark, watch_gradients
from common.runtime.world import Rank
from common.tasks.preferences import REFERENCES
from common.training.answer_logits import tell_of_answers
from common.training.optimizers import make_optimizer
from common.training.part import Part
from common.training.pipeline import PassClock, Pipeline, hidden_dtype
from common.training.pipeline_parallel import Stage

Model = PreTrainedModel | PeftModel
WHOLE = Share(())  # both ends; the model says how many layers there are
HEAD_AND_LOSS = "head and loss"


def fake_step(
    run: RunConfig, config: PretrainedConfig, batch: BatchShape, as_on_gpu: bool, share: Share = WHOLE, number: int = 0
) -> Timeline:
    """Return the timeline of device `number`'s step on fake tensors: all `config`'s layers, and the ends of `share`."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        model = build_model(run, config)
    with mode:
        model.to_empty(device="cpu")
    _base_of(model).tie_weights()  # each is a tensor of its own now
    if share is not WHOLE:
        keep_share(model, run, batch, share)
    inputs = {
        name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
        for name, value in batch_inputs(batch, model).items()
    }
    # whether a row holds several texts cannot be read from fake position numbers
    no_row_is_packed = mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None)
    # of fake experts PyTorch's grouped product takes bf16 alone; Transformers' own stands in, which keeps the same
    in_bf16 = mock.patch.object(moe, "_can_use_grouped_mm", lambda _, weight, __: weight.dtype == torch.bfloat16)
    like_gpu = like_triton(batch.labelled) if as_on_gpu and batch.goal.reads_log_probs else nullcontext()
    tiles = every_tile_counts(model, batch.tiles) if batch.tiles else nullcontext()
    with mode, no_row_is_packed, in_bf16, tiles, like_gpu:
        return tracked_step(run, model, inputs, as_on_gpu, share, number)


def keep_share(model: Model, run: RunConfig, batch: BatchShape, share: Share) -> None:
    """Take out of the run's model the ends that `share` lacks; all its layers stay."""
    architecture = architecture_of_run(run, batch)
    if architecture.family.positions and not share.has_embeddings:
        raise NotPlannedError(f"{run.model} would add its positions again on a later device: ask the planner instead.")
    stack = replace(architecture.stacks[0], layers=model.config.num_hidden_layers)
    before = [] if share.has_embeddings else [Share((0,), has_head=False)]
    after = [] if share.has_head else [Share((0,), has_embeddings=False)]
    held = [*before, replace(share, layers=(stack.layers,)), *after]
    stage_map = device_map_of(replace(architecture, stacks=(stack,)), held, range(len(held)))
    cut(_base_of(model), stage_map, len(before))


def build_model(run: RunConfig, config: PretrainedConfig) -> Model:
    """Return the run's model with what it trains switched on, on the device of the context."""
    architecture = model_class(run, config)
    model = architecture._from_config(config, dtype=weight_dtype(run), attn_implementation=ATTENTION[run.attention])
    return with_trained_weights(model, run)


def _base_of(model: Model) -> PreTrainedModel:
    return model.get_base_model() if isinstance(model, PeftModel) else model


@contextmanager
def every_tile_counts(model: Model, tiles: int) -> Iterator[None]:
    """Let a fake batch's pictures through a vision tower.

    Models of Idefics3's kind look for padded tiles and patches, and count image tokens, which fake tensors do not tell.
    Of whole tiles nothing is left out or masked.
    """
    room = sys.modules[type(_base_of(model)).__module__]
    mask = room.create_bidirectional_mask

    def without_padding(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        return mask(*args, **{**kwargs, "attention_mask": None})

    with (
        mock.patch.object(room, "create_bidirectional_mask", without_padding),
        mock.patch.object(room, "torch_compilable_check", _nothing),
        _Told(torch.clone, {torch.Tensor.item: lambda _: tiles}),  # every tile is chosen
    ):
        yield


@contextmanager
def like_triton(labelled: int) -> Iterator[None]:
    """Have TRL's head work on fake tensors as its Triton kernels do: within the tile, on positions with a label alone.

    Those are the last `labelled` of each sequence. Of 16 bits CUDA adds products to fp32 without copies.
    """

    def last(given: torch.Tensor) -> torch.Tensor:
        return given[:, -labelled:].flatten(0, 1)

    def scattered(everywhere: torch.Tensor, _: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return pad(values.view(len(everywhere), labelled), (everywhere.shape[1] - labelled, 0))

    in_place = dict.fromkeys(("_forward_tile", "_backward_tile", "_addmm_fp32"), _nothing)
    with (
        mock.patch.multiple(chunked_logprob, **in_place),
        mock.patch.object(trl.trainer.utils, "_use_triton", return_value=True),
        _Told(last, {torch.Tensor.masked_scatter: scattered}),
    ):
        yield


def _nothing(*_: object, **__: object) -> None:
    """Do nothing; a `Mock` would keep what it is called with alive."""


class _Told(TorchFunctionMode):
    """Answers what only a tensor's numbers tell: what a mask chooses, and what some functions return."""

    def __init__(
        self, chosen: Callable[[torch.Tensor], torch.Tensor], returned: dict[Callable, Callable[..., Any]]
    ) -> None:
        super().__init__()
        self.chosen, self.returned = chosen, returned

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__ and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool:
            return self.chosen(args[0])
        return self.returned.get(func, func)(*args, **(kwargs or {}))


def batch_inputs(batch: BatchShape, model: torch.nn.Module) -> dict[str, Any]:
    """Return a batch of real tensors: token 0 everywhere; padded batches have a mask with a hole.

    With pictures a row begins with the tokens of its white tiles. Pairs come with what a reference of their own finds.
    """
    ids = torch.zeros((batch.sequences, batch.length), dtype=torch.long)
    if batch.classes or batch.target_length:
        labels = ids.new_zeros(batch.rows if batch.classes else (batch.rows, batch.target_length))
    else:
        labels = torch.full_like(ids, IGNORED_LABEL)
        labels[:, batch.length - batch.labelled :] = 0
    inputs = {"input_ids": ids, "labels": labels}
    if batch.target_length:
        inputs["decoder_input_ids"] = torch.zeros_like(labels)
    if batch.padded or batch.goal.reads_log_probs:  # pairs always have a mask
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][0, -1] = int(not batch.padded)
    if batch.tiles:
        vision = model.config.vision_config
        size = (batch.rows, batch.tiles, vision.image_size, vision.image_size)
        inputs["pixel_values"] = torch.ones((*size[:2], vision.num_channels, *size[2:]))
        inputs["pixel_attention_mask"] = torch.ones(size, dtype=torch.long)  # all pixels count
        tokens = (vision.image_size // vision.patch_size) ** 2 // model.config.scale_factor**2  # of a tile
        ids[:, : batch.tiles * tokens] = model.config.image_token_id
    if not batch.goal.reads_log_probs:
        return tell_of_answers(inputs, model)
    known = {} if isinstance(model, PeftModel) else dict.fromkeys(REFERENCES, torch.zeros(batch.rows))
    return {**inputs, "completion_mask": (inputs.pop("labels") == 0).long(), "pairs": batch.rows, **known}


def tracked_step(
    run: RunConfig, model: Model, inputs: dict[str, Any], as_on_gpu: bool, share: Share = WHOLE, number: int = 0
) -> Timeline:
    """Take an optimizer step on a CPU as training does, with optimizer states from its start; return its timeline.

    `model` is what `share` says, for device `number`; a stage of a pipeline sends and receives nothing.
    """
    tracker = MemoryTracker(_base_of(model).config.get_text_config().vocab_size)
    given = [tensor for tensor in inputs.values() if isinstance(tensor, torch.Tensor)]
    tracker.add_all({Kind.WEIGHTS: (*model.parameters(), *model.buffers()), Kind.BUFFERS: given})
    with ExitStack() as stack:
        stack.enter_context(like_cuda() if as_on_gpu else nullcontext())
        stack.enter_context(tracker)
        mark_segments(model, tracker, _after_layers(share))
        watch_gradients(model, tracker)
        if run.parallelism.pipelines:
            part = stack.enter_context(stage_alone(run, model, number, "attention_mask" in inputs, tracker))
        else:
            module = model
            if run.parallelism.replicates:
                tracker.enter("load", Kind.GRADIENTS)  # its buckets hold them
                module = stack.enter_context(one_of_many_ranks(model, run.world_size))
            part = Part(module, on_cpu(run), Rank(0, 1, "cpu", "python"))
        part.optimizer = make_optimizer(part.model, part.run)
        if as_on_gpu:
            for group in part.optimizer.param_groups:
                group["foreach"] = not group.get("fused")
        tracker.enter("load", Kind.GRADIENTS)  # from nowhere: a step's passes for all micro-batches would take longer
        for weight in part.model.parameters():
            weight.grad = torch.empty_like(weight) if weight.requires_grad else None
        tracker.enter("load", Kind.OPTIMIZER)
        part.step()
        part.forget_gradients()
        tracker.timeline.clear()
        take_step(part, inputs, tracker, share=share)
    return tracker.timeline


def on_cpu(run: RunConfig) -> RunConfig:
    """Return the run as one rank takes its steps on a CPU, without the kernels that take no fake tensors."""
    alone = {} if run.parallelism.pipelines else {"parallel": "single", "devices": 1, "sp_size": 1}
    kernels = {"attention": "sdpa", "use_liger_kernel": False, "torch_compile": False}
    return run.changed_to(**alone, **kernels, device="cpu", gpu="", padding_free="auto")


@contextmanager
def stage_alone(run: RunConfig, model: Model, number: int, padded: bool, tracker: Watch) -> Iterator[Stage]:
    """Make `model` a stage of the run's pipeline without other stages; `tracker` is told when a pass begins."""
    alone, rank = on_cpu(run), Rank(number, run.devices, "cpu", "python")
    pipeline = Pipeline(model, alone, rank)
    begins = {
        "forward": "forward: embeddings" if pipeline.is_first else "forward: received hidden state",
        "backward": f"backward: {HEAD_AND_LOSS if pipeline.is_last else HANDING_ON}",
    }

    def timed(kind: str, *args: Any, **kwargs: Any) -> Any:
        if kind in begins:
            tracker.enter(begins[kind])
        return PassClock.timed(pipeline.clock, kind, *args, **kwargs)

    pipeline.clock.timed = timed
    if not padded:  # that a mask is of ones alone cannot be read from a fake one
        without_mask = {"attention_mask": None}
        pipeline.register_forward_pre_hook(lambda _, given, named: (given, named | without_mask), with_kwargs=True)
    without_a_vote = mock.patch.object(PipelineScheduleSingle, "_warmup_p2p", _know_shapes, create=True)
    with fake_group(number, run.devices), without_a_vote:
        yield Stage(pipeline, alone, rank)


def _know_shapes(schedule: PipelineScheduleSingle, stages: list[PipelineStage], *_: object) -> None:
    """Skip the exchange of shapes that PyTorch 2.12 and later do first: stages know them; there is no other rank."""
    for stage in stages:
        stage._inference_mode = pipelining.InferenceMode.STATIC


def _after_layers(share: Share) -> str:
    return HEAD_AND_LOSS if share.has_head else HANDING_ON


def loss_of_share(part: Part, inputs: dict[str, Any], share: Share) -> torch.Tensor:
    """Return the loss, or in its place the sum of what is handed on; what other devices send comes from nowhere."""
    if not share.has_embeddings:  # a hidden state of shape (rows, tokens, hidden) from the device before
        base = _base_of(part.model)
        dtype = hidden_dtype(base, base.dtype, autocasts=part.run.precision != "fp32")
        shape = (*inputs["input_ids"].shape, base.config.hidden_size)
        hidden = torch.empty(shape, dtype=dtype, requires_grad=True)
        inputs = {"inputs_embeds": hidden} | {name: inputs[name] for name in inputs if name != "input_ids"}
    if share.has_head:
        return part.loss(inputs, 1)
    for_layers = {name: inputs[name] for name in ("input_ids", "inputs_embeds", "attention_mask") if name in inputs}
    with part.autocast():
        handed_on = part.module(**for_layers, use_cache=False).logits
    handed_on.register_hook(torch.clone)  # the gradient of a sum is one number, what comes back is not
    return handed_on.sum()


def take_step(part: Part, inputs: dict[str, Any], tracker: Watch, share: Share = WHOLE) -> None:
    """Take one optimizer step as a workflow does; `tracker` is told of its phases."""
    if isinstance(part, Stage):
        tracker.enter("load", Kind.BUFFERS)  # what the schedule receives into; its clock tells of the passes
        part.back_propagate({"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs}, 1)
        tracker.enter("optimizer: tied weights and clipping", Kind.BUFFERS)
        part.clip_gradients(part.run.max_grad_norm)
        tracker.enter("optimizer: step", Kind.OPTIMIZER)
    else:
        tracker.enter("load")
        tracker.enter("forward: embeddings")
        loss = loss_of_share(part, inputs, share)
        tracker.enter(f"backward: {_after_layers(share)}")
        loss.backward()
        del loss  # its graph has the gradient of a hidden state
        tracker.enter("optimizer: clipping and step", Kind.OPTIMIZER)
        part.clip_gradients(part.run.max_grad_norm)
    part.step()
    part.forget_gradients()


def mark_segments(model: torch.nn.Module, tracker: Watch, after_layers: str = HEAD_AND_LOSS) -> None:
    """Have the tracker enter a segment where a stack's first, middle and last layers begin, forward and backward."""
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
    # after the first step it asks rank 0 for the buckets' order; there is no rank 0 to ask
    as_they_are = mock.patch.object(torch.distributed.Reducer, "_rebuild_buckets", return_value=False)
    with fake_group(0, world_size), as_they_are:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)  # with no other rank
        wrapped.register_comm_hook(None, noop_hook)
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
