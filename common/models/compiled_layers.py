"""Layers compiled one by one, in place: `torch.compile` fuses what stands between their matrix products.

What is compiled for the first layer serves the others, and weights keep their names. (torch.compile around the model,
as TrainingArguments' `torch_compile` has it, compiles every layer again, and puts `_orig_mod` before each name.)
"""

import os
import shutil

import torch
from transformers import GradientCheckpointingLayer

from common.base.errors import BadInputError
from common.base.run_config import RunConfig


def check_compiler(run: RunConfig) -> None:
    """Check that there is a C++ compiler, where a run on a CPU compiles its layers."""
    compiler = os.environ.get("CXX", "g++")
    if run.torch_compile and run.device == "cpu" and shutil.which(compiler) is None:
        raise BadInputError(
            f"torch_compile is True, but there is no C++ compiler ({compiler}): install g++, or leave it out."
        )


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers that Transformers would checkpoint, in the order of the forward pass."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def compile_layers(model: torch.nn.Module, backend: str = "inductor") -> None:
    """Compile each layer in place, for batches of any shape; the code is made when a layer is first called.

    Within DDP Dynamo would split a layer wherever a bucket of its gradients is full; other layers' backward passes are
    enough for the bucket to be sent during one.
    """
    torch._dynamo.config.optimize_ddp = False
    for layer in layers_of(model):
        layer.compile(dynamic=True, backend=backend)


def as_written(model: torch.nn.Module) -> None:
    """Undo `compile_layers`: answers grow by a token at a time, and each length might be compiled anew."""
    for layer in layers_of(model):
        layer._compiled_call_impl = None
