"""Training with FSDP2, and for comparison with DDP: each rank has its own rows, and its part of all that is held."""

from abc import abstractmethod
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.utils import wait_for_everyone
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base.run_config import RunConfig
from common.models.loading import check_equal_logits, load_base_model, weight_dtype
from common.models.quantization import dequantized
from common.models.shards import byte_count, full_weights, gathered, global_numel, local_part
from common.planning.device_maps import whole_model_on
from common.runtime.rank import accelerate_shards
from common.runtime.recorder import RunLog
from common.runtime.world import Rank
from common.training.export import give_up
from common.training.fsdp import ShardMemory, check_fully_sharded, check_share, held_by_ranks, optimizer_bytes, whole_of
from common.training.loop_training import Batch, LoopTrainer
from common.training.safe_loading import SafePlanner, SafeReader
from common.training.traffic import TrafficReport
from common.training.trainer import with_head_on_answers

SHARDS = "shards"
"""Folder of a checkpoint with every rank's part, as torch.distributed.checkpoint writes it."""


class ShardedTrainer(LoopTrainer):
    """What FSDP and ZeRO have in common: rows of each rank's own, and a look at what each rank holds."""

    def __init__(self, *, rank: Rank, **kwargs: Any) -> None:
        """`rank`: this process's place; the rest goes to the trainer of one device."""
        super().__init__(rank=rank, **kwargs)
        self.held: ShardMemory | None = None
        self.traffic = TrafficReport(rank.world_size)
        self.add_callback(self.traffic)

    def loss_of(self, batch: Batch, labelled: int) -> torch.Tensor:
        """The sum of this rank's losses over the step's `labelled` tokens."""
        inputs = self._to_device(batch)
        if self.keeps_logits:
            inputs = with_head_on_answers(inputs)
        return self.forward(**inputs, num_items_in_batch=labelled, use_cache=False).loss

    def forward(self, **inputs: Any) -> Any:
        """The model's output."""
        return self.model(**inputs)

    def sums_of(self, batch: Batch) -> torch.Tensor:
        """Of this rank's validation rows."""
        self.model.eval()
        results = self.results_of(self.forward, self._to_device(batch))
        self.model.train()
        return results.sum(0)

    @torch.no_grad()
    def logits(self, batch: Batch) -> torch.Tensor:
        """Logits of this rank's batch, shape (rows, tokens, vocabulary), with dropout off; called on every rank."""
        self.model.eval()
        inputs = self._to_device(batch)
        made = self.forward(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False
        ).logits
        self.model.train()
        return made

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Shards are where they belong already."""

    def give_up(self) -> None:
        """Free the shards and the optimizer, also where a notebook still has names for them."""
        give_up(self, self.rank.device)

    def _to_device(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.rank.device) for name, tensor in batch.items() if name != "row"}

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """The ranks' losses are parts of one mean or sum."""
        total = value.detach().clone()
        dist.all_reduce(total)
        return total

    # -- what each rank holds

    def held_now(self) -> ShardMemory:
        """Bytes on this rank, between the backward pass and the optimizer's step."""
        weights = list(self.model.parameters())
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        return ShardMemory(
            byte_count(map(local_part, weights)),
            byte_count(map(local_part, gradients)),
            optimizer_bytes(self.optimizer),
        )

    @abstractmethod
    def check_held(self, held: ShardMemory) -> None:
        """Refuse what is not divided as asked.

        Raises:
            RuntimeError: with both sizes.
        """

    def complete_gradients(self) -> None:
        """In this run's second step, when the optimizer has its states, look at what this rank holds."""
        if self.state.global_step == self.first_step + 1:
            self.held = self.held_now()
            self.check_held(self.held)
            print(f"holds: {self.held}")

    def whole_held(self) -> ShardMemory:
        """What one device would hold."""
        return whole_of(self.model)

    def sharding_figures(self) -> dict[str, object]:
        """For the record: what each rank holds, beside what one device would, and what it sends in a step."""
        held = held_by_ranks(self.held, self.whole_held()) if self.held else None
        return {"held": held, **self.traffic.figures()}

    # -- one model of all parts

    def whole_weights(self, trained_only: bool = False) -> dict[str, torch.Tensor]:
        """Every weight (or every trained one) whole, on the host of rank 0; called on every rank."""
        named = [
            (name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad or not trained_only
        ]
        return full_weights(named, self.rank.is_main, self.gather)

    @abstractmethod
    def gather(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight made whole; called on every rank."""

    # -- checkpoints

    def save_weights(self, folder: Path) -> None:
        """Every rank writes its shards of weights and optimizer; nothing is gathered."""
        weights, optimizer = get_state_dict(self.model, self._plain_optimizer())
        dcp.save({"model": weights, "optimizer": optimizer}, checkpoint_id=str(folder / SHARDS))

    def load_weights(self, folder: Path) -> None:
        """This rank's shards, also from a checkpoint of another number of ranks."""
        weights, optimizer = get_state_dict(self.model, self._plain_optimizer())
        parts = {"model": weights, "optimizer": optimizer}
        dcp.load(parts, storage_reader=SafeReader(str(folder / SHARDS)), planner=SafePlanner())
        set_state_dict(
            self.model,
            self._plain_optimizer(),
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
        )

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        """PyTorch's own, without Accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


class FsdpTrainer(ShardedTrainer):
    """The trainer of one rank; its `model` comes from `common.training.fsdp.shard`."""

    def __init__(self, *, policy: MixedPrecisionPolicy, **kwargs: Any) -> None:
        """`policy`: the formats of gathered weights and summed gradients, also where Accelerate divides the model."""
        super().__init__(**kwargs)
        self.policy = policy

    def start_step_maker(self) -> None:
        """Nothing may be whole; where Accelerate was launched with an FSDP file, it divides the model only now."""
        if accelerate_shards():
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = self.policy  # its own sums gradients in bf16
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        check_fully_sharded(self.model, self.rank.world_size)

    def add_gradients(self, batch: Batch, labelled: int, is_last: bool) -> torch.Tensor:
        """Forward and backward; gradients are summed and divided among the ranks after the last batch of a step."""
        self.model.set_requires_gradient_sync(is_last)
        loss = self.loss_of(batch, labelled)
        (loss * self.rank.world_size).backward()  # FSDP takes the mean over ranks, but each loss is a part of the sum
        return loss.detach()

    def complete_gradients(self) -> None:
        """Clip by the norm of all ranks' gradients."""
        super().complete_gradients()
        if not self.args.max_grad_norm:
            return
        gradients = [local_part(weight.grad) for weight in self.model.parameters() if weight.grad is not None]
        # by hand, and summed on the rank's own device: offloaded gradients are on the host, where NCCL sums nothing
        squares = get_total_norm(gradients).to(self.rank.device).float() ** 2
        dist.all_reduce(squares)
        factor = (self.args.max_grad_norm / (squares.sqrt() + 1e-6)).clamp(max=1)
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))

    def check_held(self, held: ShardMemory) -> None:
        """All three are divided."""
        weights = list(self.model.parameters())
        trained = [weight for weight in weights if weight.requires_grad]
        of_trained = sum(global_numel(weight) * weight.element_size() for weight in trained)
        check_share("weights", held.weights_bytes, byte_count(weights), self.rank.world_size)
        check_share("gradients", held.gradients_bytes, of_trained, self.rank.world_size)

    def gather(self, weight: torch.Tensor) -> torch.Tensor:
        """From all ranks' shards."""
        return gathered(weight)


