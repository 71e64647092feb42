"""A run that its scheduler asks to save and to end (SIGUSR1) does both after one step on all ranks, and resumes."""

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from common.base.command_line import ASKED_TO_END_EXIT_CODE
from common.training.checkpoints import FULL_STATE, HOLDS, newest_whole, read_manifest

STEPS, ENDED_S, RUN_S = 10, 15, 120
PASSED_ON = ("--signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
"""As `train.slurm` starts torchrun: what it gets it sends to its ranks, and waits for them."""
SELDOM = ("--save_steps", "0")
"""By minutes, of which no test takes as many."""
OTHERS = [pytest.param(each, marks=pytest.mark.slow) for each in ("single", "fsdp", "pp", "machines")]


def errors(output: str) -> list[str]:
    return re.findall(r"^.*error: (.*)$", output, re.MULTILINE)


def saved_after(output: str) -> int:
    """The step that its only error names."""
    (said,) = errors(output)
    asked = re.fullmatch(
        r"saved after step (\d+), as asked by SIGUSR1; --resume_from_checkpoint last resumes there\.", said
    )
    assert asked, said
    return int(asked[1])


def check_resumed(again: object, straight: Path, largest_difference: Callable, step: int) -> None:
    """It went on after that step, and is now where a run is that nothing happened to."""
    assert again.end(RUN_S) == 0, again.output[-3000:]
    record, of_straight = again.record, (straight / "run_record.json")
    assert record["status"] == "completed"
    assert record["checkpoints"]["went_on_from"] == f"checkpoint-{step}"
    expected = type(again)(None, straight, of_straight, again.ranks).record
    for name in ("training_losses", "validation_losses"):
        assert record[name] == expected[name]
    ends = [results / "checkpoints" / f"checkpoint-{STEPS}" for results in (straight, again.results)]
    assert largest_difference(*ends) == 0


@pytest.mark.parametrize("technique", ["ddp", *OTHERS])
def test_a_run_that_is_asked_saves_ends_and_resumes_exactly(
    start: Callable, straight: Callable, largest_difference: Callable, technique: str
) -> None:
    run = start(technique, *SELDOM, launcher=PASSED_ON)
    run.wait_until(lambda: run.place(0)["step"] > 1 or run.process.poll() is not None, 90)
    run.workers()
    run.process.send_signal(signal.SIGUSR1)
    code = run.end(ENDED_S)
    assert code == ASKED_TO_END_EXIT_CODE if technique == "single" else code != 0
    assert run.alive() == []
    step = saved_after(run.output)
    assert run.record["status"] == "interrupted"
    assert (run.record["failed_phase"], run.record["failed_step"]) == ("training", step)
    assert "final evaluation ..." not in run.output
    kept = newest_whole(run.results / "checkpoints")
    assert kept.name == f"checkpoint-{step}"
    assert read_manifest(kept)["about"][HOLDS] == FULL_STATE
    again = start(technique, *SELDOM, "--resume_from_checkpoint", "last")
    check_resumed(again, straight(technique), largest_difference, step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "settings", "step"),
    [
        ("ask rank=1 step=3 point=batch", ("--eval_steps", "9"), 4),
        ("ask rank=0 step=4 point=validation", (), 3),
        ("ask rank=1 step=10 point=batch", ("--eval_steps", "9"), 10),
    ],
    ids=["between meetings", "in a validation", "in the last step"],
)
@pytest.mark.parametrize("technique", ["ddp", "pp"])
def test_all_save_after_the_same_step_where_one_was_asked(
    start: Callable, technique: str, fault: str, settings: tuple[str, ...], step: int
) -> None:
    run = start(technique, *SELDOM, *settings, fault=fault)
    assert run.end(RUN_S) != 0
    assert f"error: saved after step {step}, as asked by SIGUSR1" in run.output
    assert run.record["status"] == "interrupted"
    assert newest_whole(run.results / "checkpoints").name == f"checkpoint-{step}"


@pytest.mark.slow
def test_a_run_that_is_asked_before_training_ends_there(start: Callable) -> None:
    run = start("single", fault="ask point=start")
    assert run.end(RUN_S) == ASKED_TO_END_EXIT_CODE
    assert errors(run.output) == ["ended before step 1 of training, as asked by SIGUSR1: nothing was to be saved."]
    assert run.record["status"] == "interrupted"
    assert newest_whole(run.results / "checkpoints") is None


@pytest.mark.slow
def test_a_run_that_is_asked_after_training_goes_on_to_its_end(start: Callable) -> None:
    run = start("single")
    run.wait_until(lambda: "merge and reload ..." in run.output, 90)
    run.process.send_signal(signal.SIGUSR1)
    assert run.end(RUN_S) == 0, run.output[-3000:]
    assert run.record["status"] == "completed"
