"""Starts of ranks: in a test, what they have found; on a rank, what is compared and how it is told."""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, wait_for_everyone

from common.base.paths import REPOSITORY
from common.models.shards import gathered
from common.runtime.launchers import torchrun_command
from common.runtime.rank import end_rank
from tests.forked import run_forked

FOUND = "found.json"


def run_ranks(script: str, ranks: int, folder: Path, *arguments: str) -> None:
    """Run a script that is beside this one to its end; its first argument is `folder`."""
    own = (str(Path(__file__).with_name(script)), str(folder), *arguments)
    command = [sys.executable, *own] if ranks == 1 else torchrun_command(own[0], ranks, *own[1:])
    environment, log = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}, folder / "log.txt"
    exit_code = run_forked(command, folder, environment, log, timeout=300)
    assert exit_code == 0, log.read_text(errors="replace")


def found_by_ranks(script: str, ranks: int, folder: Path, *arguments: str) -> dict[str, list]:
    """Run a script that ends with `tell`; return each figure of its ranks."""
    run_ranks(script, ranks, folder, *arguments)
    of_ranks = json.loads((folder / FOUND).read_text())
    return {name: [found[name] for found in of_ranks] for name in of_ranks[0]}


def largest(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Of the differences of the tensors with the names of `second`."""
    return max((first[name] - tensor).abs().max().item() for name, tensor in second.items())


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Whole copies of a model's gradients."""
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {name: gathered(grad).clone() for name, grad in grads.items()}


def tell(found: dict[str, object]) -> None:
    """On a rank, which ends here: tell the test what it has found, beside the others."""
    of_ranks = gather_object([found])
    if PartialState().is_main_process:
        Path(sys.argv[1], FOUND).write_text(json.dumps(of_ranks))
    wait_for_everyone()
    end_rank()
