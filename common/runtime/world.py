"""A process's place among the ranks of a run, and how it was started."""

import os
import sys
from dataclasses import dataclass

from common.base.launched import is_of_torchrun
from common.base.print_prefix import rank_prefix

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
DISTRIBUTED_TYPES = {"cpu": "MULTI_CPU", "cuda": "MULTI_GPU"}


@dataclass(frozen=True)
class Rank:
    """This process's place in the world.

    Attributes:
        launcher: `python`, `notebook`, `nblaunch` (notebook_launcher), `acclaunch` (accelerate launch) or `torchrun`.
        further_devices: With model parallelism: the devices that this process works on besides `device`.
        is_process: Whether the process exists for this run alone; a notebook waits for its reader.
        host: Its machine's name, where there are several.
    """

    rank: int
    world_size: int
    device: str
    launcher: str
    further_devices: tuple[str, ...] = ()
    is_process: bool = False
    host: str = ""

    @property
    def prefix(self) -> str:
        """What stands before each line that it prints."""
        return rank_prefix(self.rank, self.device, self.host)

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device that this rank works on."""
        return (self.device, *self.further_devices)

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0


def is_main_process() -> bool:
    """Return whether this process speaks for all, also before its rank has started."""
    return os.environ.get("RANK", "0") == "0"


def detect_launcher() -> str:
    """Return how this process was started (see `Rank.launcher`)."""
    elastic = is_of_torchrun()
    if "ipykernel" in sys.modules:
        return "nblaunch" if elastic else "notebook"
    if "ACCELERATE_MIXED_PRECISION" in os.environ:
        return "acclaunch"
    return "torchrun" if elastic else "python"


def may_start_again() -> bool:
    """Return whether torchrun (`--max_restarts`) may start the ranks again where one is lost."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
