"""DeepSpeed's ZeRO: its engine divides what is trained, exchanges gradients in the backward pass, and steps."""

import importlib.util
import os
import shutil
import warnings
from contextlib import nullcontext
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.models.divided import load_rows, mesh_of
from common.models.saved_files import save_weights
from common.models.shards import byte_count, gathered, global_numel, local_part, return_freed_memory
from common.models.trained_weights import with_trained_weights
from common.models.weight_files import weights_in_files
from common.runtime.world import Rank
from common.training.answer_logits import Batch, Model
from common.training.ddp import load_replica
from common.training.deepspeed_config import deepspeed_config, with_sizes, zero_stage
from common.training.part import UNSCALED, Part, clip_divided
from common.training.safe_loading import load_zero_state
from common.training.usage import Held, check_part, optimizer_bytes

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

INSTALL = "`make deepspeed` (it runs `DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed`)"


def check_deepspeed() -> None:
    """Refuse to begin without DeepSpeed, or without what it compiles with on a CPU.

    Raises:
        BadInputError: with the command that installs it.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise BadInputError(f"ZeRO is DeepSpeed's, which is not installed: {INSTALL}, or take FSDP (run_0_cpu_x2).")
    if os.environ.get("DS_ACCELERATOR") == "cpu" and shutil.which("c++") is None:
        raise BadInputError(
            "DeepSpeed compiles an operator when it first runs on a CPU, but there is no C++ compiler (c++): install "
            "g++, or take FSDP (run_0_cpu_x2)."
        )


def load_for_zero(run: RunConfig, rank: Rank) -> Model:
    """Return the model to train on this rank's device, with stage 3 its part; called on every rank.

    Each rank reads rows of every weight, and the adapters are put on these, since DeepSpeed's own parts have no shape;
    then weights are made whole one after the other and handed to DeepSpeed. (Transformers' loader for stage 3 has every
    rank hold the whole model on its host.)
    """
    # its names for collectives are older than PyTorch's: it says so at every call
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    if zero_stage(run) < 3:
        return load_replica(run, rank)
    mesh = mesh_of(rank, run)
    model = with_trained_weights(load_rows(run, rank, mesh, run.offload == "cpu"), run)
    hand_over(model, _config(run, model), mesh)
    return model.to(rank.device)  # buffers


def zero_engine(model: Model, optimizer: torch.optim.Optimizer, run: RunConfig) -> "DeepSpeedEngine":
    """Hand model and optimizer to DeepSpeed's engine, which divides what the stage says."""
    import deepspeed  # here: runs without ZeRO need none

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_config(run, model))
    return engine


def _config(run: RunConfig, model: Model) -> dict[str, Any]:
    return with_sizes(deepspeed_config(run), model.config.hidden_size)


