"""Seconds of an optimizer's step alone, on the weights that full fine-tuning trains, without a model around them."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
from bitsandbytes.optim import AdamW8bit

from bench.gpu_trial import TRIALS, Scale
from bench.levers import without_waits_per_weight
from common.hardware.devices import GIB
from common.models.loading import model_without_weights
from common.models.trained_weights import with_trained_weights

STEPS, WARM_UP = 5, 2
FULL = next(trial for trial in TRIALS if trial.technique == "full")
Weights = list[torch.nn.Parameter]


def torchao_adamw(weights: Weights) -> torch.optim.Optimizer:
    """Return torchao's AdamW with states of 8 bits; it compiles one function for all weights of a shape."""
    from torchao.optim import AdamW8bit as TorchaoAdamW8bit  # here: it need not be installed

    return TorchaoAdamW8bit(weights)


WITHOUT_WAITS, TORCHAO = "bitsandbytes, 8 bits, no waits per weight", "torchao, 8 bits"
OPTIMIZERS: dict[str, Callable[[Weights], torch.optim.Optimizer]] = {
    "bitsandbytes, 8 bits": AdamW8bit,
    WITHOUT_WAITS: AdamW8bit,
    "PyTorch, fused, states as the weights": partial(torch.optim.AdamW, fused=True),
    TORCHAO: torchao_adamw,
}


def measure(name: str, scale: Scale) -> dict[str, Any]:
    """Return the median seconds of a step of the optimizer of that name, and the bytes of its states."""
    model = with_trained_weights(model_without_weights(FULL.run(scale)), FULL.run(scale))
    shapes = [(weight.shape, weight.dtype) for weight in model.parameters() if weight.requires_grad]
    weights = [torch.nn.Parameter(torch.randn(shape, device=scale.device, dtype=dtype)) for shape, dtype in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    before = _allocated(scale.device)
    optimizer, times_s = OPTIMIZERS[name](weights), []
    with without_waits_per_weight() if name == WITHOUT_WAITS else nullcontext():
        for _ in range(WARM_UP + STEPS):
            _wait(scale.device)
            start_s = time.perf_counter()
            optimizer.step()
            _wait(scale.device)
            times_s.append(time.perf_counter() - start_s)
    return {
        "model": scale.model,
        "weights": sum(shape.numel() for shape, _ in shapes),
        "step_s": median(times_s[WARM_UP:]),
        "states_gib": (_allocated(scale.device) - before) / GIB,
    }


def _wait(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def _allocated(device: str) -> int:
    return torch.accelerator.memory_allocated() if device != "cpu" else 0
