"""DeepSpeed's ZeRO: its engine divides what is trained, exchanges gradients in the backward pass, and steps."""

import importlib.util
import os
import shutil
from contextlib import nullcontext
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.models.saved_files import save_weights
from common.models.shards import byte_count, global_numel, local_part
from common.models.weight_files import weights_in_files
from common.runtime.world import Rank
from common.training.answer_logits import Batch
from common.training.deepspeed_config import zero_stage
from common.training.part import UNSCALED, Part, clip_divided
from common.training.safe_loading import load_zero_state
from common.training.usage import Held, check_part, state_tensors

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def check_deepspeed() -> None:
    """Refuse to begin without DeepSpeed, or without what it compiles with on a CPU."""
    if importlib.util.find_spec("deepspeed") is None:
        raise BadInputError(
            "ZeRO is DeepSpeed's, which is not installed: `make deepspeed` (it runs `DS_BUILD_OPS=0 pip install "
            "--no-build-isolation deepspeed`), or take FSDP (run_0_cpu_x2)."
        )
    if os.environ.get("DS_ACCELERATOR") == "cpu" and shutil.which("c++") is None:
        raise BadInputError(
            "DeepSpeed compiles an operator when it first runs on a CPU, but there is no C++ compiler (c++): install "
            "g++, or take FSDP (run_0_cpu_x2)."
        )


class ZeroPart(Part):
    """A part of the optimizer's states (stage 1), also of gradients (2), also of weights (3); the engine steps."""

    autocasts = False
    module: "DeepSpeedEngine"

    def __init__(self, module: "DeepSpeedEngine", run: RunConfig, rank: Rank) -> None:
        super().__init__(module, run, rank)
        self.called = module

    @classmethod
    @override
    def check(cls, run: RunConfig) -> None:
        check_deepspeed()

    @override
    def forget_validation(self) -> None:
        """Drop the order of layers that stage 3 has recorded, which has no backward pass: it would gather more."""
        if zero_stage(self.run) == 3:
            self.module.optimizer.parameter_offload.get_param_coordinator()._invalidate_trace()

    @override
    def back_propagate(self, batch: Batch, label_count: int) -> None:
        self.module.backward(self.loss(batch, label_count), scale_wrt_gas=False)

    @override
    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's parts, which DeepSpeed keeps in its optimizer, and what it has not divided."""
        parts_of_groups = self.module.optimizer.averaged_gradients.values()
        return [part for parts in parts_of_groups if parts for part in parts] + super().gradients()

    @override
    def kept_buffers(self) -> list[torch.Tensor]:
        """Return what DeepSpeed's optimizer has: its fp32 copy of the weights, and what it collects gradients in."""
        leaves = tree_leaves({**vars(self.module.optimizer), "averaged_gradients": None})
        of_objects = tree_leaves([vars(leaf) for leaf in leaves if is_dataclass(leaf)])
        return [leaf for leaf in (*leaves, *of_objects) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]

    @override
    def forget_gradients(self) -> None:
        super().forget_gradients()
        self.module.optimizer.averaged_gradients.clear()

    @override
    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        own = self.gradients()
        return clip_divided(own, own, [], 0, self.rank.device)  # DeepSpeed clips in its step

    @override
    def step(self, scaler: torch.amp.GradScaler = UNSCALED) -> None:
        self.module.step()  # it clips, steps, and hands the new weights round; it scales no losses here

    @override
    def state(self, is_full: bool) -> dict[str, Any]:
        return {"is_full": is_full}  # DeepSpeed writes by itself

    @override
    def write(self, folder: Path, state: dict[str, Any], group: dist.ProcessGroup | None = None) -> list[Path]:
        """Write DeepSpeed's own checkpoint, each rank its part; of best weights what is trained, from rank 0."""
        if not state["is_full"]:  # DeepSpeed's checkpoints have the optimizer in any case
            return save_weights(dict(self._trained_weights()), folder, self.rank.is_main)
        self.module.save_checkpoint(str(folder), tag="zero", exclude_frozen_parameters=self.run.method.has_adapters)
        return list((folder / "zero").glob(f"*zero_pp_rank_{self.rank.rank}_mp_rank_*"))

    @override
    def load(self, folder: Path, is_full: bool) -> None:
        stored = weights_in_files(folder)
        if not stored:  # a full state
            self.module.checkpoint_engine.load = load_zero_state  # its own would run what a file says
            self.module.load_checkpoint(str(folder), tag="zero", load_module_strict=not self.run.method.has_adapters)
            return
        import deepspeed  # `deepspeed.zero` is an attribute, and no module

        for name, weight in self._trained_weights():
            is_divided = hasattr(weight, "ds_tensor")
            whole = deepspeed.zero.GatheredParameters([weight], modifier_rank=0) if is_divided else nullcontext()
            with safe_open(stored[name].file, framework="pt") as file, whole, torch.no_grad():
                weight.copy_(file.get_tensor(name))

    def _trained_weights(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [named for named in self.model.named_parameters() if named[1].requires_grad]

    @override
    def free(self) -> None:
        """Free the engine, its fp32 copies, and this rank's parts of the weights, whoever else still has them."""
        parts = [weight.ds_tensor for weight in self.model.parameters() if hasattr(weight, "ds_tensor")]
        self.forget_gradients()
        self.module.destroy()
        for tensor in (*self.kept_buffers(), *parts):
            tensor.data = tensor.new_empty(0)
        self.module = self.called = None

    @override
    def held(self) -> Held:
        zero = self.module.optimizer
        is_stage_3 = zero_stage(self.run) == 3
        copies = zero.fp32_partitioned_groups_flat if is_stage_3 else zero.single_partition_of_fp32_groups
        return Held(
            byte_count(map(local_part, self.model.parameters())),
            byte_count(self.gradients()),
            byte_count([*state_tensors(zero.optimizer), *copies]),
        )

    @override
    def held_by_one_device(self) -> Held:
        whole = super().held_by_one_device()
        return whole if self.run.precision == "fp32" else replace(whole, optimizer_bytes=3 * 4 * self._trained())

    def _trained(self) -> int:
        return sum(global_numel(weight) for _, weight in self._trained_weights())

    @override
    def check_shard_memory(self, held: Held) -> None:
        if states := byte_count(state_tensors(self.module.optimizer.optimizer)):  # SGD has none
            part = 2 * self._trained() * 4 / self.rank.world_size
            check_part("optimizer states", states, (part, part))
        if zero_stage(self.run) == 3:
            part = self.held_by_one_device().weights_bytes / self.rank.world_size
            check_part("weights", held.weights_bytes, (part, part))