class ZeroPart(Part):
    """A part of the optimizer's states (stage 1), also of gradients (2), also of weights (3); the engine steps."""

    autocasts = False

    def __init__(self, module: "DeepSpeedEngine", run: RunConfig, rank: Rank) -> None:
        """`module` comes from `zero_engine`."""
        super().__init__(module, run, rank)
        self.engine = self.called = module

    @classmethod
    def check(cls, run: RunConfig) -> None:
        """Check that DeepSpeed can be used.

        Raises:
            BadInputError: with the command that installs it.
        """
        check_deepspeed()

    @override
    def back_propagate(self, batch: Batch, label_count: int) -> None:
        self.engine.backward(self.loss(batch, label_count), scale_wrt_gas=False)

    @override
    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's parts, which DeepSpeed keeps in its optimizer, and what it has not divided."""
        parts_of_groups = self.engine.optimizer.averaged_gradients.values()
        return [part for parts in parts_of_groups if parts for part in parts] + super().gradients()

    @override
    def kept_buffers(self) -> list[torch.Tensor]:
        """Return what DeepSpeed's optimizer has: its fp32 copy of the weights, and what it collects gradients in."""
        attributes = {
            name: value for name, value in vars(self.engine.optimizer).items() if name != "averaged_gradients"
        }
        leaves = tree_leaves(attributes)
        of_objects = tree_leaves([vars(leaf) for leaf in leaves if is_dataclass(leaf)])
        tensors = [leaf for leaf in (*leaves, *of_objects) if isinstance(leaf, torch.Tensor)]
        return [tensor for tensor in tensors if not tensor.is_meta]

    @override
    def forget_gradients(self) -> None:
        super().forget_gradients()
        self.engine.optimizer.averaged_gradients.clear()

    @override
    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Return the norm of the whole model's gradients; DeepSpeed clips in its step."""
        own = self.gradients()
        return clip_divided(own, own, [], 0, self.rank.device)

    @override
    def step(self, scaler: torch.amp.GradScaler = UNSCALED) -> None:
        """Have DeepSpeed clip, step, and hand the new weights round; it scales no losses here."""
        self.engine.step()

    @override
    def state(self, is_full: bool) -> dict[str, Any]:
        """Return nothing: DeepSpeed writes by itself."""
        return {"is_full": is_full}

    @override
    def write(self, folder: Path, state: dict[str, Any], group: dist.ProcessGroup | None = None) -> list[Path]:
        """Write DeepSpeed's own checkpoint, each rank its part; of best weights what is trained, from rank 0."""
        if not state["is_full"]:  # DeepSpeed's checkpoints have the optimizer in any case
            return save_weights(dict(self._trained_weights()), folder, self.rank.is_main)
        self.engine.save_checkpoint(str(folder), tag="zero", exclude_frozen_parameters=self.run.method.has_adapters)
        return list((folder / "zero").glob(f"*zero_pp_rank_{self.rank.rank}_mp_rank_*"))

    @override
    def load(self, folder: Path, is_full: bool) -> None:
        stored = weights_in_files(folder)
        if not stored:  # a full state
            self.engine.checkpoint_engine.load = load_zero_state  # its own would run what a file says
            self.engine.load_checkpoint(str(folder), tag="zero", load_module_strict=not self.run.method.has_adapters)
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
        self.engine.destroy()
        for tensor in (*self.kept_buffers(), *parts):
            tensor.data = tensor.new_empty(0)
        self.engine = self.module = self.called = None

    @override
    def held(self) -> Held:
        """Return the bytes on this rank, those of DeepSpeed's copies among the optimizer's."""
        zero = self.engine.optimizer
        is_stage_3 = zero_stage(self.run) == 3
        copies = zero.fp32_partitioned_groups_flat if is_stage_3 else zero.single_partition_of_fp32_groups
        return Held(
            byte_count(map(local_part, self.model.parameters())),
            byte_count(self.gradients()),
            optimizer_bytes(zero.optimizer) + byte_count(copies),
        )

    @override
    def held_by_one_device(self) -> Held:
        """Return what one device would hold: states and copy in fp32 where weights are bf16, to train as well."""
        whole = super().held_by_one_device()
        return whole if self.run.precision == "fp32" else replace(whole, optimizer_bytes=3 * 4 * self._trained())

    def _trained(self) -> int:
        return sum(global_numel(weight) for _, weight in self._trained_weights())

    @override
    def check_shard_memory(self, held: Held) -> None:
        """Check that optimizer states are divided from stage 1 on, and weights in stage 3.

        Raises:
            RuntimeError: with both sizes.
        """
        states = optimizer_bytes(self.engine.optimizer.optimizer)
        if states:  # SGD has none
            part = 2 * self._trained() * 4 / self.rank.world_size
            check_part("optimizer states", states, (part, part))
        if zero_stage(self.run) == 3:
            part = self.held_by_one_device().weights_bytes / self.rank.world_size
            check_part("weights", held.weights_bytes, (part, part))


# -- dividing


def hand_over(model: Model, config: dict[str, Any], mesh: DeviceMesh) -> None:
    """Divide rows of weights as DeepSpeed's stage 3 does, in place, with one weight whole at a time; on every rank.

    `mesh` is where a weight is gathered. With bf16 all weights become bf16, as DeepSpeed wants them.
    """
    import deepspeed

    first: torch.nn.Parameter | None = None
    for weight in list(model.parameters()):
        whole = _whole(weight, mesh).to(mesh.device_type, torch.bfloat16 if config["bf16"]["enabled"] else None)
        torch.utils.swap_tensors(weight, torch.nn.Parameter(whole, requires_grad=weight.requires_grad))
        del whole
        if first is None:
            deepspeed.zero.Init(module=torch.nn.ParameterList([weight]), config_dict_or_path=config)
            first = weight
        else:  # as it does with adapters itself: to read the settings again takes longer
            first.convert_to_zero_parameters(param_list=[weight])
        return_freed_memory()


def _whole(weight: torch.nn.Parameter, mesh: DeviceMesh) -> torch.Tensor:
    rows = weight.detach()
    if isinstance(rows, DTensor):  # from_local moves them to the mesh's devices
        about = {"run_check": False, "shape": rows.shape, "stride": rows.stride()}
        rows = DTensor.from_local(rows.to_local(), mesh, rows.placements, **about)
    return gathered(rows)
