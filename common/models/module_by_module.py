"""Models made or read module by module: a rank keeps its part of each, or nothing, before the next one comes."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel, modeling_utils

from common.models.quantization import forked_random_numbers, quantize_as
from common.models.shards import return_freed_memory

# takes the name of a module and the module as soon as it has all weights of its own, and may replace these
EachModule = Callable[[str, nn.Module], None]


def draw_weights(model: PreTrainedModel, seed: int, device: str | torch.device, each: EachModule | None = None) -> None:
    """Give a model on `meta` the random weights of `seed`, module by module, as its class starts them.

    They are the same ones for a kind of device, quantized or not, whatever `each` does. Tied weights are drawn once.
    """
    with forked_random_numbers(device):
        torch.manual_seed(seed)
        owners: dict[str, PreTrainedModel] = {}  # of each module the innermost model around it, whose class starts it
        for name, module in list(model.named_modules()):
            around = owners.get(name.rpartition(".")[0], model)
            owners[name] = module if isinstance(module, PreTrainedModel) else around
            drawn = [
                own
                for own, weight in module.named_parameters(recurse=False)
                if weight.is_meta and f"{name}.{own}".removeprefix(".") not in model.all_tied_weights_keys
            ]
            if drawn:
                _draw(module, drawn, owners[name], device)
                if each:
                    each(name, module)
                    return_freed_memory()
    model.tie_weights()
    for module in model.modules():
        own = {name: buffer.to(device) for name, buffer in module._buffers.items() if buffer is not None}
        module._buffers.update(own)


@torch.no_grad()
def _draw(module: nn.Module, drawn: list[str], owner: PreTrainedModel, device: str | torch.device) -> None:
    planned = dict(module.named_parameters(recurse=False))
    for own in drawn:
        empty = torch.empty(planned[own].shape, dtype=planned[own].dtype, device=device)
        setattr(module, own, nn.Parameter(empty, requires_grad=planned[own].requires_grad))
    owner._init_weights(module)
    for own in drawn:
        setattr(module, own, quantize_as(planned[own], getattr(module, own), device))


def ending_with(kind: type[PreTrainedModel], then: Callable[[PreTrainedModel], None]) -> type[PreTrainedModel]:
    """Return a class whose `from_pretrained` loads a model of `kind`, and calls `then` with it before it is read."""

    class Ending(kind):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            self.__class__ = kind
            then(self)

    Ending.__name__, Ending.__module__ = kind.__name__, kind.__module__
    return Ending


@contextmanager
def each_as_it_is_read(kind: type[PreTrainedModel], each: EachModule) -> Iterator[type[PreTrainedModel]]:
    """Have `each` called for modules that the yielded subclass of `kind` reads; those that no file has come last."""
    models: list[PreTrainedModel] = []
    names: dict[nn.Module, str] = {}
    told: dict[int, nn.Parameter] = {}

    def tell(module: nn.Module) -> None:
        each(names[module], module)
        return_freed_memory()
        for weight in module.parameters(recurse=False):
            weight._is_hf_initialized = True  # else the library would start it anew
            told[id(weight)] = weight

    def at_registration(module: nn.Module, own: str, weight: nn.Parameter) -> nn.Parameter:
        if not _is_read(weight) or id(weight) in told:  # the latter is tied
            return weight
        if not names:  # by now quantizing has put other modules in the place of some
            names.update({module: name for name, module in models[0].named_modules()})
        module._parameters[own] = weight
        if all(map(_is_read, module.parameters(recurse=False))):
            tell(module)
        return module._parameters[own]

    hook = register_module_parameter_registration_hook(at_registration)
    # threads would read ahead; and the allocator would be warmed up with all of the model's bytes on a GPU
    without_warmup = patch.object(modeling_utils, "caching_allocator_warmup", lambda *_: None)
    try:
        with patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}), without_warmup:
            yield ending_with(kind, models.append)
    finally:
        hook.remove()
    for module in names:
        if any(id(weight) not in told for weight in module.parameters(recurse=False)):
            tell(module)


def _is_read(weight: nn.Parameter) -> bool:
    return getattr(weight, "_is_hf_initialized", False)
