"""The first losses of the real recipe on the frozen base and data: a change of either, or of the step, shows here.

Measured on 2026-11-21 with torch 2.13.0, Transformers 5.23.0 and PEFT 0.21.2.
"""

from collections.abc import Callable

import pytest

from common.base.paths import REPOSITORY

FULL = REPOSITORY / "2.4_full_finetuning" / "run_0_cpu_x1"
PP = REPOSITORY / "2.7_full_finetuning_with_pp" / "run_0_cpu_x2"

ROWS = ("--train_rows", "819", "--validation_rows", "82", "--test_rows", "2", "--independent_judge", "none")
GOLDEN_TRAINING_LOSSES = [8.887214, 8.167221, 6.539622, 5.703245, 4.177495, 4.632864]
GOLDEN_VALIDATION_LOSSES = [8.514771, 6.480382, 5.049925, 4.399458, 4.099301, 4.022877]
GOLDEN_FULL_TRAINING_LOSSES = [8.887214, 8.167221, 7.371103, 6.773857, 5.437977, 5.894013]
GOLDEN_FULL_VALIDATION_LOSSES = [8.514771, 7.318025, 6.385015, 5.787826, 5.478553, 5.397408]


@pytest.mark.parametrize(
    ("launcher", "batch_size"), [("python", "16"), pytest.param("torchrun", "8", marks=pytest.mark.slow)]
)
def test_the_first_losses_are_the_golden_ones(run_workflow: Callable, launcher: str, batch_size: str) -> None:
    recipe = ("--batch_size", batch_size, "--lora_dropout", "0", "--max_steps", "6", "--eval_steps", "0.16")
    done = run_workflow(launcher, *ROWS, *recipe)
    assert done.exit_code == 0, done.output
    training = [loss for _, loss in done.record["training_losses"]]
    validation = [loss for _, loss in done.record["validation_losses"]]
    assert training == pytest.approx(GOLDEN_TRAINING_LOSSES, rel=1e-4)
    assert validation == pytest.approx(GOLDEN_VALIDATION_LOSSES, rel=1e-4)


@pytest.mark.parametrize(
    ("launcher", "micro_batches"), [("python", "1"), pytest.param("torchrun", "8", marks=pytest.mark.slow)]
)
def test_the_first_losses_of_full_finetuning_are_the_golden_ones(
    run_workflow: Callable, launcher: str, micro_batches: str
) -> None:
    recipe = ("--batch_size", "16", "--learning_rate", "1e-3", "--max_steps", "6", "--eval_steps", "0.16")
    folder = FULL if launcher == "python" else PP
    done = run_workflow(launcher, *ROWS, *recipe, "--micro_batches", micro_batches, folder=folder)
    assert done.exit_code == 0, done.output
    training = [loss for _, loss in done.record["training_losses"]]
    validation = [loss for _, loss in done.record["validation_losses"]]
    assert training == pytest.approx(GOLDEN_FULL_TRAINING_LOSSES, rel=1e-4)
    assert validation == pytest.approx(GOLDEN_FULL_VALIDATION_LOSSES, rel=1e-4)
