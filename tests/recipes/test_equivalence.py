"""DDP on two ranks computes what one device computes: fp32, dropout off, the same uneven and padded rows.

65 rows at a global batch of 16 leave one row for the last step, so that one rank has none.
"""

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file

from common.run_record import Record

EVERY_STEP = ("--lora_dropout", "0", "--epochs", "4")


def losses(record: Record, kind: str = "training_losses") -> list[float]:
    return [loss for _, loss in record[kind]]


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def test_sgd_weights_and_losses_equal_one_devices(run_workflow: Callable) -> None:
    settings = (
        *EVERY_STEP,
        "--optimizer",
        "sgd",
        "--learning_rate",
        "0.05",
        "--max_steps",
        "5",
        "--report_share",
        "0.2",
    )
    one = run_workflow("python", *settings, "--batch_size", "16", name="one")
    two = run_workflow("torchrun", *settings, "--batch_size", "8", name="two")
    accumulated = run_workflow(
        "torchrun", *settings, "--batch_size", "4", "--accumulation_steps", "2", name="accumulated"
    )
    other_rows = run_workflow("torchrun", *settings, "--batch_size", "8", "--seed", "7", name="other")
    weights = {}
    for done in (one, two, accumulated, other_rows):
        assert done.exit_code == 0, done.output
        weights[done.results.name] = load_file(
            done.results / "checkpoints" / "checkpoint-5" / "adapter_model.safetensors"
        )
    assert len(losses(one.record)) == 5
    for done in (two, accumulated):
        for kind in ("training_losses", "validation_losses"):
            assert losses(done.record, kind) == pytest.approx(losses(one.record, kind), rel=1e-5)
        assert largest_difference(weights["one"], weights[done.results.name]) < 1e-5
    # The control: another order of rows is told apart.
    assert largest_difference(weights["one"], weights["other"]) > 1e-4


@pytest.mark.slow
def test_adamw_losses_equal_one_devices_over_20_steps(run_workflow: Callable) -> None:
    settings = (*EVERY_STEP, "--learning_rate", "1e-3", "--max_steps", "20", "--report_share", "0.05")
    one = run_workflow("python", *settings, "--batch_size", "16", name="one")
    two = run_workflow("torchrun", *settings, "--batch_size", "8", name="two")
    assert (one.exit_code, two.exit_code) == (0, 0), one.output + two.output
    assert len(losses(one.record)) == 20
    assert losses(two.record) == pytest.approx(losses(one.record), rel=1e-5)
    assert losses(one.record)[-1] < losses(one.record)[0]
