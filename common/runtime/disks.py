"""Files of ranks that may stand on machines with a disk each, or share one: who writes, and how all get the same."""

from contextlib import nullcontext
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list, gather_object, wait_for_everyone

from common.runtime.world import Rank

SENT_BYTES = 64 * 2**20
"""Of a file, at once."""


def first_on_disk(folder: Path, rank: Rank) -> bool:
    """Whether this rank is the first of those that see the same `folder`; it makes it. Called on every rank."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f".rank-{rank.rank}-{uuid4().hex}"
    mark.touch()
    before = gather_object([mark.name])[: rank.rank]
    is_first = not any((folder / name).exists() for name in before)
    wait_for_everyone()
    mark.unlink()
    return is_first


def broadcast_folder(folder: Path, source: int, lacks: bool, rank: Rank) -> None:
    """The files of a folder of rank `source`, written by each rank that `lacks` them. Called on every rank."""
    if not any(gather_object([lacks])):
        return
    is_source = rank.rank == source
    found = [(path.name, path.stat().st_size) for path in sorted(folder.iterdir())] if is_source else None
    if lacks:
        folder.mkdir(parents=True, exist_ok=True)
    for name, size in broadcast_object_list([found], source)[0]:
        _send_file(folder / name, size, is_source, source, lacks, rank)
    wait_for_everyone()


def _send_file(path: Path, size: int, is_source: bool, source: int, lacks: bool, rank: Rank) -> None:
    with path.open("wb" if lacks else "rb") if lacks or is_source else nullcontext() as file:
        for start in range(0, size, SENT_BYTES):
            part = torch.empty(min(SENT_BYTES, size - start), dtype=torch.uint8)
            if is_source:
                file.readinto(part.numpy())
            part = part.to(rank.device)
            dist.broadcast(part, source)
            if lacks:
                file.write(part.cpu().numpy())
