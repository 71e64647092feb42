"""Toy models, divided over two ranks, that save themselves file by file, and what one device saves. Run by torchrun.

torchrun --nproc_per_node 2 saved_files_worker.py FOLDER CASE...: what each rank finds of each case.
"""

import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedModel

from common.base.run_config import RunConfig
from common.models import saved_files
from common.models.shards import byte_count, full_weights, global_numel, local_part
from common.planning import host_memory
from common.runtime.rank import start_rank
from common.training.deepspeed_config import deepspeed_config
from tests.recipes.folders import SHARDED
from tests.unit.ranks import tell

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
RUN = RunConfig(technique="full", parallel="fsdp", devices=2)
CONFIGS = {
    "llama": LlamaConfig(vocab_size=64, num_key_value_heads=2, **SIZES),
    "tied": LlamaConfig(vocab_size=64, num_key_value_heads=2, tie_word_embeddings=True, **SIZES),
    "experts": MixtralConfig(vocab_size=64, num_key_value_heads=2, num_local_experts=4, **SIZES),
}


def toy(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[kind])


def in_rows(kind: str, mesh: DeviceMesh) -> PreTrainedModel:
    """As FSDP divides it."""
    model = toy(kind)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    return model


def by_dimensions(kind: str, mesh: DeviceMesh, places: Callable[[str], int | None]) -> PreTrainedModel:
    """Each weight along one of its dimensions, or whole on each rank."""
    model = toy(kind)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            dimension = places(name)
            if dimension is not None and weight.ndim > dimension:
                divided = distribute_tensor(weight.detach(), mesh, [Shard(dimension)])
                module.register_parameter(name, torch.nn.Parameter(divided))
    model.tie_weights()
    return model


def in_columns(kind: str, mesh: DeviceMesh) -> PreTrainedModel:
    """As tensor parallel divides some matrices: vectors are whole."""
    return by_dimensions(kind, mesh, lambda name: 1)


def by_deepspeed(kind: str, mesh: DeviceMesh) -> PreTrainedModel:
    from my_utils_full_finetuning_with_fsdp import hand_over  # the run folder's

    model = by_dimensions(kind, mesh, lambda name: 0)
    hand_over(model, deepspeed_config(replace(RUN, parallel="zero3"), SIZES["hidden_size"]), mesh)
    return model


CASES = {
    "fsdp": ("llama", in_rows),
    "fsdp, tied": ("tied", in_rows),
    "fsdp, experts": ("experts", in_rows),
    "tp": ("llama", in_columns),
    "zero3": ("llama", by_deepspeed),
    "zero3, tied": ("tied", by_deepspeed),
}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight for path in folder.glob("*.safetensors") for name, weight in load_file(path).items()}


def are_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], weight) for name, weight in second.items())


def found_of(case: str, folder: Path, mesh: DeviceMesh, is_main: bool) -> dict[str, object]:
    """Save a model in parts, with files as small as may be; rank 0 compares it with what one device saves."""
    kind, divide = CASES[case]
    one, model, made, held = toy(kind), divide(kind, mesh), [], []

    def counted(*arguments: object) -> dict[str, torch.Tensor]:
        whole = full_weights(*arguments)
        made.extend(map(weakref.ref, whole.values()))
        held.append(byte_count(weight for each in made if (weight := each()) is not None))
        return whole

    parts = byte_count(map(local_part, model.parameters()))
    with patch.object(host_memory, "SMALL_FILE_BYTES", 0), patch.object(saved_files, "full_weights", counted):
        saved_files.save_model(model, folder / "parts", is_main)
    if not is_main:
        return {"held": max(held)}
    one.save_pretrained(folder / "one")
    loaded = AutoModelForCausalLM.from_pretrained(folder / "parts")
    largest = max(byte_count(layer.parameters()) for layer in one.model.layers)
    largest_weight = max(weight.nbytes for weight in one.parameters())
    most = max(largest if kind == "experts" else largest_weight, byte_count(one.parameters()) / host_memory.LEAST_FILES)
    return {
        "held": max(held) / most,
        "files": len(list((folder / "parts").glob("*.safetensors"))),
        "equal": are_equal(stored(folder / "one"), stored(folder / "parts")),
        "loads": type(loaded) is type(one) and are_equal(loaded.state_dict(), one.state_dict()),
        "config": (folder / "one/config.json").read_text() == (folder / "parts/config.json").read_text(),
        "divided": parts / byte_count(one.parameters()),
        "numel": sum(map(global_numel, model.parameters())) == sum(weight.numel() for weight in one.parameters()),
    }


def main() -> None:
    sys.path.insert(0, str(SHARDED))
    torch.set_num_threads(1)
    rank = start_rank(RUN)
    mesh, folder = init_device_mesh("cpu", (2,)), Path(sys.argv[1])
    tell({case: found_of(case, folder / case, mesh, rank.is_main) for case in sys.argv[2:]})


if __name__ == "__main__":
    main()
