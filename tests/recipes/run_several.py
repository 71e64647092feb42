"""Several workflows one after the other in the same processes, as each start of a process takes some seconds.

python (or torchrun) run_several.py JOBS.json: a list of objects with `place` (a run folder, or one of its workflows),
`name`, `overrides`, and `logits_at_once`: of a chunk of the loss, 0 = as usual.
"""

import gc
import importlib
import json
import os
import sys
from functools import partial
from pathlib import Path

from common.base.parsing import parse_overrides
from common.checks.folder_runs import run_of_folder
from common.models import chunked_loss
from common.runtime.rank import end_rank
from tests.short_runs import cut_short, find_port


def run(place: str, name: str, overrides: list[str], results_root: str) -> None:
    """One workflow."""
    script = Path(place) if place.endswith(".py") else next(Path(place).glob("my_workflow_*.py"))
    module = importlib.import_module(script.stem)
    find_port(Path(results_root) / f"port-{os.environ.get('TORCHELASTIC_RUN_ID')}-{name}")
    read = (
        partial(run_of_folder, Path(module.__file__).parent)
        if hasattr(module, "SETTINGS")
        else partial(parse_overrides, module.RUN)
    )
    module.workflow(read([*overrides, "--results_root", results_root, "--run_name", name]))
    end_rank()
    gc.collect()  # a loop and its callbacks know each other: its weights would go at any time of the next run


if __name__ == "__main__":
    cut_short()
    importlib.import_module("common.tasks.classification").BOOTSTRAP_SAMPLES = 9
    jobs, usual = Path(sys.argv[1]), chunked_loss.LOGITS_AT_ONCE
    for job in json.loads(jobs.read_text()):
        chunked_loss.LOGITS_AT_ONCE = job["logits_at_once"] or usual
        run(job["place"], job["name"], job["overrides"], results_root=str(jobs.parent))
