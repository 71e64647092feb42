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


OPTIMIZERS: dict[str, Callable[[Weights], torch.optim.Optimizer]] = {
    "bitsandbytes, 8 bits": AdamW8bit,
    "bitsandbytes, 8 bits, no waits per weight": AdamW8bit,
    "PyTorch, fused, states as the weights": partial(torch.optim.AdamW, fused=True),
    "torchao, 8 bits": torchao_adamw,
}


def measure(scale: Scale) -> dict[str, Any]:
    """Return each optimizer's median seconds of a step and the bytes of its states, or why it was not measured."""
    model = with_trained_weights(model_without_weights(FULL.run(scale)), FULL.run(scale))
    shapes = [(weight.shape, weight.dtype) for weight in model.parameters() if weight.requires_grad]
    found = {}
    for name, make in OPTIMIZERS.items():
        try:
            found[name] = _step_s(name, make, shapes, scale.device)
        except (ImportError, NotImplementedError, RuntimeError) as error:  # what is not installed, or has no kernel
            found[name] = {"not_run": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    return {"model": scale.model, "weights": sum(shape.numel() for shape, _ in shapes), "optimizers": found}


def _step_s(name: str, make: Callable, shapes: list[tuple[torch.Size, torch.dtype]], device: str) -> dict[str, Any]:
    weights = [torch.nn.Parameter(torch.randn(shape, device=device, dtype=dtype)) for shape, dtype in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    before = _allocated(device)
    optimizer, times_s = make(weights), []
    with without_waits_per_weight() if "no waits" in name else nullcontext():
        for _ in range(WARM_UP + STEPS):
            _wait(device)
            start_s = time.perf_counter()
            optimizer.step()
            _wait(device)
            times_s.append(time.perf_counter() - start_s)
    return {"step_s": median(times_s[WARM_UP:]), "states_gib": (_allocated(device) - before) / GIB}


def _wait(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def _allocated(device: str) -> int:
    return torch.accelerator.memory_allocated() if device != "cpu" else 0
