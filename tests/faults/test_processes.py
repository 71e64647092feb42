"""Ranks and launchers that are killed, stopped, or fail: the job ends soon, says why, leaves nobody, and can go on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from common.base.command_line import BAD_INPUT_EXIT_CODE
from common.base.paths import REPOSITORY
from common.runtime.launchers import stream_command, torchrun_command
from common.runtime.watch import HUNG_EXIT_CODE
from common.training.checkpoints import MANIFEST_FILE, newest_whole, verify
from tests.forked import CUT_SHORT, Forked

TECHNIQUES = ("single", "ddp", "fsdp", "pp", "machines")
SEVERAL_RANKS = TECHNIQUES[1:]
WITH_REFERENCE = "preferences"
"""Full fine-tuning on pairs by DDP: what its reference found is found again when a run goes on."""


def first(fast: str, techniques: tuple[str, ...]) -> list:
    """All of them; in `make test` one alone, where they share the code that is tested."""
    return [each if each == fast else pytest.param(each, marks=pytest.mark.slow) for each in techniques]


NOTICED_S, ENDED_S, GONE_S, FIRST_STEP_S = 2, 5, 5, 30
STEP_TIMEOUT_S, HUNG_S = 4, 10
"""Of the runs that hang here; and how much later than that they must be over."""
SILENCE_IS_SEEN_S = 6
"""A time-out after which a rank that was stopped has said nothing for longer than `common.runtime.watch.SILENT_S`."""


@pytest.mark.parametrize("technique", first("ddp", (*TECHNIQUES, WITH_REFERENCE)))
def test_a_killed_rank_ends_the_job_and_the_run_goes_on(start: Callable, outcomes: object, technique: str) -> None:
    run = start(technique)
    run.wait_for_checkpoint(3)
    victim = run.ranks - 1
    step = run.place(victim)["step"]
    run.workers()[victim].kill()
    killed_s, killed_at = time.monotonic(), time.time()
    said = ("error:", "closing signal")  # by another rank, or by the launcher
    run.wait_until(lambda: any(word in run.output for word in said) or run.process.poll() is not None, NOTICED_S)
    noticed_s = time.monotonic() - killed_s
    assert run.end(ENDED_S) != 0
    ended_s = time.monotonic() - killed_s
    assert ended_s < ENDED_S
    assert run.alive() == []
    if run.ranks > 1:  # seen by another rank, unless the launcher told that one first
        said = {"failed": "another rank is gone", "interrupted": "was told to end"}
        assert said[run.record["status"]] in run.record["error"]
    kept = newest_whole(run.results / "checkpoints")
    assert kept is not None
    done = int(kept.name.partition("-")[2])
    assert done >= 3, "nothing that was complete is lost"
    lost_minutes = (killed_at - (kept / MANIFEST_FILE).stat().st_mtime) / 60

    again = start(technique, "--resume_from_checkpoint", "last")
    first_step_s = again.wait_until(lambda: f"resumes after step {done}" in again.output, FIRST_STEP_S)
    assert again.end(120) == 0, again.output[-3000:]
    assert again.record["status"] == "completed"
    assert again.record["checkpoints"]["went_on_from"] == kept.name
    lost = max(0, step - 1 - done)
    held_up_s = again.record["saves"]["longest_s"]
    outcomes.keep(
        1,
        technique,
        f"resumes {first_step_s:.0f} s after its restart",
        noticed_s,
        ended_s,
        lost,
        lost_minutes=lost_minutes,
        held_up_s=held_up_s,
    )


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("technique", first("ddp", SEVERAL_RANKS))
def test_nobody_outlives_the_agent(
    start: Callable, outcomes: object, left_behind: Callable, technique: str, how: signal.Signals
) -> None:
    """Rank 1 hangs, so that the run cannot end by itself. One case has real processes instead of forks."""
    is_forked = (technique, how) != ("fsdp", signal.SIGKILL)
    run = start(technique, fault="hang rank=1 step=2 point=batch", is_forked=is_forked)
    run.wait_for_checkpoint(1)
    ports = run.ports()
    assert ports, "torchrun's store, and gloo's"
    assert ports <= set(left_behind(ports)), "the control: while it runs they are there"
    run.process.send_signal(how)
    gone_s = run.wait_until(lambda: not run.alive(), GONE_S)
    assert run.process.wait(GONE_S) != 0
    assert verify(newest_whole(run.results / "checkpoints"))
    run.wait_until(lambda: left_behind(ports) == [], GONE_S)
    outcomes.keep(29, technique, f"{how.name} of torchrun: 0 processes left", ended_s=gone_s)


def test_a_rank_whose_last_works_end_late_ends_well() -> None:
    worker = Path(__file__).with_name("last_works_worker.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = torchrun_command(str(worker), 2)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


NOTEBOOK = """
from common.runtime.launchers import stream_command, torchrun_command
stream_command(torchrun_command({script!r}, 2, *{overrides!r}))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nobody_outlives_a_kernel(
    start: Callable, outcomes: object, left_behind: Callable, tmp_path: Path, how: signal.Signals
) -> None:
    """A process that starts ranks as a notebook's cell does; killed, or its cell interrupted."""
    run = start("ddp", name="never")  # for its place and settings
    run.kill()
    command = run.process.args
    script = next(number for number, word in enumerate(command) if str(word).endswith(".py"))
    overrides = [*command[script + 1 :], "--run_name", "cell"]
    (tmp_path / "cell.py").write_text(NOTEBOOK.format(script=command[script], overrides=overrides))
    folder = next(REPOSITORY.glob("2.2_*/run_0_cpu_x2"))
    env = {**os.environ, CUT_SHORT: "1"}
    kernel = Forked([sys.executable, str(tmp_path / "cell.py")], folder, env, tmp_path / "cell.log")
    run.results, run.log, run.process, run.seen = run.results.parent / "cell", tmp_path / "cell.log", kernel, {}
    run.wait_for_checkpoint(1)
    below, ports = psutil.Process(kernel.pid).children(recursive=True), run.ports()
    kernel.send_signal(how)
    gone_s = run.wait_until(lambda: not any(each.is_running() and each.status() != "zombie" for each in below), GONE_S)
    assert kernel.wait(GONE_S) != 0
    if how == signal.SIGINT:
        assert run.record["status"] == "interrupted"
    run.wait_until(lambda: left_behind(ports) == [], GONE_S)
    fault = 28 if how == signal.SIGINT else 29
    outcomes.keep(fault, "ddp", f"{how.name} of the kernel: 0 processes left", ended_s=gone_s)


