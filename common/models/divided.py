"""Models of which each rank has its part from the start, as DTensors: no rank ever has, or reads, the whole of one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from common.base.run_config import RunConfig
from common.models.loading import any_shape_config, load_base_model, load_pretrained, model_class
from common.models.module_by_module import ending_with, weights_of


@dataclass(frozen=True)
class Division:
    """How weights are divided among ranks.

    Attributes:
        mesh: The ranks, in a row; its device type is where their parts are to be.
        along: The dimension along which a weight of this name is divided; None where every rank has it whole.
    """

    mesh: DeviceMesh
    along: Callable[[str], int | None]

    def divide(self, name: str, module: nn.Module) -> None:
        """Replace a module's own weights by this rank's parts of them, which have memory of their own."""
        for own, weight in weights_of(module).items():
            dimension = self.along(f"{name}.{own}" if name else own)
            if dimension is not None and not isinstance(weight, DTensor):  # a tied one was divided where it is read
                part = nn.Parameter(self._part_of(weight, Shard(dimension)), requires_grad=weight.requires_grad)
                part.__dict__.update(weight.__dict__)  # of 4 bits: how they were quantized
                setattr(module, own, part)

    def _part_of(self, weight: nn.Parameter, placement: Shard) -> DTensor:
        with torch.device("cpu"):  # the library makes tensors on `meta` while it makes a model
            sizes, offsets = compute_local_shape_and_global_offset(weight.shape, self.mesh, [placement])
        rows = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        local = weight.detach().as_subclass(torch.Tensor)[rows].clone(memory_format=torch.contiguous_format)
        about = {"run_check": False, "shape": weight.shape, "stride": weight.stride()}
        return DTensor.from_local(local, self.mesh, [placement], **about)


def load_divided(run: RunConfig, device: str, division: Division) -> PreTrainedModel:
    """Load the run's base, of which this rank gets its part, on `device`, where the mesh of `division` is.

    Of files it reads its slices alone. Random weights, and those that are quantized, are whole module by module.

    Raises:
        BadInputError: as `load_base_model`.
    """
    if run.weights == "random" or run.method.quantizes:
        return load_base_model(run, {"": device}, each=division.divide)
    kind = model_class(run, any_shape_config(run.model, run.model_revision))

    def divide_all(model: PreTrainedModel) -> None:
        for name, module in model.named_modules():
            division.divide(name, module)

    model = load_pretrained(ending_with(kind, divide_all), run, {"": device})
    model.__class__ = kind
    _own_memory(model)
    return model


def _own_memory(model: PreTrainedModel) -> None:
    """Copy parts out of the mapped files that they are slices of: whoever copies such a one copies its whole weight."""
    for weight in model.parameters():
        if (
            isinstance(weight, DTensor)
            and weight._local_tensor.untyped_storage().nbytes() > weight._local_tensor.nbytes
        ):
            weight._local_tensor = weight._local_tensor.clone()
