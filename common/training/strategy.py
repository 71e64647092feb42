"""What the ranks of a run do differently from one device: the protocol of strategies, and which one a run has.

A parallelism names its strategy in `common.base.specs.PARALLELISMS`; without one the Trainer itself does it, by the
strategy of the run's task.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import gather_object, wait_for_everyone
from peft import PeftModel
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.liger import apply_liger_kernel
from typing_extensions import override

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import literal_of
from common.data import rows
from common.data.rows import IGNORED_LABEL, Tokens
from common.models.loading import load_base_model, next_token_logits
from common.models.saved_files import save_model
from common.models.separate_rows import separate_rows, without_mask
from common.models.shards import byte_count, full_weights, global_numel, host_copy, local_part
from common.models.stages import StageMap
from common.models.trained_weights import parameter_counts, with_trained_weights
from common.planning.device_maps import whole_model_on
from common.runtime.rank import exchange_timeout
from common.runtime.world import BACKENDS, Rank
from common.tasks.objectives import objective_of
from common.training.chunked_loss import compute_loss_in_chunks, takes_chunks
from common.training.compiled_layers import compile_layers
from common.training.digests import begin_hashing, begin_writing
from common.training.known_padding import padding_known
from common.training.safe_loading import SafePlanner, SafeReader
from common.training.usage import Held, SentBytes, optimizer_bytes

Batch = dict[str, Any]
"""A batch's tensors; of rows that lie end to end the longest row's tokens, too."""
Model = PreTrainedModel | PeftModel
SHARDS = "shards"
"""Folder of a checkpoint with every rank's part, as torch.distributed.checkpoint writes it."""