@pytest.mark.parametrize(("fault", "kind"), [(11, "stop"), (12, "hang")])
@pytest.mark.parametrize("technique", first("ddp", SEVERAL_RANKS))
def test_a_rank_that_hangs_is_named_and_all_are_ended(
    start: Callable, outcomes: object, technique: str, fault: int, kind: str
) -> None:
    timeout_s = SILENCE_IS_SEEN_S if kind == "stop" else STEP_TIMEOUT_S
    run = start(technique, "--step_timeout_s", str(timeout_s), fault=f"{kind} rank=1 step=4 point=batch")
    run.wait_for_checkpoint(3)
    run.wait_until(lambda: run.place(1)["step"] == 4, 10)
    hung_s = time.monotonic()
    run.wait_until(lambda: "Nothing moved" in run.output, timeout_s + HUNG_S)
    noticed_s = time.monotonic() - hung_s
    assert run.end(timeout_s + HUNG_S - noticed_s) != 0
    ended_s = time.monotonic() - hung_s
    run.wait_until(lambda: not run.alive(), 1)
    assert f"rank 1 (process {run.seen[1].pid} on" in run.output
    assert "in step 4 at 'load' hangs" in run.output
    assert "rank 1" in run.record["error"]
    assert run.newest_step() == 3
    said = f"rank 1 is named; ended, with a time-out of {timeout_s} s"
    outcomes.keep(fault, technique, said, noticed_s, ended_s, 4 - 1 - run.newest_step())


