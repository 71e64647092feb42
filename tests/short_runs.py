"""What the programs of tests change in themselves: shorter measurements, and a port for each of several runs."""

import gc
import importlib
import os
import time
from functools import partial
from pathlib import Path

from accelerate.utils.other import get_free_port


def cut_short() -> None:
    """Have runs measure and flush less; called before a workflow is imported, which takes the measurements by name."""
    for name, measure in (
        ("measuring.pipeline_measure", "measure_pipeline"),
        ("measuring.ceiling", "measure_machine_ceiling"),
    ):
        module = importlib.import_module(f"common.{name}")
        setattr(module, measure, partial(getattr(module, measure), steps=1, rounds=1))
    os.fsync = lambda _: None  # processes are killed in tests, but no machine loses its power
    gc.freeze()  # else each run's collections look through every library again


def find_port(file: Path) -> None:
    """Have the ranks meet at a port that is free now, for another run: torchrun's store has the addresses of the last.

    Rank 0 looks for it, and leaves it in `file` for the others. One that was looked for before the first of several
    runs would belong to somebody else now and then.
    """
    if os.environ.get("RANK", "0") == "0":
        part = file.with_name(f"{file.name}.part")
        part.write_text(str(get_free_port()))
        part.rename(file)
    while not file.exists():  # torchrun ends whoever waits for a rank that is gone
        time.sleep(0.01)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"], os.environ["MASTER_PORT"] = "False", file.read_text()
