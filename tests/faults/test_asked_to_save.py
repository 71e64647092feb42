"""A run that its scheduler asks to save and to end (SIGUSR1) does both after one step on all ranks, and resumes."""

import json
import re
import signal
from collections.abc import Callable

import pytest

from common.base.command_line import ASKED_TO_END_EXIT_CODE
from common.training.checkpoints import FULL_STATE, HOLDS, newest_whole, read_manifest, steps_at
from tests.faults.cases import STEPS, cases
from tests.faults.compare import largest_difference

ENDED_S, RUN_S = 15, 120
PASSED_ON = ("--signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
"""As `train.slurm` starts torchrun: what it gets it sends to its ranks, and waits for them."""
SELDOM = ("--save_steps", "0")
"""By minutes, of which no test takes as many."""
LONGER, LONGER_STEPS = ("--num_train_epochs", "3"), 9
"""Else it might be over before it hears of the signal."""
SAVED = "saved after step {step}, as asked by {by}; --resume_from_checkpoint last resumes there."
NOTHING_SAVED = "ended before step 1 of training, as asked by SIGUSR1: nothing was to be saved."
LOSSES = ("training_losses", "validation_losses")


def errors(output: str) -> list[str]:
    return re.findall(r"^.*error: (.*)$", output, re.MULTILINE)


@pytest.mark.parametrize("technique", cases(["single"], slow=["ddp", "pp", "machines"], soak=["fsdp"]))
def test_a_run_that_is_asked_saves_ends_and_resumes_exactly(
    start: Callable, straight: Callable, technique: str
) -> None:
    run = start(technique, *SELDOM, *LONGER, launcher=PASSED_ON)
    run.wait_until(lambda: run.place(0)["step"] > 1 or run.process.poll() is not None, 90)
    run.workers()
    run.process.send_signal(signal.SIGUSR1)
    code = run.end(ENDED_S)
    assert code == ASKED_TO_END_EXIT_CODE if technique == "single" else code != 0
    assert run.alive() == []
    record = run.record
    step = record["failed_step"]
    assert errors(run.output) == [SAVED.format(step=step, by="SIGUSR1")]
    assert (record["status"], record["failed_phase"]) == ("interrupted", "training")
    assert "final evaluation ..." not in run.output
    kept = newest_whole(run.results / "checkpoints")
    assert (steps_at(kept), read_manifest(kept)["about"][HOLDS]) == (step, FULL_STATE)

    again = start(technique, *SELDOM, *LONGER, "--resume_from_checkpoint", "last")
    resumed, like = again.finish(), straight(technique, *LONGER)
    assert resumed["checkpoints"]["went_on_from"] == kept.name
    expected = json.loads((like / "run_record.json").read_text())
    assert [resumed[name] for name in LOSSES] == [expected[name] for name in LOSSES]
    ends = [results / "checkpoints" / f"checkpoint-{LONGER_STEPS}" for results in (like, again.results)]
    assert largest_difference(*ends) == 0


@pytest.mark.parametrize("technique", cases(["single"], slow=["ddp"]))
def test_a_run_pauses_after_the_step_it_is_told_and_resumes_exactly(
    start: Callable, straight: Callable, technique: str
) -> None:
    run = start(technique, *SELDOM, *LONGER, "--pause_at_step", "5")
    assert run.end(RUN_S) != 0
    assert set(errors(run.output)) == {SAVED.format(step=5, by="--pause_at_step")}
    assert steps_at(newest_whole(run.results / "checkpoints")) == 5
    resumed = start(technique, *SELDOM, *LONGER, "--resume_from_checkpoint", "last").finish()
    expected = json.loads((straight(technique, *LONGER) / "run_record.json").read_text())
    assert [resumed[name] for name in LOSSES] == [expected[name] for name in LOSSES]


BETWEEN_MEETINGS = ("ask rank=1 step=3 point=batch", ("--eval_steps", "5"), 4)
IN_A_VALIDATION = ("ask rank=0 step=4 point=validation", (), 3)
IN_THE_LAST_STEP = (f"ask rank=1 step={STEPS} point=batch", ("--eval_steps", "5"), STEPS)
BEFORE_TRAINING = ("ask point=start", (), 0)


@pytest.mark.parametrize(
    ("technique", "fault", "settings", "step"),
    cases(
        slow=[("ddp", *BETWEEN_MEETINGS), ("pp", *IN_A_VALIDATION), ("ddp", *IN_THE_LAST_STEP),
              ("single", *BEFORE_TRAINING)],
        soak=[("pp", *BETWEEN_MEETINGS), ("ddp", *IN_A_VALIDATION), ("pp", *IN_THE_LAST_STEP)],
    ),
)  # fmt: skip
def test_all_save_after_the_same_step_where_one_was_asked(
    start: Callable, technique: str, fault: str, settings: tuple[str, ...], step: int
) -> None:
    run = start(technique, *SELDOM, *settings, fault=fault)
    code = run.end(RUN_S)
    assert code == ASKED_TO_END_EXIT_CODE if technique == "single" else code != 0
    assert errors(run.output) == [SAVED.format(step=step, by="SIGUSR1") if step else NOTHING_SAVED]
    assert run.record["status"] == "interrupted"
    kept = newest_whole(run.results / "checkpoints")
    assert (steps_at(kept) if kept else 0) == step


@pytest.mark.slow
def test_a_run_that_is_asked_after_training_goes_on_to_its_end(start: Callable) -> None:
    run = start("single")
    run.wait_until(lambda: "save and reload ..." in run.output, 90)
    run.process.send_signal(signal.SIGUSR1)
    run.finish()
    assert run.record["status"] == "completed"
