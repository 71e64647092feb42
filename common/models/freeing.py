"""A model's memory given back while others still have names for it."""

import torch
from accelerate.hooks import remove_hook_from_module
from accelerate.utils.memory import clear_device_cache
from torch.distributed.tensor import DTensor

from common.models.quantization import is_quantized


def free_model(model: torch.nn.Module) -> None:
    """Free a model's memory, whoever else still has its weights: an optimizer's groups have, and DDP's wrapper."""
    remove_hook_from_module(model, recurse=True)  # Accelerate's, of a model on several devices: they forbid the move
    for module in model.modules():
        if is_quantized(module):  # such weights cannot be moved to `meta` as others can
            module.weight, module.quant_state = None, None
    held = [*model.parameters(), *model.buffers()]
    for weight in held:
        if isinstance(weight, DTensor):  # FSDP keeps a view of its shard
            storage = weight.to_local().untyped_storage()
            if storage.resizable():
                storage.resize_(0)
    model.to("meta")  # puts other tensors in their place
    for tensor in held:
        tensor.data, tensor.grad = tensor.new_empty(0), None
    clear_device_cache()