class DdpTrainer(ShardedTrainer):
    """For comparison: the same loop with PyTorch's DDP, where every rank holds everything."""

    def start_step_maker(self) -> None:
        """DDP sums the gradients of `model`."""
        own_gpu = None if self.rank.device == "cpu" else [self.rank.device]
        self.replica = DistributedDataParallel(self.model, device_ids=own_gpu, gradient_as_bucket_view=True)

    def give_up(self) -> None:
        """DDP's module goes, too: it has buckets as large as all gradients."""
        self.replica = None
        super().give_up()

    def forward(self, **inputs: Any) -> Any:
        """In training through DDP, whose hooks sum the gradients."""
        return (self.replica if self.model.training else self.model)(**inputs)

    def add_gradients(self, batch: Batch, labelled: int, is_last: bool) -> torch.Tensor:
        """Forward and backward; gradients are summed after the last batch of a step."""
        with nullcontext() if is_last else self.replica.no_sync():
            loss = self.loss_of(batch, labelled)
            (loss * self.rank.world_size).backward()  # DDP takes the mean over ranks
        return loss.detach()

    def complete_gradients(self) -> None:
        """Clip; every rank has the whole gradients."""
        super().complete_gradients()
        if self.args.max_grad_norm:
            clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)

    def check_held(self, held: ShardMemory) -> None:
        """All is whole."""
        check_share("weights", held.weights_bytes, byte_count(self.model.parameters()), 1)

    def gather(self, weight: torch.Tensor) -> torch.Tensor:
        """It is whole."""
        return weight


