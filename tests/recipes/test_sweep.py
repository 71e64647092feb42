"""A sweep takes fewer steps than its grid, continues where it was interrupted, and refuses what cannot be, early."""

import os
import re
import sys
from pathlib import Path

import pytest
from optuna import load_study
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.records.store import RECORD_NAME, load_record
from common.sweep import JOURNAL, groups_of_gpus, sweep_of
from tests.forked import run_forked

FOLDER = "2.1_lora_finetuning/run_0_cpu_x1"
RATES = ("1e-4", "1e-3", "1e-2", "30")
FEW = ("--validation_rows", "9", "--train_rows", "32", "--per_device_train_batch_size", "4")


def swept(folder: Path, *arguments: str) -> tuple[int, str]:
    log = folder / "sweep.log"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "common.sweep", FOLDER, *arguments, "--results_root", str(folder)]
    code = run_forked(command, REPOSITORY, {**os.environ, "OMP_NUM_THREADS": "1"}, log, 300)
    return code, log.read_text()


@pytest.mark.slow
def test_runs_that_fall_behind_end_early_and_a_second_call_runs_nothing(tmp_path: Path) -> None:
    asked = ("--learning_rate", *RATES, "--steps", "16", *FEW)
    code, said = swept(tmp_path, *asked)
    assert code == 0, said
    journal = JournalStorage(JournalFileBackend(str(tmp_path / "results" / "sweep" / JOURNAL)))
    trials = {each.params["learning_rate"]: each for each in load_study(study_name="sweep", storage=journal).trials}
    assert trials.keys() == set(map(float, RATES))
    losses = {rate: each.intermediate_values for rate, each in trials.items()}
    assert losses.pop(30.0).keys() == {0}  # its gradients are not finite
    assert all({0, 4} <= of_run.keys() for of_run in losses.values())
    assert sum(max(of_run) for of_run in losses.values()) < 3 * 16
    whole = [rate for rate, each in trials.items() if each.state is TrialState.COMPLETE]
    best = min(whole, key=lambda rate: losses[rate][16])
    record = load_record(tmp_path / "results" / f"sweep-learning_rate-{best:g}" / RECORD_NAME)
    assert (record["status"], record["steps"]) == ("completed", 16)
    assert record["best_validation_loss"] == min(loss for step, loss in losses[best].items() if step)
    assert re.search(rf"best: .*--learning_rate {best:g}", said)
    code, again = swept(tmp_path, *asked)
    assert code == 0
    assert again.partition("\n\n")[2] == said.partition("validation loss, ")[2].partition("\n\n")[2]
    assert swept(tmp_path, "--learning_rate", *RATES, "--steps", "20", *FEW)[0] == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--learning_rate", "1e-3"), "nothing to choose"),
        (("--learning_rate", "1e-3", "1e-3"), "nothing to choose"),
        (("--learning_rate", "0", "1e-3"), "learning_rate is 0"),
        (("--learning_rate", "1e-4", "1e-3", "--lora_r", "0"), "lora_r is 0"),
        (("--learning_rate", "1e-4", "1e-3", "--steps", "6"), "multiple of 4"),
        (("--learning_rate", "1e-4", "1e-3", "--at_once", "0"), "at_once is 0"),
        (("--learning_rate", "1e-4", "1e-3", "--max-steps=9"), "max_steps is set by the sweep"),
        (("--learning_rate", "1e-4", "1e-3", "--lora_dropout", "2"), "lora_dropout is 2"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_runs(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(BadInputError, match=says):
        sweep_of([FOLDER, *arguments])


def test_a_folder_with_several_workflows_is_refused_and_preferences_keep_their_baseline() -> None:
    rates = ("--learning_rate", "1e-4", "1e-3")
    with pytest.raises(BadInputError, match="3 workflows"):
        sweep_of(["3.2_summarization/run_0_cpu_x2", *rates])
    (settings, *_) = (sweep := sweep_of(["3.4_preference_tuning/run_0_cpu_x1", *rates])).combinations()
    assert "--baseline" not in sweep.options_of(settings)


def test_runs_beside_each_other_share_the_gpus_that_the_sweep_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunConfig(device="cuda", parallel="ddp", devices=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    assert groups_of_gpus(run, 1) == [""]
    assert groups_of_gpus(run, 2) == ["3,5", "6,7"]
    with pytest.raises(BadInputError, match="--at_once 2"):
        groups_of_gpus(run, 3)
