"""Several workflows one after the other in the same processes, as each start of a process takes some seconds.

python (or torchrun) run_several.py JOBS.json: a list of objects with `place` (a run folder, or one of its workflows),
`name`, `overrides`.
"""

import gc
import importlib
import json
import os
import sys
import time
from functools import partial
from pathlib import Path

from common.launch import end_rank, free_port
from common.run_config import parse_overrides
from common.settings import run_of_arguments


def run(place: str, name: str, overrides: list[str], results_root: str) -> None:
    """One workflow."""
    script = Path(place) if place.endswith(".py") else next(Path(place).glob("my_workflow_*.py"))
    module = importlib.import_module(script.stem)
    # each run is a world of its own: torchrun's store has the addresses of the one before
    port = port_of_all_ranks(Path(results_root) / f"port-{os.environ.get('TORCHELASTIC_RUN_ID')}-{name}")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"], os.environ["MASTER_PORT"] = "False", port
    read = partial(run_of_arguments, module) if hasattr(module, "SETTINGS") else partial(parse_overrides, module.RUN)
    module.workflow(read([*overrides, "--results_root", results_root, "--run_name", name]))
    end_rank()


def port_of_all_ranks(file: Path) -> str:
    """A port that is free now: rank 0 looks for it, and leaves it in `file` for the others.

    One that was looked for before the first run would belong to somebody else now and then, when the last one begins.
    """
    if os.environ.get("RANK", "0") == "0":
        part = file.with_name(f"{file.name}.part")
        part.write_text(str(free_port()))
        part.rename(file)
    while not file.exists():  # torchrun ends whoever waits for a rank that is gone
        time.sleep(0.01)
    return file.read_text()


def cut_short() -> None:
    """Have runs measure, estimate and flush less; called before any workflow is imported, which takes these by name."""
    for name, measure in (("pipeline_measure", "measure_pipeline"), ("ceiling", "measure_machine_ceiling")):
        module = importlib.import_module(f"common.{name}")
        setattr(module, measure, partial(getattr(module, measure), steps=1, rounds=1))
    importlib.import_module("common.classification").BOOTSTRAP_SAMPLES = 9
    os.fsync = lambda _: None  # nothing here must outlive a loss of power
    gc.freeze()  # else each run's collections look through every library again


if __name__ == "__main__":
    cut_short()
    jobs = Path(sys.argv[1])
    for job in json.loads(jobs.read_text()):
        run(job["place"], job["name"], job["overrides"], results_root=str(jobs.parent))