# -- the shards as one model


def as_computed(run: RunConfig) -> RunConfig:
    """The run with weights in the format of its matrix products: what whole models answer questions in.

    The fp32 weights of mixed precision are for the optimizer; two whole models of them would not fit beside each other
    where the shards do.
    """
    return replace(run, precision=run.compute_dtype)


def save_whole_and_reload(
    log: RunLog, trainer: ShardedTrainer, tokenizer: PreTrainedTokenizerBase
) -> tuple[PreTrainedModel, dict[str, float]]:
    """Gather the ranks' parts into one model (with LoRA adapter and merged model), load it as any user would, compare.

    Rank 0 writes; every rank loads the whole model on its device. The trainer's own is given up on the way.

    Returns:
        The model as plain Transformers loads it, and the largest absolute differences of logits from the sharded one.

    Raises:
        RuntimeError: what was saved is not what was trained.
    """
    run, rank, model = log.run, log.rank, trainer.model
    batch = trainer.collated(list(trainer.eval_dataset)[: run.per_device_eval_batch_size])
    expected = trainer.logits(batch).float()
    is_lora, device_map = isinstance(model, PeftModel), whole_model_on(rank.device)
    folder = log.folder / ("adapter" if is_lora else "model")
    save_whole(trainer, folder)
    trainer.give_up()
    differences: dict[str, float] = {}
    if is_lora:
        if rank.is_main:
            adapted = PeftModel.from_pretrained(load_base_model(as_computed(run), device_map), folder)
            differences["adapter"] = check_equal_logits(expected, adapted, batch, "adapter", run.precision)
            if run.method.quantizes:  # 4 bits have no room for an adapter's sum
                base = dequantized(load_base_model(as_computed(run), device_map), weight_dtype(as_computed(run)))
                adapted = PeftModel.from_pretrained(base, folder)
            adapted.merge_and_unload().save_pretrained(log.folder / "merged")
            del adapted
        folder = log.folder / "merged"
    if rank.is_main:
        tokenizer.save_pretrained(folder)
    wait_for_everyone()
    tuned = load_base_model(as_computed(run), device_map, source=folder)
    differences[folder.name] = check_equal_logits(expected, tuned, batch, f"{folder.name} model", run.precision)
    return tuned, differences


def save_whole(trainer: ShardedTrainer, folder: Path) -> None:
    """Write the model (with LoRA: the adapter) as plain Transformers (or PEFT) loads it; called on every rank."""
    model = trainer.model
    weights = trainer.whole_weights(trained_only=isinstance(model, PeftModel))
    if trainer.rank.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(model, PeftModel):
            adapter = get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
            save_file(adapter, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
            model.peft_config["default"].save_pretrained(folder)
        else:
            model.save_pretrained(folder, state_dict=weights)
    wait_for_everyone()
