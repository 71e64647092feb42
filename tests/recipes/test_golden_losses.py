"""The first losses of the real recipe on the frozen base and data: a change of either, or of the step, shows here.

Measured on 2026-11-25 with torch 2.13.0, Transformers 5.23.0 and PEFT 0.21.2, when rows of batches without padding came
to be in random order; sorted by length they give those of 2026-11-21 to 1e-6 (LOG.md). Those of pictures and of
pairs are of 2026-11-26.
"""

from collections.abc import Callable

import pytest

from common.base.paths import REPOSITORY

FULL = REPOSITORY / "2.4_full_finetuning" / "run_0_cpu_x1"
PP = REPOSITORY / "2.7_full_finetuning_with_pp" / "run_0_cpu_x2"
PICTURES = REPOSITORY / "3.3_visual_question_answering" / "run_0_cpu_x1"
PREFERENCES = REPOSITORY / "3.4_preference_tuning" / "run_0_cpu_x1"

ROWS = ("--train_rows", "819", "--validation_rows", "82", "--test_rows", "2", "--independent_judge", "none",
        "--train_sampling_strategy", "random")  # fmt: skip
GOLDEN_TRAINING_LOSSES = [8.521076, 8.37044, 6.558758, 5.208592, 4.264974, 3.915376]
GOLDEN_VALIDATION_LOSSES = [8.514773, 6.487611, 5.022643, 4.292084, 3.974297, 3.88945]
GOLDEN_FULL_TRAINING_LOSSES = [8.521076, 8.37044, 7.361944, 6.405624, 5.43438, 5.281358]
GOLDEN_FULL_VALIDATION_LOSSES = [8.514773, 7.325022, 6.374496, 5.745753, 5.426577, 5.34023]


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


PICTURED_ROWS = ("--train_rows", "96", "--validation_rows", "24", "--test_rows", "2", "--independent_judge", "none",
                 "--max_new_tokens", "1", "--max_steps", "6", "--eval_steps", "0.16")  # fmt: skip
GOLDEN_PICTURED_LOSSES = {
    "lora": (
        [9.742068, 9.306605, 10.512144, 5.449576, 4.681367, 5.829739],
        [10.620655, 7.712496, 6.350009, 5.393153, 4.974419, 4.835709],
    ),
    "full": (
        [9.742068, 9.306605, 11.250216, 7.095677, 6.340562, 8.396328],
        [10.620655, 9.289962, 8.24843, 7.59094, 7.30561, 7.2274],
    ),
}


@pytest.mark.parametrize("technique", ["lora", "full"])
def test_the_first_losses_about_pictures_are_the_golden_ones(run_workflow: Callable, technique: str) -> None:
    no_dropout = ("--lora_dropout", "0") if technique == "lora" else ()
    recipe = ("--technique", technique, "--batch_size", "16", *no_dropout)
    done = run_workflow("python", *PICTURED_ROWS, *recipe, folder=PICTURES)
    assert done.exit_code == 0, done.output
    training, validation = GOLDEN_PICTURED_LOSSES[technique]
    assert [loss for _, loss in done.record["training_losses"]] == pytest.approx(training, rel=1e-4)
    assert [loss for _, loss in done.record["validation_losses"]] == pytest.approx(validation, rel=1e-4)


PAIRS = ("--train_rows", "96", "--validation_rows", "24", "--test_rows", "2", "--max_new_tokens", "1",
         "--max_steps", "6", "--eval_steps", "0.16", "--batch_size", "16", "--learning_rate", "1e-3")  # fmt: skip
GOLDEN_PAIRED_LOSSES = {
    "lora": (
        [0.693147, 0.693147, 0.535966, 0.358509, 0.273652, 0.23938],
        [0.693147, 0.505807, 0.381597, 0.291203, 0.235296, 0.219897],
    ),
    "full": (
        [0.693147, 0.693147, 0.621604, 0.517774, 0.480069, 0.456044],
        [0.693147, 0.597109, 0.527762, 0.48186, 0.458909, 0.452652],
    ),
}


@pytest.mark.parametrize("technique", ["lora", "full"])
def test_the_first_losses_of_pairs_are_the_golden_ones(run_workflow: Callable, technique: str) -> None:
    done = run_workflow("python", *PAIRS, "--technique", technique, folder=PREFERENCES)
    assert done.exit_code == 0, done.output
    training, validation = GOLDEN_PAIRED_LOSSES[technique]
    assert [loss for _, loss in done.record["training_losses"]] == pytest.approx(training, rel=1e-4)
    assert [loss for _, loss in done.record["validation_losses"]] == pytest.approx(validation, rel=1e-4)
