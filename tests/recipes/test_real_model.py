"""Three steps of the real model, where `make real` has fetched it: it is tuned at the rate that the rule gives."""

from collections.abc import Callable

import pytest

from common.models.real_models import FOLDER, SMOLLM2

SETTINGS = ("--model", SMOLLM2, "--data", "assets/docstrings", "--max_steps", "3", "--per_device_train_batch_size", "4",
            "--validation_rows", "8", "--test_rows", "2", "--independent_judge", "none")  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="`make real` fetches it")
def test_the_real_model_learns_in_three_steps(run_workflow: Callable) -> None:
    done = run_workflow("python", *SETTINGS, "--warmup_steps", "1")
    assert done.exit_code == 0, done.output
    record = done.record
    assert record["config"]["learning_rate"] == 4.5e-5
    (_, before), *after = record["validation_losses"]
    assert after[-1][0] == 3
    assert record["best_validation_loss"] < before < 5
    assert record["quality"]["before"]["general_loss"] == pytest.approx(3.238, abs=1e-3)
    assert record["quality"]["after"]["general_loss"] == pytest.approx(3.238, abs=0.2)
