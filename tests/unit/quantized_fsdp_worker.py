"""QLoRA under FSDP on two CPU ranks, beside the same step on one: test_quantization starts it with torchrun.

Rank 0 prints a line of JSON.
"""

import json

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from common.base.run_config import RunConfig
from common.models.loading import load_base_model
from common.models.quantization import quantization_config
from common.models.trained_weights import add_lora

RUN = RunConfig(technique="qlora", parallel="fsdp", devices=2, lora_dropout=0.0)


def adapted() -> torch.nn.Module:
    """The model, with adapters that add something."""
    torch.manual_seed(0)
    model = add_lora(load_base_model(RUN, {"": "cpu"}), RUN).train()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    return model


def step(model: torch.nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss, and the whole gradients."""
    ids = torch.arange(10, 40).view(2, 15)
    loss = model(ids, labels=ids).loss
    loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return loss.item(), {n: each.full_tensor() if isinstance(each, DTensor) else each for n, each in found.items()}


def main() -> None:
    """One step on one rank's own model, one on the divided model."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loss, gradients = step(adapted())
    divided = adapted()
    layers = divided.base_model.model.model.layers
    for layer in layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(divided, mesh=init_device_mesh("cpu", (2,)))
    divided_loss, divided_gradients = step(divided)
    projection = layers[0].self_attn.q_proj.base_layer
    said = {
        "losses": [loss, divided_loss],
        "adapters": [len(gradients), len(divided_gradients)],
        "largest_difference": max((gradients[name] - divided_gradients[name]).abs().max().item() for name in gradients),
        "stored_dtype": str(quantization_config(RUN).bnb_4bit_quant_storage),
        "elements": [projection.weight.numel(), projection.weight.to_local().numel()],
        "scales_on_this_rank": projection.quant_state.absmax.numel(),
    }
    if dist.get_rank() == 0:
        print(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