class Strategy:
    """What the ranks of one parallelism do in a `LoopTrainer`.

    As it stands here, each rank has rows of its own and calls one model, and the ranks' losses are parts of one sum;
    subclasses say how the model is divided, and how gradients come together.

    Attributes:
        takes_steps: Whether a `LoopTrainer` takes the steps; else the Trainer does.
        measures_usage: Whether what a rank holds and sends is measured in the second step.
        saves_in_background: Whether training goes on while a large checkpoint is written;
            `Parallelism.saves_in_background` plans for it.
        autocasts: Whether products are in bf16 by autocast; DeepSpeed converts weights itself, as FSDP may.
        divides_checkpoints: Whether every rank writes a part of a checkpoint.
        needs_one_disk: Whether ranks write and read a checkpoint in one folder, which their machines must share.
    """

    takes_steps = measures_usage = saves_in_background = needs_one_disk = autocasts = True
    divides_checkpoints = False

    def __init__(self, run: RunConfig, rank: Rank) -> None:
        """Prepare for `run`; `rank` is this process's place among all, also where all work on the same rows."""
        self.run, self.rank, self.objective = run, rank, objective_of(run)
        self.usage = UsageReport(self)
        self.saving_group: dist.ProcessGroup | None = None

    @classmethod
    def check(cls, run: RunConfig) -> None:
        """Check what the strategy needs, before anything is loaded.

        Raises:
            BadInputError: what is missing or does not fit, and what would.
        """

    # -- model and optimizer

    def load_model(self, stage_map: StageMap | None = None) -> Model:
        """Return this rank's part of the base, with its trained weights switched on.

        `stage_map` says which stage of a pipeline has which layers.
        """
        return whole_model_to_train(self.run, whole_model_on(self.rank.device))

    def group_weights(self, optimizer: torch.optim.Optimizer) -> None:
        """Rearrange the optimizer's parameter groups, before its schedule is built."""

    def attach(self, model: torch.nn.Module) -> None:
        """Train `model`, which comes from `load_model`."""
        if self.run.use_liger_kernel:
            apply_liger_kernel(model, None)
        self.model, self.takes_logits_to_keep = model, takes_logits_to_keep(model)
        self.takes_chunks = chunk_loss(self.run, model)
        if self.run.is_padding_free and self.run.attention == "sdpa":
            separate_rows(model)
        if self.run.torch_compile:
            compile_layers(model)

    def prepare(self, optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> torch.optim.Optimizer:
        """Return the optimizer as training takes it, and make `model` ready; called on every rank before the steps."""
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # without Accelerate's wrapper
        return optimizer

    # -- a step

    def backward(self, batch: Batch, num_items_in_batch: int, is_last: bool) -> torch.Tensor:
        """Add the gradients of one of this rank's batches, and return its part of the step's loss.

        The step's loss is a mean over its `num_items_in_batch` labels on all ranks; `is_last`: no batch of it follows.
        """
        loss = self.loss(batch, num_items_in_batch)
        loss.backward()
        return loss.detach()

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients as far as this rank holds them."""
        return [local_part(weight.grad) for weight in self.model.parameters() if weight.grad is not None]

    def kept_buffers(self) -> list[torch.Tensor]:
        """Return what this rank keeps between steps beside weights and optimizer states.

        Called after a backward pass, before its gradients are forgotten.
        """
        return []

    def finish_gradients(self) -> None:
        """Make the gradients those of the whole model, and clip them by their norm."""
        if self.run.max_grad_norm:
            clip_grad_norm_(self.model.parameters(), self.run.max_grad_norm)

    def update(self) -> None:
        """Take the optimizer's step, and forget the gradients."""
        self.optimizer.step()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Forget the gradients of a step, taken or not."""
        self.optimizer.zero_grad()

    def forward(self, **inputs: Any) -> Any:
        """Return the model's output."""
        return self.model(**inputs)

    def loss(self, batch: Batch, num_items_in_batch: int, model: torch.nn.Module | None = None) -> torch.Tensor:
        """Return the sum of a batch's losses over the step's `num_items_in_batch`; `model` stands in for its own."""
        inputs, call = self.to_device(batch), model or self.forward
        with padding_known(batch), self.autocast():
            if self.objective.loss is None or self.takes_chunks:
                return call(**inputs, num_items_in_batch=num_items_in_batch, use_cache=False).loss
            labels = inputs.pop("labels")
            return self.objective.loss(call(**inputs), labels, num_items_in_batch)

    def inputs_for_loss(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a collated batch, told where to compute logits if the model can be told.

        It is still on the CPU: to know how many positions there are, it would have to wait for a GPU.
        """
        if "cu_seq_lens_q" in batch and self.run.attention == "sdpa":
            batch = without_mask(batch)
        batch = tell_of_answers(batch, self.model)
        if not self.takes_logits_to_keep:
            return batch
        if len(self.rank.devices) > 1 and not self.takes_chunks:  # the head's device may be another than the inputs'
            batch["logits_to_keep"] = batch["logits_to_keep"].tolist()
        return batch

    def to_device(self, batch: Batch) -> Batch:
        """Return the model's inputs on this rank's device; see `on_device`."""
        return on_device(batch, self.rank.device)

    def autocast(self) -> torch.autocast:
        """Return a context in which matrix products are in bfloat16, where the run asks for it."""
        enabled = self.autocasts and self.run.precision.startswith("bf16")
        return torch.autocast(torch.device(self.rank.device).type, torch.bfloat16, enabled=enabled)

    # -- rows

    def fill(self, batch: list[Tokens]) -> list[Tokens]:
        """Return the rows of a batch with those that it must be filled up with."""
        return batch

    def labels_in(self, row: Tokens) -> int:
        """Return how many labels of a row are to be predicted."""
        if self.run.goal.summarizes:  # a decoder that reads another text predicts its own first token, too
            return len(row["labels"]) - row["labels"].count(IGNORED_LABEL)
        return rows.labels_in(row)

    def own_rows(self, of_ranks: list[Any]) -> list[Any]:
        """Return, of what each rank did, that of the ranks with rows of their own.

        Raises:
            RuntimeError: ranks that were to work on the same rows did not.
        """
        if self.run.parallelism.splits_rows:
            return of_ranks
        if any(other != of_ranks[0] for other in of_ranks):
            raise RuntimeError(f"With {self.run.parallelism.label} all ranks work on the same rows, but they did not.")
        return of_ranks[:1]

    # -- validation

    def sums(self, batch: Batch) -> torch.Tensor:
        """Return the sums of a validation batch's results (`Objective.results`), as far as this rank knows them."""
        self.model.eval()
        with self.autocast():
            results = self.results(self.forward, self.to_device(batch))
        self.model.train()
        return results.sum(0)

    @torch.no_grad()
    def results(self, model: Callable[..., Any], batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return what each row counts for (`Objective.results`), shape (rows, k), by `model` with its dropout off.

        Logits are computed at answer positions alone: those of whole rows would be the run's highest peak where the
        vocabulary is large.
        """
        if self.takes_chunks:
            losses = model(**{name: tensor for name, tensor in batch.items() if name != "row"}).token_losses
            answers = (batch["shift_labels"] != IGNORED_LABEL).sum(1)
            return torch.stack([losses.sum(1), answers.to(losses.device)], dim=1)
        given = {name: tensor for name, tensor in batch.items() if name not in ("row", "labels", "shift_labels")}
        without_cache = {"use_cache": False} if self.takes_logits_to_keep else {}
        logits, labels = model(**given, **without_cache).logits, batch["labels"]
        if self.run.goal.converses and not self.takes_logits_to_keep:  # position t predicts token t + 1
            logits, labels = logits[:, :-1], labels[:, 1:]
        return self.objective.results(logits, labels.to(logits.device))

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Return what all ranks together know of a loss, or of several sums; called on every rank."""
        total = value.detach().clone()
        if self.rank.world_size > 1:
            dist.all_reduce(total)
        return total

    def logits(self, batch: Batch) -> torch.Tensor | None:
        """Return the logits of a batch, fp32, shape (rows, tokens, vocabulary), with dropout off.

        Called on every rank; None where this rank does not know them.
        """
        return next_token_logits(self.model, batch)

    # -- checkpoints

    def save(self, folder: Path) -> None:
        """Write this rank's shards of weights and optimizer; nothing is gathered. Called on every rank."""
        self._write_shards(folder, self._weights() | self._states())

    def save_weights(self, folder: Path) -> None:
        """Write what `load_weights` takes back; see `save`."""
        self._write_shards(folder, self._weights())

    def copied(self, is_full: bool) -> dict[str, Any]:
        """Return a copy of what `save`, or else `save_weights`, writes, in the host's memory; called on every rank."""
        return host_copy(self._weights() | (self._states() if is_full else {}))

    def write_in_background(self, folder: Path, parts: dict[str, Any]) -> Future[Any]:
        """Write what `copied` has returned while training goes on, as `save` does; called on every rank.

        The threads that write have a process group of their own, on the CPU: their collectives would else come among
        those of training. (`dcp.async_save` does the same, but copies what is a copy already.)

        Returns:
            What is done when all ranks have written.
        """
        if self.rank.world_size > 1 and not self.saving_group:
            self.saving_group = dist.new_group(backend=BACKENDS["cpu"], timeout=exchange_timeout(self.run))
        write = partial(dcp.save, parts, storage_writer=shard_writer(folder), process_group=self.saving_group)
        return begin_writing(write, self._own_shards(folder))

    def load(self, folder: Path) -> None:
        """Take back this rank's shards, also from a checkpoint of another number of ranks."""
        parts = self._read_shards(folder, self._weights() | self._states())
        self._set_weights(parts)
        set_optimizer_state_dict(self.model, self.optimizer, parts["optimizer"])

    def load_weights(self, folder: Path) -> None:
        """Take back this rank's shards of the weights, which `save` or `save_weights` wrote; not the optimizer."""
        self._set_weights(self._read_shards(folder, self._weights()))

    def _weights(self) -> dict[str, Any]:
        """Return this rank's shards of the weights; with adapters of them alone, as the base does not change."""
        weights = get_model_state_dict(self.model)
        if self.run.method.has_adapters:
            trained = {name for name, weight in self.model.named_parameters() if weight.requires_grad}
            weights = {name: shard for name, shard in weights.items() if name in trained}
        return {"model": weights}

    def _states(self) -> dict[str, Any]:
        return {"optimizer": get_optimizer_state_dict(self.model, self.optimizer)}

    def _set_weights(self, parts: dict[str, Any]) -> None:
        options = StateDictOptions(strict=not self.run.method.has_adapters)
        set_model_state_dict(self.model, parts["model"], options=options)

    def _write_shards(self, folder: Path, parts: dict[str, Any]) -> None:
        dcp.save(parts, storage_writer=shard_writer(folder))
        begin_hashing(self._own_shards(folder))

    def _own_shards(self, folder: Path) -> Iterator[Path]:
        return (folder / SHARDS).glob(f"__{self.rank.rank}_*")

    def _read_shards(self, folder: Path, parts: dict[str, Any]) -> dict[str, Any]:
        dcp.load(parts, storage_reader=SafeReader(str(folder / SHARDS)), planner=SafePlanner())
        return parts

    # -- one model of all parts

    def export(self, folder: Path) -> None:
        """Write the model (with LoRA: the adapter) as plain Transformers (or PEFT) loads it; called on every rank."""
        if isinstance(self.model, PeftModel):
            trained = [named for named in self.model.named_parameters() if named[1].requires_grad]
            weights = full_weights(trained, self.rank.is_main)
            if self.rank.is_main:
                self.model.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)
        else:
            save_model(self.model, folder, self.rank.is_main)
        wait_for_everyone()

    def free(self) -> None:
        """Free what the strategy holds beside model and optimizer."""

    # -- for the record

    def parameter_counts(self) -> tuple[int, int]:
        """Return how many parameters of the whole model are trained, and how many multiply."""
        return parameter_counts(self.model)

    def held(self) -> Held:
        """Return the bytes on this rank, between the backward pass and the optimizer's step."""
        weights = byte_count(map(local_part, self.model.parameters()))
        return Held(weights, byte_count(self.gradients()), optimizer_bytes(self.optimizer))

    def held_by_one_device(self) -> Held:
        """Return what one device would hold, with Adam's two states."""
        sizes = [(global_numel(each) * each.element_size(), each.requires_grad) for each in self.model.parameters()]
        of_trained = sum(size for size, is_trained in sizes if is_trained)
        return Held(sum(size for size, _ in sizes), of_trained, 2 * of_trained)

    def check_shard_memory(self, held: Held) -> None:
        """Check that what this rank holds is divided as it was asked for.

        Raises:
            RuntimeError: with both sizes.
        """

    def for_record(self) -> dict[str, object]:
        """Return what was measured in training; called on every rank."""
        return self.usage.for_record() if self.measures_usage else {}


def shard_writer(folder: Path) -> dcp.FileSystemWriter:
    """Return DCP's writer of a checkpoint's shards, which are flushed as they are hashed (`Digests.begin`)."""
    # to copy ahead of the writing it would ask for a stream of the thread's GPU, which is the first on every rank
    return dcp.FileSystemWriter(folder / SHARDS, sync_files=False, per_thread_copy_ahead=0)


class WholeModel(Strategy):
    """Every rank holds the whole model, with mp on several devices, and the Trainer takes the steps."""

    takes_steps = measures_usage = needs_one_disk = False

    def load_model(self, stage_map: StageMap | None = None) -> Model:
        """Return the whole model to train, with mp placed by `stage_map`."""
        is_placed = len(self.rank.devices) > 1
        return whole_model_to_train(self.run, stage_map if is_placed else whole_model_on(self.rank.device))

    @override
    def export(self, folder: Path) -> None:
        if self.rank.is_main:
            self.model.save_pretrained(folder)


# -- what a rank holds and sends

MEASURED_STEP = 2
"""In the first step engines do what they do once, and the optimizer has no states yet."""


class UsageReport(TrainerCallback):
    """Measures what this rank holds and sends in the second step of a run."""

    def __init__(self, strategy: Strategy) -> None:
        """Measure what `strategy` holds and sends."""
        self.strategy, self.sent, self.step = strategy, SentBytes(), 0
        self.held: Held | None = None

    @override
    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.step += 1
        if self.step == MEASURED_STEP:
            self.sent.__enter__()

    @override
    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self.step == MEASURED_STEP:
            self.held = self.strategy.held()
            self.strategy.check_shard_memory(self.held)
            print(f"holds: {self.held}")

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self.step == MEASURED_STEP:
            self.sent.__exit__(None, None, None)

    def for_record(self) -> dict[str, object]:
        """Return what every rank holds, and what this one sends in a step; None where there was no second step."""
        whole, sent = self.strategy.held_by_one_device(), self.sent.bytes_by_collective
        return {
            "held": {"per_rank": gather_object([asdict(self.held)]), "whole": asdict(whole)} if self.held else None,
            "sent": {"bytes": self.sent.sent_bytes, "by_collective": sent} if sent else None,
        }


# -- batches


def on_device(batch: Batch, device: str | torch.device) -> Batch:
    """Return the model's inputs on `device`, without a wait for a GPU: what is not a tensor (or there) stays as it is.

    From pinned memory a copy begins when the GPU comes to it, and the host goes on.
    """
    inputs = {name: value for name, value in batch.items() if name != "row"}
    if torch.device(device).type == "cpu":
        return inputs
    return {name: _sent(value, device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def _sent(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    pinned = tensor.pin_memory() if tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=True)


# -- logits where there is a label


def takes_logits_to_keep(model: torch.nn.Module) -> bool:
    """Return whether the model can be told where to compute logits."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return "logits_to_keep" in signature(base.forward).parameters


def loss_is_chunked(run: RunConfig, model: torch.nn.Module) -> bool:
    """Return whether the loss comes without whole logits."""
    is_told = takes_logits_to_keep(model) or model.config.is_encoder_decoder
    return objective_of(run).needs_losses_alone and is_told and takes_chunks(model.config)


def chunk_loss(run: RunConfig, model: Model) -> bool:
    """Let the model compute its loss in chunks if it can, and return whether it does; with Liger in validation alone.

    A stage of a pipeline does not: its schedule computes the loss (`StageModule.loss`).
    """
    is_chunked = loss_is_chunked(run, model) and not run.parallelism.pipelines
    if is_chunked:
        compute_loss_in_chunks(model, in_training=not run.use_liger_kernel)
    return is_chunked


def tell_of_answers(batch: dict[str, Any], model: Model) -> dict[str, Any]:
    """Return a collated batch with the positions where logits are needed, or an encoder-decoder's `shift_labels`."""
    if takes_logits_to_keep(model):
        return keep_answer_logits(batch)
    if model.config.is_encoder_decoder and takes_chunks(model.config):
        return {**batch, "shift_labels": batch["labels"]}  # a decoder beside an encoder has its inputs shifted
    return batch


def keep_answer_logits(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the batch, told to compute logits only where some row has an answer token to be predicted.

    The loss and its gradients stay the same: other positions have no label. `inputs` holds tensors of shape
    (rows, tokens); position t predicts token t + 1.
    """
    targets = inputs["labels"][:, 1:]
    positions = (targets != IGNORED_LABEL).any(0).nonzero().squeeze(1)
    if not len(positions):  # kernels such as Liger's do not take none
        positions = torch.zeros(1, dtype=torch.long)
    targets = targets[:, positions]
    return {**inputs, "labels": targets, "shift_labels": targets, "logits_to_keep": positions}


# -- models and settings


def whole_model_to_train(run: RunConfig, device_map: dict[str, str | int]) -> Model:
    """Return the base with adapters, or with the weights that the run trains switched on, whole.

    Raises:
        BadInputError: the model lacks layers to train.
    """
    return with_trained_weights(load_base_model(run, device_map), run)


# -- which strategy a run has


def strategy_class(run: RunConfig) -> type[Strategy]:
    """Return the class that the run's parallelism names, or else its task."""
    return resolve_name(run.parallelism.strategy or run.goal.strategy)


def trainer_takes_steps(run: RunConfig) -> bool:
    """Return whether Transformers' Trainer takes the steps of a run's workflow; else a written-out loop does.

    A folder that shards has one loop for all that it does, DDP included.
    """
    shards = run.run_folder and literal_of(REPOSITORY / run.run_folder).is_sharded
    is_written_out = run.loop != "trainer" or strategy_class(run).takes_steps or (run.parallelism.replicates and shards)
    return not is_written_out
