"""Models that ranks load in parts, beside whole ones: what they hold, logits and gradients. Run by torchrun.

torchrun --nproc_per_node 2 divided_worker.py FOLDER: what each rank finds of each case.
"""

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from accelerate.utils import set_seed
from transformers import PreTrainedModel

from common.base.run_config import RunConfig
from common.models.divided import mesh_of
from common.models.loading import load_base_model
from common.models.shards import byte_count, tensors_of
from common.models.trained_weights import with_trained_weights
from common.runtime.rank import start_rank
from common.runtime.world import Rank
from common.training import fsdp
from common.training.fsdp import check_fully_sharded, load_parts, shard
from tests.recipes.folders import CLASSIFICATION, module_of
from tests.unit.ranks import gradients_of, largest, tell

columns = module_of(CLASSIFICATION, "my_utils_tensor_parallel")
LLAMA, BERT = "llama", "bert"
CASES: dict[str, dict[str, object]] = {
    "full": {"technique": "full", "model": LLAMA, "target_modules": "all"},
    "LoRA": {"technique": "lora", "model": LLAMA},
    "QLoRA": {"technique": "qlora", "model": LLAMA},
    "QLoRA, random": {"technique": "qlora", "model": LLAMA, "weights": "random"},
    "LoRA, random": {"technique": "lora", "model": LLAMA, "weights": "random"},
    "full, tp": {
        "technique": "full",
        "model": BERT,
        "task": "classification",
        "data": "assets/visitor_messages",
        "parallel": "tp",
    },
    "LoRA, tp": {
        "technique": "lora",
        "model": BERT,
        "task": "classification",
        "data": "assets/visitor_messages",
        "parallel": "tp",
    },
}
SAMPLED_EVERY_S = 0.002
Found = dict[str, object]


def run_of(case: str, folder: Path) -> RunConfig:
    changes = CASES[case]
    same = {"parallel": "fsdp", "devices": 2, **changes}
    return RunConfig(**{**same, "model": str(folder / str(changes["model"]))})


def anonymous_bytes() -> int:
    """Of this process's memory what no file backs."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@contextmanager
def growth(found: Found) -> Iterator[None]:
    """Note the largest growth of the process's own memory within; what was freed before does not hide it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, peak, done = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLED_EVERY_S):
            peak[0] = max(peak[0], anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    done.set()
    thread.join()
    found["growth"] = max(peak[0], anonymous_bytes()) - before


def noted(base: PreTrainedModel, found: Found) -> PreTrainedModel:
    """A model as it was loaded."""
    found["loaded"] = byte_count(tensors_of(base))
    return base


def batch_of(run: RunConfig, rows: slice) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 500, (4, 16), generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 1, 2, 1]) if run.goal.classifies else ids
    return {"input_ids": ids[rows], "attention_mask": torch.ones_like(ids[rows]), "labels": labels[rows]}


def trained(model: torch.nn.Module) -> list[bool]:
    return [weight.requires_grad for weight in model.parameters()]


def model_of(run: RunConfig, rank: Rank) -> torch.nn.Module:
    """This rank's part of the model, as the workflows load and divide it."""
    if run.parallel == "tp":
        mesh = columns.mesh_of_all(rank)
        return columns.split_by_plan(columns.load_columns(run, rank, mesh), mesh)
    mesh = mesh_of(rank, run)
    return shard(load_parts(run, rank, mesh), run, mesh)


def compare(case: str, folder: Path, rank: Rank) -> Found:
    run, found = run_of(case, folder), {}
    set_seed(3)
    with (
        growth(found),
        patch.object(columns if run.parallel == "tp" else fsdp, "with_trained_weights") as train,
    ):
        train.side_effect = lambda base, run: with_trained_weights(noted(base, found), run)
        model = model_of(run, rank)
    drawn = torch.rand(1).item()
    found["held"] = byte_count(tensors_of(model))
    if run.parallel == "tp":
        columns.check_split(model, 2)
    else:
        check_fully_sharded(model, 2)
    set_seed(3)
    whole = with_trained_weights(load_base_model(run, {"": "cpu"}), run)
    found |= {
        "whole": byte_count(tensors_of(whole)),
        "drawn alike": drawn == torch.rand(1).item(),
        "names": [name for name, _ in whole.named_parameters()] == [name for name, _ in model.named_parameters()],
        "trained": trained(whole) == trained(model),
        "buffers": all(map(torch.equal, whole.buffers(), model.buffers())),
    }
    whole.eval(), model.eval()
    own = slice(None) if run.parallel == "tp" else slice(rank.rank, None, 2)  # gradients are then means over the ranks
    of_all, of_own = whole(**batch_of(run, slice(None)), use_cache=False), model(**batch_of(run, own), use_cache=False)
    found["logits"] = (of_own.logits - of_all.logits[own]).abs().max().item()
    of_all.loss.backward()
    of_own.loss.backward()
    expected, gradients = gradients_of(whole), gradients_of(model)
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    found["gradients"] = largest(gradients, expected) / scale if expected.keys() == gradients.keys() else "others"
    return found


def main() -> None:
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"  # as `accelerate launch` sets it where a file says nothing
    rank = start_rank(RunConfig(technique="full", parallel="fsdp", devices=2))
    torch.set_num_threads(1)
    load_base_model(RunConfig(technique="qlora"), {"": "cpu"})  # what libraries allocate once does not count
    tell({case: compare(case, Path(sys.argv[1]), rank) for case in CASES})


if __name__ == "__main__":
    main()
