"""A process's place among the ranks of a run, and how it was started."""

import os
import sys
from dataclasses import dataclass

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
DISTRIBUTED_TYPES = {"cpu": "MULTI_CPU", "cuda": "MULTI_GPU"}


@dataclass(frozen=True)
class Rank:
    """This process's place in the world."""

    rank: int
    world_size: int
    device: str
    """As torch spells it: `cpu`, `cuda:1`."""
    launcher: str
    """`python`, `notebook`, `nblaunch` (notebook_launcher), `acclaunch` (accelerate launch) or `torchrun`."""
    further_devices: tuple[str, ...] = ()
    """With model parallel: what this one process works on besides `device`."""
    is_process: bool = False
    """Whether the process is there for this run alone, and ends with it: in a notebook a reader may take his time."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device that this rank works on."""
        return (self.device, *self.further_devices)

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0


def detect_launcher() -> str:
    """How this process was started."""
    elastic = "TORCHELASTIC_RUN_ID" in os.environ
    if "ipykernel" in sys.modules:
        return "nblaunch" if elastic else "notebook"
    if "ACCELERATE_MIXED_PRECISION" in os.environ:
        return "acclaunch"
    return "torchrun" if elastic else "python"


def was_restarted() -> bool:
    """Whether torchrun has started the ranks again, after one was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