@pytest.mark.parametrize("technique", first("ddp", ("ddp", "fsdp", "pp")))
def test_a_rank_that_does_not_start_is_named(start: Callable, outcomes: object, technique: str) -> None:
    """Machines that do not come have a time-out of their own (`tests/network/test_machines.py`)."""
    run = start(technique, "--start_timeout_s", str(STEP_TIMEOUT_S), fault="hang rank=1 point=start")
    assert run.end(60) != 0
    assert f"Rank 1 did not start within {STEP_TIMEOUT_S} s (start_timeout_s)" in run.output
    assert not (run.results / "run_record.json").exists()
    outcomes.keep(12, technique, f"in its start: rank 1 is named, with a time-out of {STEP_TIMEOUT_S} s")


def test_one_process_that_hangs_ends_itself(start: Callable, outcomes: object) -> None:
    run = start("single", "--step_timeout_s", str(STEP_TIMEOUT_S), fault="hang step=4 point=batch")
    run.wait_for_checkpoint(3)
    run.wait_until(lambda: run.place(0)["step"] == 4, 10)
    hung_s = time.monotonic()
    assert run.end(STEP_TIMEOUT_S + HUNG_S) == HUNG_EXIT_CODE
    ended_s = time.monotonic() - hung_s
    assert "rank 0" in run.record["error"]
    said = f"ends itself, with a time-out of {STEP_TIMEOUT_S} s"
    outcomes.keep(12, "single", said, ended_s=ended_s, lost_steps=4 - 1 - run.newest_step())


@pytest.mark.slow
def test_without_a_time_out_it_would_go_on_hanging(start: Callable) -> None:
    """The negative control."""
    run = start("ddp", fault="hang rank=1 step=4 point=batch")
    run.wait_for_checkpoint(3)
    with pytest.raises(subprocess.TimeoutExpired):
        run.end(STEP_TIMEOUT_S + 4)
    assert len(run.alive()) == 2


@pytest.mark.parametrize("technique", first("ddp", SEVERAL_RANKS))
def test_the_first_failure_is_the_one_that_is_reported(start: Callable, outcomes: object, technique: str) -> None:
    run = start(technique, fault="raise rank=1 step=4 point=batch")
    run.wait_for_checkpoint(3)
    failed_s = time.monotonic()
    assert run.end(ENDED_S + 1) != 0
    ended_s = time.monotonic() - failed_s
    record = run.record
    assert record["status"] == "failed"
    assert (record["failed_rank"], record["failed_step"]) == (1, 3)
    assert "a fault on purpose, in step 4" in record["error"]
    assert run.alive() == []
    assert "Exception ignored" not in run.output, "whoever is told to end while it ends has said all"
    outcomes.keep(10, technique, "rank 1's error is in the record", ended_s=ended_s)


@pytest.mark.parametrize("technique", first("ddp", TECHNIQUES))
def test_a_loss_that_is_no_number_stops_all_before_the_step(start: Callable, outcomes: object, technique: str) -> None:
    run = start(technique, fault=f"nan rank={0 if technique == 'single' else 1} step=4 point=batch")
    assert run.end(120) != 0
    assert "The gradients of step 4 are not finite" in run.output
    assert run.newest_step() == 3
    assert verify(run.results / "checkpoints" / "checkpoint-3")
    assert run.record["status"] == "failed"
    outcomes.keep(23, technique, "the step is not taken, nothing is saved")


@pytest.mark.parametrize("technique", first("ddp", ("single", "ddp")))
def test_out_of_memory_says_what_was_tried_and_what_fits(start: Callable, outcomes: object, technique: str) -> None:
    run = start(technique, fault=f"oom rank={0 if technique == 'single' else 1} step=4 point=batch")
    assert run.end(120) != 0
    assert "Out of memory (rank" in run.output
    assert "by the plan 4096 rows fit: pass --batch_size 4096" in run.output
    assert run.record["status"] == "oom"
    outcomes.keep(24, technique, "recorded, with the batch that fits")


@pytest.mark.parametrize("technique", first("single", ("single", "ddp")))
def test_a_results_folder_has_one_owner_at_a_time(start: Callable, outcomes: object, technique: str) -> None:
    first = start(technique, fault="hang rank=0 step=2 point=batch")
    first.wait_for_checkpoint(1)
    second = start(technique)
    assert second.end(60) == (1 if technique == "ddp" else BAD_INPUT_EXIT_CODE), "torchrun has an exit code of its own"
    assert "Another run is writing to the results folder run" in second.output
    assert first.process.poll() is None
    assert first.newest_step() == 1
    first.kill()
    first.end(10)
    assert start(technique).end(120) == 0, "a lock goes with its process"
    outcomes.keep(15, technique, "the second is refused")


