"""The first losses of the real recipe on the frozen base and data: a change of either, or of the step, shows here.

Measured on 2026-11-21 with torch 2.13.0, Transformers 5.23.0 and PEFT 0.21.2.
"""

from collections.abc import Callable

import pytest

GOLDEN_TRAINING_LOSSES = [8.887214, 8.167221, 6.539622, 5.703245, 4.177495, 4.632864]
GOLDEN_VALIDATION_LOSSES = [8.514771, 6.480382, 5.049925, 4.399458, 4.099301, 4.022877]


@pytest.mark.parametrize(("launcher", "batch_size"), [("python", "16"), ("torchrun", "8")])
def test_the_first_losses_are_the_golden_ones(run_workflow: Callable, launcher: str, batch_size: str) -> None:
    recipe = ("--batch_size", batch_size, "--lora_dropout", "0", "--max_steps", "6", "--report_share", "0.16")
    done = run_workflow(launcher, "--train_rows", "819", *recipe)
    assert done.exit_code == 0, done.output
    training = [loss for _, loss in done.record["training_losses"]]
    validation = [loss for _, loss in done.record["validation_losses"]]
    assert training == pytest.approx(GOLDEN_TRAINING_LOSSES, rel=1e-4)
    assert validation == pytest.approx(GOLDEN_VALIDATION_LOSSES, rel=1e-4)
