"""What a rank holds of the model that is trained: all of it, or its part (by parallelism: `PARALLELISMS`)."""

import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.utils import gather_object, wait_for_everyone
from peft import PeftModel
from torch.distributed.checkpoint import state_dict as dcp_states
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm
from transformers import TrainerCallback
from transformers.integrations.liger import apply_liger_kernel
from typing_extensions import override

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import literal_of
from common.data.rows import IGNORED_LABEL, Tokens
from common.models.chunked_loss import compute_loss_in_chunks
from common.models.compiled_layers import compile_layers
from common.models.known_padding import padding_known
from common.models.merging import next_token_logits
from common.models.saved_files import save_model
from common.models.separate_rows import EXCHANGED_HEADS, separate_rows, without_mask
from common.models.shards import byte_count, full_weights, global_numel, local_part
from common.models.tiled_mlp import tile_mlps
from common.models.trained_weights import parameter_counts
from common.runtime.world import Rank
from common.tasks.objectives import objective_of
from common.training.answer_logits import (
    Batch,
    loss_is_chunked,
    on_device,
    own_tokens,
    takes_logits_to_keep,
    tell_of_answers,
)
from common.training.safe_loading import SafeReader
from common.training.usage import Held, SentBytes, state_tensors

SHARDS = "shards"  # folder of a checkpoint with weights and optimizer, as torch.distributed.checkpoint writes them
# of what every rank has whole, one writes all
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
WHAT_IS_TRAINED = dcp_states.StateDictOptions(strict=False)  # what is frozen is not in a checkpoint
UNSCALED = torch.amp.GradScaler("cpu", enabled=False)


