"""Training with DeepSpeed's ZeRO: its engine makes the step, the loop and the reports are those of the others."""

import importlib.util
import os
import shutil
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import get_default_build_root

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.models.shards import byte_count, global_numel, local_part
from common.runtime.world import Rank
from common.training.deepspeed_config import deepspeed_config, with_sizes, zero_stage
from common.training.fsdp import ShardMemory, check_share, optimizer_bytes, whole_of
from common.training.loop_training import Batch
from common.training.sharded_training import ShardedTrainer

COMPILED = "deepspeed_shm_comm"
"""DeepSpeed's operator for talking between CPU processes, which it compiles when it is first used."""
INSTALL = "`make deepspeed` (it runs `DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed`)"


def check_deepspeed() -> None:
    """Refuse to begin without DeepSpeed, or without what it compiles with on a CPU.

    Raises:
        BadInputError: with the command that installs it.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise BadInputError(f"ZeRO is DeepSpeed's, which is not installed: {INSTALL}, or take FSDP (run_0_cpu_x2).")
    if os.environ.get("DS_ACCELERATOR") == "cpu" and not is_compiled() and shutil.which("c++") is None:
        raise BadInputError(
            "DeepSpeed compiles an operator when it first runs on a CPU, but there is no C++ compiler (c++): install "
            "g++, or take FSDP (run_0_cpu_x2)."
        )


def is_compiled() -> bool:
    """Whether DeepSpeed's operator for CPUs was compiled on this machine before."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return any(root.glob(f"**/{COMPILED}/*.so"))


class ZeroTrainer(ShardedTrainer):
    """The trainer of one rank; DeepSpeed divides its `model` when training begins."""

    def __init__(self, *, run: RunConfig, rank: Rank, **kwargs: Any) -> None:
        """`run` says the stage."""
        super().__init__(rank=rank, **kwargs)
        self.run, self.stage = run, zero_stage(run)
        self.engine: Any = None

    def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
        """Without empty groups: DeepSpeed drops them, and the schedule would count others than there are."""
        optimizer = super().create_optimizer(*args)
        optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    def start_step_maker(self) -> None:
        """DeepSpeed's engine takes model and optimizer."""
        import deepspeed  # here: runs without ZeRO need none

        if self.run.device == "cpu" and self.rank.is_main and not is_compiled():
            print(f"DeepSpeed compiles {COMPILED} now, once on this machine: about a minute ...")
        # its names for collectives are older than PyTorch's: it says so at every call
        warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
        config = with_sizes(deepspeed_config(self.run), self.model.config.hidden_size)
        self.engine, *_ = deepspeed.initialize(model=self.model, optimizer=self.optimizer, config=config)

    def forward(self, **inputs: Any) -> Any:
        """Through the engine, which gathers what stage 3 has divided."""
        return self.engine(**inputs)

    def add_gradients(self, batch: Batch, labelled: int, is_last: bool) -> torch.Tensor:
        """Forward and backward; gradients are summed after the last batch of a step."""
        self.engine.set_gradient_accumulation_boundary(is_last)
        loss = self.loss_of(batch, labelled)
        # DeepSpeed takes the mean over ranks, but each loss is a part of the sum
        self.engine.backward(loss * self.rank.world_size, scale_wrt_gas=False)
        return loss.detach()

    def update(self) -> None:
        """DeepSpeed clips, steps, and hands the new weights round."""
        self.engine.step()

    def held_now(self) -> ShardMemory:
        """See `ShardedTrainer`."""
        zero = self.engine.optimizer
        divided = [part for parts in zero.averaged_gradients.values() if parts for part in parts]
        whole = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        copies = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        return ShardMemory(
            byte_count(map(local_part, self.model.parameters())),
            byte_count(divided) + byte_count(whole),
            optimizer_bytes(zero.optimizer) + byte_count(copies),
        )

    def whole_held(self) -> ShardMemory:
        """With states and copy in fp32 where weights are bf16, as a device that trains as well would have them."""
        whole = whole_of(self.model)
        if self.run.precision == "fp32":
            return whole
        trained = sum(global_numel(weight) for weight in self.model.parameters() if weight.requires_grad)
        return replace(whole, optimizer_bytes=3 * 4 * trained)

    def check_held(self, held: ShardMemory) -> None:
        """Optimizer states are divided from stage 1 on, weights in stage 3."""
        world_size, weights = self.rank.world_size, list(self.model.parameters())
        of_trained = sum(global_numel(weight) for weight in weights if weight.requires_grad)
        states = optimizer_bytes(self.engine.optimizer.optimizer)
        if states:  # SGD has none
            check_share("optimizer states", states, 2 * of_trained * 4, world_size)
        if self.stage == 3:
            whole = sum(global_numel(weight) * weight.element_size() for weight in weights)
            check_share("weights", held.weights_bytes, whole, world_size)

    def give_up(self) -> None:
        """The engine goes, too: it has the fp32 copies."""
        self.engine.destroy()
        self.engine = None
        super().give_up()

    def gather(self, weight: torch.Tensor) -> torch.Tensor:
        """Stage 3 has divided it."""
        import deepspeed

        with deepspeed.zero.GatheredParameters([weight]) if self.stage == 3 else nullcontext():
            return weight.detach().clone()

    def save_weights(self, folder: Path) -> None:
        """DeepSpeed's own checkpoint: each rank its part."""
        self.engine.save_checkpoint(str(folder), tag="zero", exclude_frozen_parameters=False)

    def load_weights(self, folder: Path) -> None:
        """This rank's part."""
        self.engine.load_checkpoint(str(folder), tag="zero")
