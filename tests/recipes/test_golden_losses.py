"""The first losses of the real recipe on the frozen base and data: a change of either, or of the step, shows here.

Measured on 2026-11-25 with torch 2.13.0, Transformers 5.23.0 and PEFT 0.21.2, when rows of batches without padding came
to be in random order; sorted by length they give those of 2026-11-21 to 1e-6 (LOG.md). Those of pictures and of
pairs are of 2026-11-26, and those of rewards of 2026-11-29.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recipes.folders import DDP, FULL, LORA, PICTURES, PP, PREFERENCES, REWARDED, SP

Losses = tuple[list[float], list[float]]
"""Of training and of validation."""
SIX_STEPS = ("--max_steps", "6", "--eval_steps", "0.16", "--test_rows", "2")
ALL_ROWS = (*SIX_STEPS, "--train_rows", "819", "--validation_rows", "82", "--independent_judge", "none",
            "--train_sampling_strategy", "random")  # fmt: skip
SOME_ROWS = (*SIX_STEPS, "--train_rows", "96", "--validation_rows", "24", "--max_new_tokens", "1", "--batch_size",
             "16")  # fmt: skip
ADAPTERS = (*ALL_ROWS, "--lora_dropout", "0", "--batch_size")
WEIGHTS = (*ALL_ROWS, "--batch_size", "16", "--learning_rate", "1e-3")
OF_PICTURES = (*SOME_ROWS, "--independent_judge", "none", "--technique")
OF_ANSWERS = (*SIX_STEPS, "--train_rows", "96", "--validation_rows", "24", "--batch_size", "16", "--max_new_tokens",
              "40", "--technique")  # fmt: skip
OF_PAIRS = (*SOME_ROWS, "--learning_rate", "1e-3", "--technique")
LORA_LOSSES = (
    [8.521076, 8.37044, 6.558758, 5.208592, 4.264974, 3.915376],
    [8.514773, 8.514773, 6.487611, 5.022643, 4.292084, 3.974297, 3.88945],
)
FULL_LOSSES = (
    [8.521076, 8.37044, 7.361944, 6.405624, 5.43438, 5.281358],
    [8.514773, 8.514773, 7.325022, 6.374496, 5.745753, 5.426577, 5.34023],
)
PICTURED_LORA = (
    [9.742068, 9.306605, 10.512144, 5.449576, 4.681367, 5.829739],
    [10.620655, 10.620655, 7.712496, 6.350009, 5.393153, 4.974419, 4.835709],
)
PICTURED_FULL = (
    [9.742068, 9.306605, 11.250216, 7.095677, 6.340562, 8.396328],
    [10.620655, 10.620655, 9.289962, 8.24843, 7.59094, 7.30561, 7.2274],
)
PAIRED_LORA = (
    [0.693147, 0.693147, 0.535966, 0.358509, 0.273652, 0.23938],
    [0.693147, 0.693147, 0.505807, 0.381597, 0.291203, 0.235296, 0.219897],
)
PAIRED_FULL = (
    [0.693147, 0.693147, 0.621604, 0.517774, 0.480069, 0.456044],
    [0.693147, 0.693147, 0.597109, 0.527762, 0.48186, 0.458909, 0.452652],
)
REWARDED_FULL = (
    [0.166114, 0.103595, 0.110247, 0.10307, 0.093671, 0.110052],
    [-0.083333, -0.083333, -0.083333, -0.125, -0.208333, -0.375, -0.75],
)
"""Of answers that are sampled: near 0, as advantages are; and in validation minus the mean reward."""


@pytest.mark.parametrize(
    ("launcher", "folder", "recipe", "golden"),
    [
        pytest.param("python", LORA, (*ADAPTERS, "16"), LORA_LOSSES, id="LoRA"),
        pytest.param("torchrun", DDP, (*ADAPTERS, "8"), LORA_LOSSES, id="DDP", marks=pytest.mark.slow),
        pytest.param("python", FULL, WEIGHTS, FULL_LOSSES, id="full"),
        pytest.param("torchrun", PP, (*WEIGHTS, "--micro_batches", "8"), FULL_LOSSES, id="PP", marks=pytest.mark.slow),
        pytest.param("torchrun", SP, WEIGHTS, FULL_LOSSES, id="SP", marks=pytest.mark.slow),
        pytest.param("python", PICTURES, (*OF_PICTURES, "lora", "--lora_dropout", "0"), PICTURED_LORA, id="pictures"),
        pytest.param(
            "python", PICTURES, (*OF_PICTURES, "full"), PICTURED_FULL, id="pictures, full", marks=pytest.mark.slow
        ),
        pytest.param("python", PREFERENCES, (*OF_PAIRS, "lora"), PAIRED_LORA, id="pairs"),
        pytest.param("python", PREFERENCES, (*OF_PAIRS, "full"), PAIRED_FULL, id="pairs, full", marks=pytest.mark.slow),
        pytest.param("python", REWARDED, (*OF_ANSWERS, "full"), REWARDED_FULL, id="rewards, full"),
    ],
)
def test_the_first_losses_are_the_golden_ones(
    completed: Callable, launcher: str, folder: Path, recipe: tuple[str, ...], golden: Losses
) -> None:
    done = completed(launcher, *recipe, folder=folder)
    for kind, expected in zip(("training_losses", "validation_losses"), golden, strict=True):
        assert [loss for _, loss in done.record[kind]] == pytest.approx(expected, rel=1e-4)
