"""Several workflows one after the other in the same processes, as each start of a process takes some seconds.

python (or torchrun) run_several.py JOBS.json: a list of objects with `place` (a run folder, or one of its workflows),
`name`, `port`, `overrides`.
"""

import gc
import importlib
import json
import os
import sys
from functools import partial
from pathlib import Path

from common.launch import end_rank
from common.run_config import parse_overrides
from common.settings import run_of_arguments


def run(place: str, name: str, port: int, overrides: list[str], results_root: str) -> None:
    """One workflow."""
    script = Path(place) if place.endswith(".py") else next(Path(place).glob("my_workflow_*.py"))
    module = importlib.import_module(script.stem)
    # each run is a world of its own: torchrun's store has the addresses of the one before
    os.environ["TORCHELASTIC_USE_AGENT_STORE"], os.environ["MASTER_PORT"] = "False", str(port)
    read = partial(run_of_arguments, module) if hasattr(module, "SETTINGS") else partial(parse_overrides, module.RUN)
    module.workflow(read([*overrides, "--results_root", results_root, "--run_name", name]))
    end_rank()


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
        run(**job, results_root=str(jobs.parent))
