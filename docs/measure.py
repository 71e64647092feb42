"""Measure what pages of docs show: each run that has no record yet is made, and its record kept.

python docs/measure.py         # your_own_data.md: the embedded base and data, by rows and by learning rate
python docs/measure.py --real  # real_model.md: SmolLM2-135M on docstrings, by technique, learning rate and rank

Runs of a study take the same number of steps, and differ in nothing but what it is about. Two go on at a time.
"""

import argparse
import shutil
import sys
from itertools import product
from multiprocessing.pool import ThreadPool
from typing import NamedTuple

from bench.run_record import keep_record
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.models.real_models import SMOLLM2
from common.records.store import REAL, RECORD_NAME, STUDY, load_record
from common.runtime.launchers import stream_command

FOLDERS = {
    "lora": "2.1_lora_finetuning/run_0_cpu_x1",
    "lora-ddp": "2.2_lora_finetuning_with_ddp/run_0_cpu_x2",
    "qlora": "2.3_qlora_finetuning/run_0_cpu_x1",
    "full": "2.4_full_finetuning/run_0_cpu_x1",
    "rewards-ddp": "3.5_reinforcement_learning/run_0_cpu_x2",
}
ALL_ROWS, STEPS = 819, 312  # six epochs of all rows
ROWS = (50, 100, 200, 400, ALL_ROWS)
LEARNING_RATES = (1e-4, 1e-3, 1e-2)
PROCESSES = 2
MERGE_CHECK = "the reloaded merged model differ"
"""Of the sentence of `largest_difference` in common/models/merging.py."""

REAL_SETTINGS = {
    "model": SMOLLM2,
    "data": "assets/docstrings",
    "max_steps": 40,
    "eval_steps": 10,
    "validation_rows": 48,
    "test_rows": 20,
}
REAL_RATES = {"lora": (3e-5, 1e-4, 3e-4, 1e-3), "qlora": (1e-4,), "full": (3e-5, 1e-4, 3e-4), "lora-ddp": (3e-5,)}
SEEDS = {"lora": 3e-5, "full": 1e-4}
"""Techniques that are measured with three seeds, at this rate."""
REAL_REWARDS = {
    "model": SMOLLM2,
    "data": "assets/sums",
    "reward": "my_utils_reinforcement_learning:is_right",
    "technique": "full",
    "parallel": "ddp",
    "learning_rate": 3e-5,
    "warmup_steps": 2,
    "max_steps": 15,
    "eval_steps": 5,
    "per_device_train_batch_size": 16,
    "max_new_tokens": 24,
}
"""Two ranks answer two prompts each in a step, eight times."""


class Trial(NamedTuple):
    """One run of a study, by its name there, and the settings by which it differs from its folder's."""

    technique: str
    name: str
    settings: dict[str, object]

    def run(self, study: str) -> None:
        """Train and keep the record, unless there is one; also that of a run whose merge fails at too high a rate.

        Raises:
            RuntimeError: it failed otherwise.
        """
        if (REPOSITORY / study / f"{self.name}.json").exists():
            return
        settings = {**self.settings, "report_to": "none", "run_name": self.name}
        options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        folder = REPOSITORY / FOLDERS[self.technique]
        results = folder / "results" / self.name
        shutil.rmtree(results, ignore_errors=True)  # an earlier attempt's record must not pass for this one's
        try:
            stream_command([sys.executable, "-m", "common.launch", str(folder), *options], cwd=REPOSITORY)
        except RuntimeError:
            file = results / RECORD_NAME
            if not (file.exists() and MERGE_CHECK in (load_record(file).get("error") or "")):
                raise
        keep_record(results, REPOSITORY / study)


def own_data_trials() -> list[Trial]:
    """Return the runs by the number of rows and by the learning rate, on the embedded base, without repeats."""
    usual, seed = RunConfig.learning_rate, RunConfig.seed
    wanted = dict.fromkeys([*product(ROWS, [usual]), *product([ALL_ROWS], LEARNING_RATES)])
    return [
        Trial(technique, f"{technique}-rows{rows}-lr{rate:g}-seed{seed}",
              {"train_rows": rows, "learning_rate": rate, "seed": seed, "max_steps": STEPS})
        for (rows, rate), technique in product(wanted, ("lora", "full"))
    ]  # fmt: skip


def real_trials() -> list[Trial]:
    """Return the runs of a real model: on docstrings with steps of eight rows, and on sums with a reward."""
    usual = [(name, rate, 8, RunConfig.seed) for name, rates in REAL_RATES.items() for rate in rates]
    ranks = [("lora", rate, 32, RunConfig.seed) for rate in REAL_RATES["lora"][:2]]
    seeds = [(name, rate, 8, seed) for name, rate in SEEDS.items() for seed in (7, 8)]
    rewards = Trial("rewards-ddp", f"real-rewards-ddp-seed{RunConfig.seed}", REAL_REWARDS)
    return [*(_real_trial(*each) for each in (*usual, *ranks, *seeds)), rewards]


def _real_trial(technique: str, rate: float, rank: int, seed: int) -> Trial:
    rows = 4 if technique == "lora-ddp" else 8
    own = {"learning_rate": rate, "seed": seed, "per_device_train_batch_size": rows}
    adapters = {} if technique == "full" else {"lora_r": rank}
    ranked = "" if technique == "full" else f"-r{rank}"
    return Trial(technique, f"real-{technique}{ranked}-lr{rate:g}-seed{seed}", {**REAL_SETTINGS, **own, **adapters})


def main() -> None:
    """Make the runs of a study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="the study of the real model (`make real` fetches it)")
    is_real = parser.parse_args().real
    study = REAL if is_real else STUDY
    one_rank, several = [], []
    for trial in real_trials() if is_real else own_data_trials():
        (several if trial.technique.endswith("ddp") else one_rank).append(trial)
    with ThreadPool(PROCESSES) as pool:
        pool.map(lambda trial: trial.run(study), one_rank, chunksize=1)
    for trial in several:
        trial.run(study)


if __name__ == "__main__":
    main()
