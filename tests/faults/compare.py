"""How far two checkpoints are apart."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from common.training.checkpoints import read_manifest
from common.training.part import SHARDS

TEXTS = (".json", ".jinja", ".md", ".txt")


def _tensors(content: object, name: str = "") -> dict[str, torch.Tensor]:
    if torch.is_tensor(content):
        return {name: content.float()}
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return {inner: tensor for key, value in items for inner, tensor in _tensors(value, f"{name}.{key}").items()}


def _part(name: str) -> str:
    """A file, or the folder of shards that make up one state."""
    return SHARDS if name.startswith(f"{SHARDS}/") else name


def _read(path: Path) -> object:
    if path.is_dir():
        whole = path.parent.parent / f"{path.parent.name}.pt"
        dcp_to_torch_save(path, whole)
        return torch.load(whole, weights_only=True)
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def largest_difference(one: Path, other: Path) -> float:
    """Between two checkpoints' weights, optimizers, schedules and random numbers; bytes that are equal are 0."""
    files, others = (read_manifest(folder)["files"] for folder in (one, other))
    assert files.keys() == others.keys()
    largest = 0.0
    tensors = [name for name in files if not name.endswith(TEXTS)]
    for name in {_part(name) for name in tensors}:
        if files.get(name, one) == others.get(name, other):
            continue
        mine, theirs = (_tensors(_read(folder / name)) for folder in (one, other))
        assert mine, name
        assert mine.keys() == theirs.keys(), name
        largest = max([largest, *(float((mine[key] - theirs[key]).abs().max()) for key in mine)])
    return largest