@pytest.mark.parametrize("technique", first("single", TECHNIQUES))
def test_a_run_whose_steps_are_done_goes_on_to_its_end(start: Callable, completed: Callable, technique: str) -> None:
    (completed(technique) / "run_record.json").unlink()  # as if it had been killed before it was written
    again = start(technique, "--resume_from_checkpoint", "last")
    assert again.end(120) == 0, again.output[-3000:]
    assert "resumes after step 10" in again.output
    assert again.record["status"] == "completed"
    assert again.record["validation_losses"][-1][0] == 10


@pytest.mark.slow
def test_of_a_damaged_newest_checkpoint_the_one_before_is_gone_on_from(start: Callable) -> None:
    run = start("single", fault="kill step=5 point=batch")
    assert run.end(120) != 0
    damaged = run.results / "checkpoints" / "checkpoint-4" / "adapter_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:100])
    again = start("single", "--resume_from_checkpoint", "last")
    assert again.end(120) == 0, again.output[-3000:]
    assert "checkpoint-4 is damaged: adapter_model.safetensors has 100 of" in again.output
    assert again.record["checkpoints"]["went_on_from"] == "checkpoint-3"
    assert (run.results / "checkpoints" / "checkpoint-4.bad").is_dir()


def test_a_refused_resume_leaves_the_record_of_a_completed_run(start: Callable, completed: Callable) -> None:
    record = completed("single") / "run_record.json"
    before = record.read_bytes()
    again = start("single", "--train_rows", "64", "--resume_from_checkpoint", "last")
    assert again.end(60) == BAD_INPUT_EXIT_CODE
    assert "65 training rows, but this run has 64" in again.output
    assert again.record["status"] == "completed"
    assert record.read_bytes() == before


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        (signal.SIGTERM, 1, "was told to end (SIGTERM)"),
        (signal.SIGINT, 130, "error: interrupted; --resume_from_checkpoint last"),
    ],
)
def test_a_run_that_is_told_to_end_says_so_and_leaves_a_record(
    start: Callable, how: signal.Signals, code: int, said: str
) -> None:
    run = start("single")
    run.wait_for_checkpoint(1)
    run.process.send_signal(how)
    assert run.end(ENDED_S) == code
    assert said in run.output
    assert "Traceback" not in run.output
    assert run.record["status"] == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["ddp", "pp"])
def test_an_early_stop_goes_on_counting(start: Callable, technique: str) -> None:
    """Weights that do not change: the first validation is the best, and the fourth worse one is that of step 5."""
    settings = ("--early_stopping_patience", "4", "--learning_rate", "1e-30")
    assert start(technique, *settings, fault="kill rank=1 step=4 point=batch").end(120) != 0
    again = start(technique, *settings, "--resume_from_checkpoint", "last")
    assert again.end(120) == 0, again.output[-3000:]
    assert again.record["checkpoints"]["went_on_from"] == "checkpoint-3"
    assert again.record["validation_losses"][-1][0] == 5


def test_torchrun_starts_a_lost_rank_again_and_the_run_goes_on(
    start: Callable, outcomes: object, tmp_path: Path
) -> None:
    run = start("ddp", fault=f"kill rank=1 step=5 point=batch once={tmp_path / 'happened'}", restarts=1)
    assert run.end(180) == 0, run.output[-3000:]
    assert run.record["status"] == "completed"
    assert run.record["checkpoints"]["went_on_from"] == "checkpoint-4"
    outcomes.keep(1, "ddp", "torchrun --max_restarts: resumes by itself", lost_steps=5 - 1 - 4)


def test_a_command_that_the_system_killed_is_said_to_be(outcomes: object) -> None:
    with pytest.raises(RuntimeError, match="was killed, possibly as memory ran out"):
        stream_command([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    outcomes.keep(25, "all", "said to be killed, possibly as memory ran out")
