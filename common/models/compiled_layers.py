"""Layers compiled in place, once for all of them.

torch.compile around the model (TrainingArguments' way) compiles each anew, and puts `_orig_mod` before its names.
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
        raise BadInputError(f"torch_compile is True, but no C++ compiler ({compiler}) is here: install g++.")


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers that Transformers would checkpoint, in the order of the forward pass."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def compile_layers(model: torch.nn.Module, backend: str = "inductor") -> None:
    """Compile each layer in place, for batches of any shape; the code is made when a layer is first called."""
    torch._dynamo.config.optimize_ddp = False  # else DDP's layers are split wherever a bucket of gradients is full
    for layer in layers_of(model):
        layer.compile(dynamic=True, backend=backend)


def as_written(model: torch.nn.Module) -> None:
    """Undo `compile_layers`: answers grow by a token at a time, and each length might be compiled anew."""
    for layer in layers_of(model):
        layer._compiled_call_impl = None
