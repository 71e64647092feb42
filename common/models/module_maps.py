"""Device maps by a model's own modules, without the closed form: Accelerate's, and one with equally many layers."""

from collections.abc import Sequence

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory
from transformers import PreTrainedModel

from common.base.errors import BadInputError
from common.base.loggers import silent
from common.base.run_config import RunConfig
from common.hardware.devices import GIB, Gpu
from common.models.loading import model_without_weights
from common.models.stages import StageMap


def auto_map(run: RunConfig, gpus: Sequence[Gpu]) -> StageMap:
    """Return what Accelerate chooses for `device_map="auto"` on empty GPUs: it looks at the weights alone."""
    model = model_without_weights(run)
    rooms = {number: int(gpu.memory_gib * GIB) for number, gpu in enumerate(gpus)}
    about = {"no_split_module_classes": list(model._no_split_modules), "dtype": model.dtype}
    with silent("accelerate"):  # it warns of GPUs that this machine may lack
        chosen = infer_auto_device_map(model, get_balanced_memory(model, rooms, **about), **about)
    return {name: int(device) for name, device in chosen.items()}


def even_map(model: PreTrainedModel, stages: int) -> StageMap:
    """Return a map with equally many layers on each stage; where they do not divide, the first ones have one more.

    Layers are the modules that Transformers says not to split. Embeddings come before them, what else has weights
    after them; a head that is tied to the embeddings is where these are, as one tensor cannot be on two devices.

    Raises:
        BadInputError: there are more stages than layers.
    """
    layers = layer_names(model)
    if len(layers) < stages:
        raise BadInputError(
            f"This {model.config.model_type} has {len(layers)} layers, too few for {stages} stages: take at most "
            f"{len(layers)} devices (--devices or --stages)."
        )
    stage_map = {name: number * stages // len(layers) for number, name in enumerate(layers)}
    head, is_tied = model.get_output_embeddings(), bool(model.all_tied_weights_keys)
    inside = tuple(f"{name}." for name in layers)
    for name, module in model.named_modules():
        if name in stage_map or name.startswith(inside):
            continue
        if any(True for _ in module.parameters(recurse=False)):
            comes_first = isinstance(module, torch.nn.Embedding) or (is_tied and module is head)
            stage_map[name] = 0 if comes_first else stages - 1
        elif any(True for _ in module.buffers(recurse=False)):  # rotary frequencies, which every layer reads
            stage_map[name] = 0
    return stage_map


def layer_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the model's layers, in their order."""
    kinds = set(model._no_split_modules or ())
    return [name for name, module in model.named_modules() if type(module).__name__ in kinds]
