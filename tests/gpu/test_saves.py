"""Large checkpoints that are written while a GPU goes on: a run that is killed meanwhile resumes exactly."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.conftest import folder_with, losses_of
from tests.recipes.folders import FULL

AS_IF_LARGE = "import common.training.saver; common.training.saver.LITTLE_BYTES = 0"
"""What has a workflow write its checkpoints in the background however small they are."""


@pytest.fixture
def large_saves(rehearses: bool, tmp_path: Path) -> Path:
    """The folder of full fine-tuning; in a rehearsal one with a workflow that takes small checkpoints for large."""
    return folder_with(next(FULL.glob("my_workflow_*.py")), tmp_path / "large", AS_IF_LARGE) if rehearses else FULL


def test_killed_while_it_saves_a_run_resumes_from_the_save_before(
    trained: Callable, run_workflow: Callable, large_saves: Path, shape: Callable, device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of 1.2 billion weights in bf16 a full state has 7 GiB. That of step 4 is not committed within step 5."""
    rate = "3e-4" if device == "cuda" else "3e-2"
    recipe = ("--model", shape("llama-3.2-1b"), "--weights", "random", "--target_modules", "all", "--precision", "bf16",
              "--learning_rate", rate, "--batch_size", "4", "--max_steps", "6", "--eval_steps", "0.33")  # fmt: skip
    straight = trained(*recipe, "--save_steps", "6", folder=large_saves, name="straight")
    expected = losses_of(straight)
    shutil.rmtree(straight.results)  # three full states and a model would be left on the disk
    first, *_, last = expected
    assert first > 1.05 * last, "the losses stay, and would tell nothing"
    stopped = {"folder": large_saves, "name": "stopped"}
    monkeypatch.setenv("FAULT", "kill step=5 point=update")
    killed = run_workflow(
        "python", "--independent_judge", "none", "--device", device, *recipe, "--save_steps", "2", **stopped
    )
    assert killed.exit_code == -signal.SIGKILL, killed.output
    assert "training goes on meanwhile" in killed.output
    monkeypatch.delenv("FAULT")
    resumed = trained(*recipe, "--save_steps", "2", "--resume_from_checkpoint", "last", **stopped)
    assert resumed.record["checkpoints"]["went_on_from"] == "checkpoint-2"
    assert resumed.record["saves"]["full_states"] == 2
    assert losses_of(resumed) == pytest.approx(expected, rel=5e-3)