class Part:
    """All of the model, on this rank: on one device, on several one after the other (mp), or a replica (DDP).

    Attributes:
        module: What is called in training: the model, or what stands around it.
        called: What is called beside training: the model without DDP, whose hooks wait for other ranks.
        is_whole: Whether every rank has all, so that one of each disk writes a checkpoint. Else each writes its part.
        optimizer_name: Of its states in a checkpoint; stages of a pipeline have one each.
        autocasts: Whether products are in bf16 by autocast; DeepSpeed converts weights itself, as FSDP may.
    """

    autocasts = True
    optimizer_name = "optimizer"
    optimizer: torch.optim.Optimizer

    def __init__(self, module: torch.nn.Module, run: RunConfig, rank: Rank) -> None:
        self.run, self.rank, self.objective = run, rank, objective_of(run)
        self.is_whole = not (run.parallelism.divides_tensors or run.parallelism.pipelines)
        self.module, self.model = module, getattr(module, "module", module)
        self.called = self.model
        self._buckets: list[torch.Tensor] = []
        self.usage = UsageReport(self) if rank.world_size > 1 and _compares_shares(run) else None
        # the model computes as the run asks: by which kernels, the loss in chunks, layers a second time
        if run.use_liger_kernel:
            apply_liger_kernel(self.model, None)
        self.takes_logits_to_keep = takes_logits_to_keep(self.model)
        if self.objective.prepare:
            self.objective.prepare(self.model, run)
        # in a pipeline the schedule computes the loss (`Pipeline.loss`)
        self.takes_chunks = loss_is_chunked(run, self.model) and not run.parallelism.pipelines
        if self.takes_chunks:
            compute_loss_in_chunks(self.model, in_training=not run.use_liger_kernel)  # Liger has its own
        if run.sp_size > 1:
            if self.model.config._attn_implementation != EXCHANGED_HEADS:
                raise RuntimeError("Ranks share rows (sp_size), but attention sees this rank's tokens alone.")
        elif run.is_padding_free and run.attention == "sdpa":
            separate_rows(self.model)
        if run.tiled_mlp:
            tile_mlps(self.model)
        if run.torch_compile:
            compile_layers(self.model)
        if run.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": run.use_reentrant})
        self.offloading: AbstractContextManager = nullcontext()
        if run.activation_offloading:
            from trl.models.activation_offloading import get_act_offloading_ctx_manager  # here: it takes a while

            self.offloading = get_act_offloading_ctx_manager(self.model)
        self.model.train()

    @classmethod
    def check(cls, run: RunConfig) -> None:
        """Check, before anything is loaded, what this kind of part needs; a BadInputError says what is missing."""

    def loss(self, batch: Batch, label_count: int) -> torch.Tensor:
        """Return the sum of a batch's losses over `label_count`, the labels of the step's batches on all ranks."""
        inputs = on_device(batch, self.rank.device)
        with padding_known(batch), self.offloading, self.autocast():
            if self.objective.loss_of_model:
                return self.objective.loss_of_model(self.run, self.model, self.module, inputs) / label_count
            if self.objective.loss is None or self.takes_chunks:
                return self.module(**inputs, num_items_in_batch=label_count, use_cache=False).loss
            labels = inputs.pop("labels")
            return self.objective.loss(self.module(**inputs), labels, label_count)

    def forget_validation(self) -> None:
        """Forget what a validation before the first step has left in an engine; most leave nothing."""

    def back_propagate(self, batch: Batch, label_count: int) -> None:
        """Compute a batch's gradients outside of training, to count the memory."""
        self.loss(batch, label_count).backward()

    def autocast(self) -> torch.autocast:
        """Return a context in which matrix products are in 16 bits, if the run asks for it."""
        dtype = torch.float16 if self.run.precision == "fp16-mixed" else torch.bfloat16
        enabled = self.autocasts and self.run.precision != "fp32"
        return torch.autocast(torch.device(self.rank.device).type, dtype, enabled=enabled)

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients as far as this rank holds them."""
        return [local_part(weight.grad) for weight in self.model.parameters() if weight.grad is not None]

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Return the norm of the whole model's gradients, and scale them down to `max_norm`; 0 = they stay."""
        return clip_grad_norm_(self.model.parameters(), max_norm or math.inf)

    def step(self, scaler: torch.amp.GradScaler = UNSCALED) -> None:
        """Take the optimizer's step; a `scaler` of fp16 losses skips one whose gradients overflowed."""
        scaler.step(self.optimizer)
        scaler.update()

    def forget_gradients(self) -> None:
        """Forget the gradients of a step, taken or not."""
        self.optimizer.zero_grad()

    def kept_buffers(self) -> list[torch.Tensor]:
        """Return what this rank keeps between steps beside weights and optimizer states, such as DDP's buckets.

        Called after a backward pass, before its gradients, which are views of the buckets, are forgotten.
        """
        if isinstance(self.module, DistributedDataParallel):
            self._buckets = self.gradients() or self._buckets
        return self._buckets

    def inputs_for_loss(self, batch: Batch) -> Batch:
        """Return a collated batch, still on the CPU, told where to compute logits if the model can be told."""
        if self.objective.loss_of_model:
            return batch
        if "cu_seq_lens_q" in batch and self.run.attention == "sdpa":
            batch = without_mask(batch)
        if self.run.sp_size > 1 and "cu_seq_lens_q" in batch:
            return own_tokens(batch, self.rank.rank % self.run.sp_size, self.run.sp_size)
        batch = tell_of_answers(batch, self.model)
        if self.takes_logits_to_keep and len(self.rank.devices) > 1 and not self.takes_chunks:
            batch["logits_to_keep"] = batch["logits_to_keep"].tolist()  # the head's device may be another
        return batch

    def fill(self, rows: list[Tokens]) -> list[Tokens]:
        """Return the rows of a batch, filled up to as many as it must have."""
        return rows

    def own_rows(self, of_ranks: list[Any]) -> list[Any]:
        """Return, of what each rank did, that of the ranks with rows of their own; others must have done the same."""
        sharing = len(of_ranks) // self.run.data_parallel_ranks
        own = of_ranks[::sharing]
        if [each for each in own for _ in range(sharing)] != of_ranks:
            raise RuntimeError(f"With {self.run.sharing} {sharing} ranks work on the same rows, but they did not.")
        return own

    @torch.no_grad()
    def sums(self, batch: Batch) -> torch.Tensor:
        """Return the sums of a validation batch's results (`Objective.results`), as far as this rank knows them."""
        self.model.eval()
        with self.autocast():
            results = self.results(on_device(batch, self.rank.device))
        self.model.train()
        return results.sum(0)

    def results(self, batch: Batch) -> torch.Tensor:
        """Return what each row counts for (`Objective.results`), shape (rows, k), with logits of answers alone."""
        if self.objective.results_of_model:
            return self.objective.results_of_model(self.run, self.model, self.model, batch)
        if self.takes_chunks:
            losses = self.called(**batch).token_losses
            answers = (batch["shift_labels"] != IGNORED_LABEL).sum(1)
            return torch.stack([losses.sum(1), answers.to(losses.device)], dim=1)
        given = {name: tensor for name, tensor in batch.items() if name not in ("labels", "shift_labels")}
        without_cache = {"use_cache": False} if self.takes_logits_to_keep else {}
        logits, labels = self.called(**given, **without_cache).logits, batch["labels"]
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
        """Return a batch's logits, fp32, shape (rows, tokens, vocabulary); None on ranks that do not know them."""
        return next_token_logits(self.called, batch)

    def state(self, is_full: bool) -> dict[str, Any]:
        """Return this rank's part of the trained weights, and of a full state also of the optimizer."""
        trained = {name for name, weight in self.model.named_parameters() if weight.requires_grad}
        weights = dcp_states.get_model_state_dict(self.model).items()
        parts = {"model": {name: weight for name, weight in weights if name in trained}}
        if is_full:
            # not flattened: bitsandbytes' states are then not found again
            parts[self.optimizer_name] = dcp_states.get_optimizer_state_dict(self.model, self.optimizer)
        return parts

    def write(self, folder: Path, state: dict[str, Any], group: dist.ProcessGroup | None = None) -> list[Path]:
        """Write what `state` returned, and return this rank's files; called on every rank."""
        # to copy ahead of the writing it would ask for a stream of the thread's GPU, which is the first on every rank
        writer = dcp.FileSystemWriter(folder / SHARDS, sync_files=False, per_thread_copy_ahead=0)
        dcp.save(state, storage_writer=writer, process_group=group, no_dist=self.is_whole)
        return list((folder / SHARDS).glob(f"__{0 if self.is_whole else self.rank.rank}_*"))

    def load(self, folder: Path, is_full: bool) -> None:
        """Take back weights, and optimizer, also from a checkpoint of another number of ranks."""
        parts = self.state(is_full)
        dcp.load(parts, storage_reader=SafeReader(str(folder / SHARDS)), no_dist=self.is_whole)
        dcp_states.set_model_state_dict(self.model, parts["model"], options=WHAT_IS_TRAINED)
        if is_full:
            states = parts[self.optimizer_name]
            dcp_states.set_optimizer_state_dict(self.model, self.optimizer, states, options=WHAT_IS_TRAINED)

    def export(self, folder: Path) -> None:
        """Write the model (with LoRA: the adapter) as plain Transformers (or PEFT) loads it; called on every rank."""
        if self.is_whole:
            if self.rank.is_main:
                self.model.save_pretrained(folder)
        elif isinstance(self.model, PeftModel):
            trained = [named for named in self.model.named_parameters() if named[1].requires_grad]
            weights = full_weights(trained, self.rank.is_main)
            if self.rank.is_main:
                self.model.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)
        else:
            save_model(self.model, folder, self.rank.is_main)
        wait_for_everyone()

    def free(self) -> None:
        """Free what is held beside model and optimizer, such as DDP's buckets, which are as large as all gradients."""
        self.module, self._buckets = self.model, []

    def parameter_counts(self) -> tuple[int, int]:
        """Return how many parameters of the whole model are trained, and how many multiply."""
        return parameter_counts(self.model)

    def held(self) -> Held:
        """Return the bytes on this rank, between the backward pass and the optimizer's step."""
        weights = byte_count(map(local_part, self.model.parameters()))
        return Held(weights, byte_count(self.gradients()), byte_count(state_tensors(self.optimizer)))

    def held_by_one_device(self) -> Held:
        """Return what one device would hold, with two states of each trained weight, as Adam has."""
        sizes = [(global_numel(each) * each.element_size(), each.requires_grad) for each in self.model.parameters()]
        of_trained = sum(size for size, is_trained in sizes if is_trained)
        return Held(sum(size for size, _ in sizes), of_trained, 2 * of_trained)

    def check_shard_memory(self, held: Held) -> None:
        """Check that what this rank holds is divided as it was asked for; a RuntimeError says both sizes."""

    def for_record(self) -> dict[str, object]:
        """Return what was measured in training; called on every rank."""
        return self.usage.for_record() if self.usage else {}


