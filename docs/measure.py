"""Measure what your_own_data.md shows: `python docs/measure.py` makes each run that has no record in docs/records yet.

There are two series, both on the embedded data and base: the number of training rows, and the learning rate. Every run
takes the same number of steps, so that runs differ in nothing but what the series is about. Two runs go on at a time:
no table shows their times.
"""

import shutil
import sys
from itertools import product
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.records.store import RECORD_NAME, STUDY, keep_record, load_record
from common.runtime.launchers import stream_command

FOLDERS = {"lora": "2.1_lora_finetuning/run_0_cpu_x1", "full": "2.4_full_finetuning/run_0_cpu_x1"}
ALL_ROWS, STEPS = 819, 312  # six epochs of all rows
ROWS = (50, 100, 200, 400, ALL_ROWS)
LEARNING_RATES = (1e-4, 1e-3, 1e-2)
SEEDS = (42,)
PROCESSES = 2
MERGE_CHECK = "the reloaded merged model differ"
"""Of the sentence of `largest_difference` in common/models/merging.py."""


class Trial(NamedTuple):
    """One run of a series."""

    seed: int
    technique: str
    rows: int
    learning_rate: float

    @property
    def name(self) -> str:
        """The run's name, such as `lora-rows100-lr0.001-seed42`."""
        return f"{self.technique}-rows{self.rows}-lr{self.learning_rate:g}-seed{self.seed}"

    def run(self) -> None:
        """Train and keep the record, unless there is one; also that of a run whose merge fails at too high a rate.

        Raises:
            RuntimeError: it failed otherwise.
        """
        if (REPOSITORY / STUDY / f"{self.name}.json").exists():
            return
        settings = {"train_rows": self.rows, "learning_rate": self.learning_rate, "seed": self.seed,
                    "max_steps": STEPS, "report_to": "none", "run_name": self.name}  # fmt: skip
        options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        folder = REPOSITORY / FOLDERS[self.technique]
        results = folder / "results" / self.name
        shutil.rmtree(results, ignore_errors=True)  # an earlier attempt's record must not pass for this one's
        try:
            stream_command([sys.executable, "-m", "common.launch", str(folder), *options], cwd=REPOSITORY)
        except RuntimeError:
            if not failed_at_merge(results):
                raise
        keep_record(results, REPOSITORY / STUDY)


def failed_at_merge(results: Path) -> bool:
    """Return whether a run trained to its end, and its merged model then was not what was trained."""
    file = results / RECORD_NAME
    return file.exists() and MERGE_CHECK in (load_record(file).get("error") or "")


def trials() -> list[Trial]:
    """Return the runs of both series, without repeats; seed by seed, so that what is there after each can be read."""
    usual = RunConfig.learning_rate
    wanted = [*product(ROWS, [usual]), *product([ALL_ROWS], LEARNING_RATES)]
    return [Trial(seed, name, *each) for seed, each, name in product(SEEDS, dict.fromkeys(wanted), FOLDERS)]


if __name__ == "__main__":
    with ThreadPool(PROCESSES) as pool:
        pool.map(Trial.run, trials(), chunksize=1)
