"""DeepSpeed's ZeRO: its engine makes the step; the loop and the reports are those of the other strategies."""

import importlib.util
import os
import shutil
import warnings
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.cpp_extension import get_default_build_root

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.models.divided import load_rows, mesh_of
from common.models.loading import next_token_logits
from common.models.saved_files import save_weights
from common.models.shards import byte_count, gathered, global_numel, local_part, return_freed_memory
from common.models.stages import StageMap
from common.models.trained_weights import with_trained_weights
from common.models.weight_files import weights_in_files
from common.training.deepspeed_config import deepspeed_config, with_sizes, zero_stage
from common.training.digests import begin_hashing
from common.training.safe_loading import load_zero_state
from common.training.strategy import Batch, Model, Strategy
from common.training.usage import Held, check_share, optimizer_bytes

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
    """Return whether DeepSpeed's operator for CPUs was compiled on this machine before."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return any(root.glob(f"**/{COMPILED}/*.so"))


class Zero(Strategy):
    """Every rank holds its part of the optimizer's states (stage 1), also of gradients (2), also of weights (3)."""

    saves_in_background = autocasts = False

    @classmethod
    def check(cls, run: RunConfig) -> None:
        """Check that DeepSpeed can be used.

        Raises:
            BadInputError: with the command that installs it.
        """
        check_deepspeed()

    def load_model(self, stage_map: StageMap | None = None) -> Model:
        """Return the model on this rank's device, with stage 3 its part.

        Each rank reads rows of every weight, and the adapters are put on these, since DeepSpeed's own parts have no
        shape; then weights are made whole one after the other and handed to DeepSpeed. (Transformers' loader for
        stage 3 has every rank hold the whole model on its host.)
        """
        if self.run.device == "cpu" and self.rank.is_main and not is_compiled():
            print(f"DeepSpeed compiles {COMPILED} now, once on this machine: about a minute ...")
        # its names for collectives are older than PyTorch's: it says so at every call
        warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
        if zero_stage(self.run) < 3:
            return super().load_model(stage_map)
        mesh, offloads = mesh_of(self.rank, self.run), self.run.offload == "cpu"
        model = with_trained_weights(load_rows(self.run, self.rank, mesh, offloads), self.run)
        hand_over(model, self._config(model), mesh)
        return model.to(self.rank.device)  # buffers

    def group_weights(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave empty groups out: DeepSpeed drops them, and the schedule would count others than there are."""
        optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]

    def prepare(self, optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> torch.optim.Optimizer:
        """Hand model and optimizer to DeepSpeed's engine."""
        import deepspeed  # here: runs without ZeRO need none

        self.engine, *_ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=self._config(self.model))
        return super().prepare(optimizer, accelerator)

    def _config(self, model: Model) -> dict[str, Any]:
        return with_sizes(deepspeed_config(self.run), model.config.hidden_size)

    def forward(self, **inputs: Any) -> Any:
        """Return the output of the engine, which gathers what stage 3 has divided."""
        return self.engine(**inputs)

    def backward(self, batch: Batch, num_items_in_batch: int, is_last: bool) -> torch.Tensor:
        """Add the gradients, which are summed over the ranks after the last batch of a step."""
        self.engine.set_gradient_accumulation_boundary(is_last)
        loss = self.loss(batch, num_items_in_batch)
        # DeepSpeed takes the mean over ranks, but each loss is a part of the sum
        self.engine.backward(loss * self.rank.world_size, scale_wrt_gas=False)
        return loss.detach()

    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's parts, which DeepSpeed keeps in its optimizer, and what it has not divided."""
        parts_of_groups = self.engine.optimizer.averaged_gradients.values()
        return [part for parts in parts_of_groups if parts for part in parts] + super().gradients()

    def kept_buffers(self) -> list[torch.Tensor]:
        """Return what DeepSpeed's optimizer has: its fp32 copy of the weights, and what it collects gradients in."""
        attributes = {
            name: value for name, value in vars(self.engine.optimizer).items() if name != "averaged_gradients"
        }
        leaves = tree_leaves(attributes)
        of_objects = tree_leaves([vars(leaf) for leaf in leaves if is_dataclass(leaf)])
        tensors = [leaf for leaf in (*leaves, *of_objects) if isinstance(leaf, torch.Tensor)]
        return [tensor for tensor in tensors if not tensor.is_meta]

    def forget_gradients(self) -> None:
        """Forget this rank's parts of the gradients, too."""
        super().forget_gradients()
        self.engine.optimizer.averaged_gradients.clear()

    def finish_gradients(self) -> None:
        """Leave the gradients to DeepSpeed, which clips them in its step."""

    def update(self) -> None:
        """Have DeepSpeed clip, step, and hand the new weights round."""
        self.engine.step()

    def logits(self, batch: Batch) -> torch.Tensor:
        """Return this rank's logits by the engine, see `Strategy.logits`."""
        return next_token_logits(self.engine, batch)

    def save(self, folder: Path) -> None:
        """Write DeepSpeed's own checkpoint: each rank its part; with adapters of them alone."""
        self.engine.save_checkpoint(str(folder), tag="zero", exclude_frozen_parameters=self.run.method.has_adapters)
        begin_hashing((folder / "zero").glob(f"*zero_pp_rank_{self.rank.rank}_mp_rank_*"))

    def save_weights(self, folder: Path) -> None:
        """Write what is trained from rank 0, file by file: DeepSpeed's checkpoints have the optimizer in any case."""
        begin_hashing(save_weights(dict(self._trained_weights()), folder, self.rank.is_main))

    def load(self, folder: Path) -> None:
        """Take back this rank's part."""
        self.engine.checkpoint_engine.load = load_zero_state  # its own would run what a file says
        self.engine.load_checkpoint(str(folder), tag="zero", load_module_strict=not self.run.method.has_adapters)

    def load_weights(self, folder: Path) -> None:
        """Take back the weights, which the engine does not train any further; each rank its part."""
        stored = weights_in_files(folder)
        if not stored:  # a full state
            self.load(folder)
            return
        import deepspeed  # `deepspeed.zero` is an attribute, and no module

        for name, weight in self._trained_weights():
            is_divided = hasattr(weight, "ds_tensor")
            whole = deepspeed.zero.GatheredParameters([weight], modifier_rank=0) if is_divided else nullcontext()
            with safe_open(stored[name].file, framework="pt") as file, whole, torch.no_grad():
                weight.copy_(file.get_tensor(name))

    def _trained_weights(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [named for named in self.model.named_parameters() if named[1].requires_grad]

    def free(self) -> None:
        """Free the engine, its fp32 copies, and this rank's parts of the weights, whoever else still has them."""
        parts = [weight.ds_tensor for weight in self.model.parameters() if hasattr(weight, "ds_tensor")]
        self.forget_gradients()
        self.engine.destroy()
        for tensor in (*self.kept_buffers(), *parts):
            tensor.data = tensor.new_empty(0)
        self.engine = None

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

    def held_by_one_device(self) -> Held:
        """Return what one device would hold: states and copy in fp32 where weights are bf16, to train as well."""
        whole = super().held_by_one_device()
        return whole if self.run.precision == "fp32" else replace(whole, optimizer_bytes=3 * 4 * self._trained())

    def _trained(self) -> int:
        return sum(global_numel(weight) for _, weight in self._trained_weights())

    def check_shard_memory(self, held: Held) -> None:
        """Check that optimizer states are divided from stage 1 on, and weights in stage 3.

        Raises:
            RuntimeError: with both sizes.
        """
        states = optimizer_bytes(self.engine.optimizer.optimizer)
        if states:  # SGD has none
            check_share("optimizer states", states, 2 * self._trained() * 4, self.rank.world_size)
        if zero_stage(self.run) == 3:
            check_share("weights", held.weights_bytes, self.held_by_one_device().weights_bytes, self.rank.world_size)


# -- dividing


def hand_over(model: Model, config: dict[str, Any], mesh: DeviceMesh) -> None:
    """Divide rows of weights as DeepSpeed's stage 3 does, in place, with one weight whole at a time; on every rank.

    `mesh` is where a weight is gathered. With bf16 all weights become bf16, as DeepSpeed wants them.
    """
    import deepspeed

    partitioned: torch.nn.Parameter | None = None
    for places in _places_of_weights(model):
        weight = _whole_weight(places, mesh, torch.bfloat16 if config["bf16"]["enabled"] else None)
        for module, name in places:
            module._parameters[name] = weight
        if partitioned is None:
            deepspeed.zero.Init(module=torch.nn.ParameterList([weight]), config_dict_or_path=config)
            partitioned = weight
        else:  # as it does with adapters itself: to read the settings again takes longer
            partitioned.convert_to_zero_parameters(param_list=[weight])
        return_freed_memory()


def _places_of_weights(model: torch.nn.Module) -> list[list[tuple[torch.nn.Module, str]]]:
    """Return of each weight the modules that have it, several where it is tied, and its names there."""
    places: dict[torch.Tensor, list[tuple[torch.nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            places[weight].append((module, name))
    return list(places.values())


def _whole_weight(
    places: list[tuple[torch.nn.Module, str]], mesh: DeviceMesh, dtype: torch.dtype | None
) -> torch.nn.Parameter:
    module, name = places[0]
    weight = module._parameters[name]
    rows = weight.detach()
    if isinstance(rows, DTensor):  # from_local moves them to the mesh's devices
        about = {"run_check": False, "shape": rows.shape, "stride": rows.stride()}
        rows = DTensor.from_local(rows.to_local(), mesh, rows.placements, **about)
    return torch.nn.Parameter(gathered(rows).to(mesh.device_type, dtype), requires_grad=weight.requires_grad)
