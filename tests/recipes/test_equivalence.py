"""DDP on two ranks computes what one device computes: fp32, dropout off, the same uneven and padded rows.

65 rows at a global batch of 16 leave one row for the last step, so that one rank has none.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.run_config import REPOSITORY
from common.run_record import Record

SINGLE = REPOSITORY / "2.1_lora_finetuning" / "run_0_cpu_x1"
DDP = REPOSITORY / "2.2_lora_finetuning_with_ddp" / "run_0_cpu_x2"
ROWS = ("--train_rows", "65", "--test_rows", "9")
EVERY_STEP = ("--lora_dropout", "0", "--epochs", "4")
SGD = (*EVERY_STEP, "--optimizer", "sgd", "--learning_rate", "0.05", "--max_steps", "5", "--report_share", "0.2")


def losses(record: Record) -> list[float]:
    return [loss for _, loss in record["training_losses"]]


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def test_sgd_weights_and_losses_equal_one_devices(run_several: Callable, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    one = run_several(tmp_path / "one", {"one": (SINGLE, (*ROWS, *SGD, "--batch_size", "16"))}, 1)["one"]
    of_two_ranks = {
        "two": ("--batch_size", "8"),
        "accumulated": ("--batch_size", "4", "--accumulation_steps", "2"),
        "other": ("--batch_size", "8", "--seed", "7"),
    }
    runs = run_several(tmp_path, {name: (DDP, (*ROWS, *SGD, *own)) for name, own in of_two_ranks.items()}, 2)
    assert len(one.losses("training_losses")) == 5
    for name in ("two", "accumulated"):
        for kind in ("training_losses", "validation_losses"):
            assert runs[name].losses(kind) == pytest.approx(one.losses(kind), rel=1e-5)
        assert largest_difference(one.weights(5), runs[name].weights(5)) < 1e-5
    # The control: another order of rows is told apart.
    assert largest_difference(one.weights(5), runs["other"].weights(5)) > 1e-4


@pytest.mark.slow
def test_adamw_losses_equal_one_devices_over_20_steps(run_workflow: Callable) -> None:
    settings = (*EVERY_STEP, "--learning_rate", "1e-3", "--max_steps", "20", "--report_share", "0.05")
    one = run_workflow("python", *settings, "--batch_size", "16", name="one")
    two = run_workflow("torchrun", *settings, "--batch_size", "8", name="two")
    assert (one.exit_code, two.exit_code) == (0, 0), one.output + two.output
    assert len(losses(one.record)) == 20
    assert losses(two.record) == pytest.approx(losses(one.record), rel=1e-5)
    assert losses(one.record)[-1] < losses(one.record)[0]
