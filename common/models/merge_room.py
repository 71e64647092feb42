"""Whether an adapter can be merged where it was trained: what each machine's memory and disk hold of the merged model.

A rank that writes a stage of the merged model has one file of it in the host's memory; the files of all stages go to
each disk.
"""

import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import psutil

from common.base.run_config import RunConfig
from common.hardware.devices import size_text
from common.models.loading import model_without_weights, weight_dtype
from common.planning.host_memory import PLAIN_FILE_BYTES, file_bytes
from common.runtime.world import Rank

LATER = "the adapter is saved, and can be merged where there is room, with PEFT's merge_and_unload"


@dataclass(frozen=True)
class MergeNeed:
    """What one rank would take of its machine to write its stage of the merged model, and what is free there.

    Attributes:
        stage_bytes: Of memory; 0 of a rank that writes none.
        disk_bytes: Of the results' disk, whichever rank writes there.
    """

    host: str
    stage_bytes: int
    free_bytes: int
    disk_bytes: int
    free_disk_bytes: int


def merge_need(run: RunConfig, rank: Rank, stages: int, results: Path) -> MergeNeed:
    """Return what this rank would take, and what its machine has now; in `stages` the first ranks write one each."""
    whole_bytes = model_without_weights(run).num_parameters() * weight_dtype(run).itemsize
    own_bytes = whole_bytes // stages
    if run.method.quantizes and rank.device != "cpu":  # dequantized on the host, where the GPU has no room
        written = own_bytes
    else:  # file by file
        written = min(own_bytes, file_bytes(own_bytes) if stages > 1 else int(PLAIN_FILE_BYTES))
    free, disk = psutil.virtual_memory().available, shutil.disk_usage(results).free
    return MergeNeed(socket.gethostname(), written if rank.rank < stages else 0, free, whole_bytes, disk)


def why_not_merged(needs: Sequence[MergeNeed]) -> str:
    """Return why an adapter is not merged, in one sentence, of what all ranks need; empty where there is room.

    Ranks of one machine share its memory and its disk; where machines share a disk, each sees what is free on it.
    """
    for host, of_host in groupby(sorted(needs, key=lambda need: need.host), lambda need: need.host):
        here = list(of_host)
        stages, free = sum(need.stage_bytes for need in here), min(need.free_bytes for need in here)
        if stages > free:
            return (
                f"The adapter is not merged: {host} would hold {size_text(stages)} of the merged model while it is "
                f"written, but {size_text(free)} of its memory are free; {LATER}."
            )
        disk, free_disk = max(need.disk_bytes for need in here), min(need.free_disk_bytes for need in here)
        if disk > free_disk:
            return (
                f"The adapter is not merged: the merged model takes {size_text(disk)}, but {size_text(free_disk)} are "
                f"free on the results' disk of {host}; {LATER}."
            )
    return ""