def clip_divided(
    gradients: list[torch.Tensor],
    divided: list[torch.Tensor],
    whole: list[torch.Tensor],
    max_norm: float,
    device: str | torch.device,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the norm of a model whose gradients are `divided` among a group's ranks, but for some that all have.

    This rank's `gradients` are scaled down to `max_norm`; 0 = they stay. Called on every rank of `group`.
    """
    # on this rank's own device: offloaded gradients, or none, are on the host, where NCCL sums nothing
    squares = get_total_norm(divided).to(device).float() ** 2
    dist.all_reduce(squares, group=group)
    norm = (squares + get_total_norm(whole) ** 2 if whole else squares).sqrt()
    if max_norm and gradients:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1)
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm


def _compares_shares(run: RunConfig) -> bool:
    # what ranks hold and send is looked at where they divide a model, or do so beside it (2.6)
    literal = literal_of(REPOSITORY / run.run_folder) if run.run_folder else run
    sharing = run.parallelism
    return literal.sp_size > 1 or sharing.divides_tensors or bool(sharing.replicates and literal.parallelism.shards)


def part_class(run: RunConfig) -> type[Part]:
    """Return the class of what a rank of the run holds."""
    return resolve_name(run.parallelism.part)


MEASURED_STEP = 2  # in the first one engines do what they do once, and the optimizer has no states yet


class UsageReport(TrainerCallback):
    """Measures what this rank holds and sends in the second step of a run."""

    def __init__(self, part: Part) -> None:
        self.part, self.sent, self.step = part, SentBytes(), 0
        self.held: Held | None = None

    @override
    def on_step_begin(self, *_: object, **__: object) -> None:
        self.step += 1
        if self.step == MEASURED_STEP:
            self.sent.__enter__()

    @override
    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        if self.step == MEASURED_STEP:
            self.held = self.part.held()
            self.part.check_shard_memory(self.held)
            print(f"holds: {self.held}")

    @override
    def on_step_end(self, *_: object, **__: object) -> None:
        if self.step == MEASURED_STEP:
            self.sent.__exit__(None, None, None)

    def for_record(self) -> dict[str, object]:
        """Return what every rank holds, and what this one sends in a step; nothing where there was no second step."""
        if not self.held:
            return {}
        whole = self.part.held_by_one_device()
        return {
            "held": {"per_rank": gather_object([asdict(self.held)]), "whole": asdict(whole)},
            "sent": {"bytes": self.sent.sent_bytes, "by_collective": self.sent.bytes_by_collective},
        }
