"""Each job's workflow straight through, then stopped at each of its faults and resumed, in the same processes.

python (or torchrun) resume_worker.py JOBS.json: a list of objects with `place`, `name`, `overrides`, `faults` by their
names, and `forgets`: whether a resumed run forgets its random numbers, for a negative control, which has no straight
run of its own.
"""

import importlib
import json
import os
import sys
from pathlib import Path

from common.base.parsing import parse_overrides
from common.base.run_config import RunConfig
from common.runtime import faults
from common.runtime.rank import end_rank
from common.training import saver
from tests.short_runs import cut_short, find_port


def run(module: object, run_config: RunConfig, fault: str = "") -> None:
    resumed = "-resumed" if run_config.resume_from_checkpoint else ""
    find_port(Path(run_config.results_root) / f"port-{run_config.run_name}{resumed}")
    if fault:
        os.environ[faults.VARIABLE] = fault
    try:
        module.workflow(run_config)
        assert not fault, f"{fault} did not come up"
    except ValueError as error:
        if "a fault on purpose" not in str(error):
            raise
    finally:
        os.environ.pop(faults.VARIABLE, None)
        faults._arrivals.clear()
        end_rank()


def work(job: dict, results_root: str) -> None:
    module = importlib.import_module(Path(job["place"]).stem)
    remembers = saver.load_random_numbers

    def settings(name: str, *more: str) -> RunConfig:
        return parse_overrides(
            module.RUN,
            [*job["overrides"], "--results_root", results_root, "--run_name", f"{job['name']}-{name}", *more],
        )

    if not job["forgets"]:
        run(module, settings("straight"))
    for number, fault in job["faults"].items():
        run(module, settings(number), fault)
        saver.load_random_numbers = (lambda _: {}) if job["forgets"] else remembers
        run(module, settings(number, "--resume_from_checkpoint", "last"))
        saver.load_random_numbers = remembers


if __name__ == "__main__":
    cut_short()
    jobs = Path(sys.argv[1])
    for each in json.loads(jobs.read_text()):
        work(each, str(jobs.parent))
