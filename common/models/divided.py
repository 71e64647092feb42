"""Models of which each rank has its part from the start, as DTensors: no rank ever has, or reads, the whole of one."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from common.base.run_config import RunConfig
from common.models.loading import load_base_model
from common.models.shards import is_quantized
from common.runtime.rank import exchange_timeout
from common.runtime.world import BACKENDS, Rank

# by a weight's name, the dimension along which it is divided; None where every rank has it whole
Along = Callable[[str], int | None]


def divide(mesh: DeviceMesh, along: Along, name: str, module: nn.Module) -> None:
    """Replace a module's own weights by this rank's parts of them, which have memory of their own."""
    for own, weight in list(module.named_parameters(recurse=False)):
        dimension = along(f"{name}.{own}" if name else own)
        if dimension is not None and not isinstance(weight, DTensor):  # a tied one was divided where it is read
            plain = weight.detach().as_subclass(torch.Tensor)
            part = distribute_tensor(plain, mesh, [Shard(dimension)], src_data_rank=None)  # nothing is sent
            part = nn.Parameter(part, requires_grad=weight.requires_grad)
            part.__dict__.update(weight.__dict__)  # of 4 bits: how they were quantized
            setattr(module, own, part)


def load_divided(run: RunConfig, device: str, mesh: DeviceMesh, along: Along) -> PreTrainedModel:
    """Load this rank's part of the run's base on `device`, of the kind of `mesh`: from files its slices alone."""

    def divide_all(model: PreTrainedModel) -> None:
        for name, module in model.named_modules():
            divide(mesh, along, name, module)

    unread = None if run.method.quantizes else divide_all
    model = load_base_model(run, {"": device}, each=partial(divide, mesh, along), unread=unread)
    for weight in model.parameters():  # out of the mapped file: whoever copies a slice of it copies its whole weight
        if isinstance(weight, DTensor) and weight._local_tensor.untyped_storage().nbytes() > weight.to_local().nbytes:
            weight._local_tensor = weight._local_tensor.clone()
    return model


# -- rows of every weight, as FSDP and ZeRO-3 divide them


def mesh_of(rank: Rank, run: RunConfig) -> DeviceMesh:
    """Return the devices of all ranks in a row, or with several copies in as many rows; called on every rank."""
    kind, copies = torch.device(rank.device).type, run.dp_replicate_size
    if copies == 1:
        return init_device_mesh(kind, (rank.world_size,), mesh_dim_names=("shard",))
    ranks, timeout = torch.arange(rank.world_size).view(copies, -1), exchange_timeout(run)
    # made here, as those that a mesh makes itself have PyTorch's time-out
    groups = [dist.new_subgroups_by_enumeration(each.tolist(), timeout=timeout)[0] for each in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def load_rows(run: RunConfig, rank: Rank, mesh: DeviceMesh) -> PreTrainedModel:
    """Load rows of every weight of the run's base, divided among this rank's row of `mesh`; called on every rank."""
    device = "cpu" if run.offload == "cpu" else rank.device
    # without names: PEFT takes parts on any mesh with other names than its own for tensor parallel's
    if run.offload == "cpu":
        rows = torch.arange(rank.world_size).view(run.dp_replicate_size, -1).tolist()
        group, _ = dist.new_subgroups_by_enumeration(rows, backend=BACKENDS["cpu"], timeout=exchange_timeout(run))
        own_row = DeviceMesh.from_group(group, "cpu")
    else:
        own_row = DeviceMesh.from_group(mesh["shard"].get_group(), mesh.device_type)
    model = load_divided(run, device, own_row, lambda _: 0)
    for module in model.modules():
        if is_quantized(module):  # what such numbers are computed with does not wait on the host
            module.quant_state.to(rank.device)
    return model
