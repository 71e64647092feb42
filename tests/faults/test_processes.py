"""Ranks and launchers that are killed, stopped, or fail: the job ends soon, says why, leaves nobody, and can go on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from common.base.command_line import BAD_INPUT_EXIT_CODE
from common.base.paths import REPOSITORY
from common.runtime.launchers import KEEPS_NO_PORT, stream_command, torchrun_command
from common.runtime.watch import HUNG_EXIT_CODE
from common.training.checkpoints import MANIFEST_FILE, newest_whole, steps_at, verify
from tests.faults.cases import STEPS, cases
from tests.pace import patient

NOTICED_S, ENDED_S, GONE_S, FIRST_STEP_S = 2, 5, 5, 30
STEP_TIMEOUT_S, HUNG_S = 4, 10
"""Of the runs that hang here; and how much later than that they must be over."""
SILENCE_IS_SEEN_S = 6
"""A time-out after which a rank that was stopped has said nothing for longer than `common.runtime.watch.SILENT_S`."""
LAST = ("--resume_from_checkpoint", "last")
AT_STEP_4 = "rank=1 step=4 point=batch"
KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(
    "technique", cases(["ddp"], slow=["pp", "machines", "preferences", "rewards"], soak=["single", "fsdp"])
)
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
    assert ended_s < patient(ENDED_S)
    assert run.alive() == []
    if run.ranks > 1:  # seen by another rank, unless the launcher told that one first
        said = {"failed": "another rank is gone", "interrupted": "was told to end"}
        assert said[run.record["status"]] in run.record["error"]
    kept = newest_whole(run.results / "checkpoints")
    assert kept is not None
    done = steps_at(kept)
    assert done >= 3, "nothing that was complete is lost"
    lost_minutes = (killed_at - (kept / MANIFEST_FILE).stat().st_mtime) / 60

    again = start(technique, *LAST)
    first_step_s = again.wait_until(lambda: f"resumes after step {done}" in again.output, FIRST_STEP_S)
    record = again.finish()
    assert record["checkpoints"]["went_on_from"] == kept.name
    outcomes.keep(
        1,
        technique,
        f"resumes {first_step_s:.0f} s after its restart",
        noticed_s,
        ended_s,
        max(0, step - 1 - done),
        lost_minutes=lost_minutes,
        held_up_s=record["saves"]["longest_s"],
    )


@pytest.mark.parametrize(
    ("technique", "how"),
    cases(
        [("ddp", KILL)],
        slow=[("ddp", TERM), ("ddp", INT), ("fsdp", KILL), ("pp", TERM), ("machines", INT)],
        soak=[("fsdp", TERM), ("fsdp", INT), ("pp", KILL), ("pp", INT), ("machines", KILL), ("machines", TERM)],
    ),
)
def test_nobody_outlives_the_agent(
    start: Callable, outcomes: object, left_behind: Callable, technique: str, how: signal.Signals
) -> None:
    """Rank 1 hangs, so that the run cannot end by itself. One case has real processes instead of forks."""
    run = start(technique, fault="hang rank=1 step=2 point=batch", is_forked=(technique, how) != ("fsdp", KILL))
    run.wait_for_checkpoint(1)
    ports = run.ports()
    assert ports, "torchrun's store, and gloo's"
    assert ports <= set(left_behind(ports)), "the control: while it runs they are there"
    run.process.send_signal(how)
    gone_s = run.wait_until(lambda: not run.alive(), GONE_S)
    assert run.end(GONE_S) != 0
    assert verify(newest_whole(run.results / "checkpoints"))
    run.wait_until(lambda: left_behind(ports) == [], GONE_S)
    outcomes.keep(29, technique, f"{how.name} of torchrun: 0 processes left", ended_s=gone_s)


@pytest.mark.slow
def test_a_rank_whose_last_works_end_late_ends_well() -> None:
    worker = Path(__file__).with_name("last_works_worker.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = torchrun_command(str(worker), 2)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(120), check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("how", "fault"), cases([(INT, 28)], slow=[(KILL, 29)]))
def test_nobody_outlives_a_kernel(
    start: Callable, outcomes: object, left_behind: Callable, how: signal.Signals, fault: int
) -> None:
    """A process that starts ranks as a notebook's cell does; killed, or its cell interrupted."""
    run = start("ddp", is_in_cell=True)
    run.wait_for_checkpoint(1)
    below, ports = psutil.Process(run.process.pid).children(recursive=True), run.ports()
    run.process.send_signal(how)
    gone_s = run.wait_until(lambda: not any(each.is_running() and each.status() != "zombie" for each in below), GONE_S)
    assert run.end(GONE_S) != 0
    assert how == KILL or run.record["status"] == "interrupted", (run.record["error"], run.record["failed_rank"])
    run.wait_until(lambda: left_behind(ports) == [], GONE_S)
    outcomes.keep(fault, "ddp", f"{how.name} of the kernel: 0 processes left", ended_s=gone_s)


@pytest.mark.parametrize(
    ("technique", "fault", "kind"),
    cases(
        [("ddp", 11, "stop"), ("single", 12, "hang")],
        slow=[("ddp", 12, "hang"), ("pp", 12, "hang"), ("sp", 12, "hang"), ("machines", 11, "stop")],
        soak=[("fsdp", 11, "stop"), ("fsdp", 12, "hang"), ("pp", 11, "stop"), ("machines", 12, "hang")],
    ),
)
def test_a_rank_that_hangs_is_named_and_all_are_ended(
    start: Callable, outcomes: object, technique: str, fault: int, kind: str
) -> None:
    timeout_s = round(patient(SILENCE_IS_SEEN_S if kind == "stop" else STEP_TIMEOUT_S))
    victim, is_alone = (0, True) if technique == "single" else (1, False)
    run = start(technique, "--step_timeout_s", str(timeout_s), fault=f"{kind} rank={victim} step=4 point=batch")
    run.wait_for_checkpoint(3)
    run.wait_until(lambda: run.place(victim)["step"] == 4, 10)
    hung_s = time.monotonic()
    run.wait_until(lambda: "Nothing moved" in run.output, timeout_s + HUNG_S)
    noticed_s = time.monotonic() - hung_s
    code = run.end(HUNG_S)
    assert code == HUNG_EXIT_CODE if is_alone else code != 0
    ended_s = time.monotonic() - hung_s
    assert ended_s < timeout_s + patient(HUNG_S)
    run.wait_until(lambda: not run.alive(), 1)
    assert f"rank {victim} (process {run.seen[victim].pid} on" in run.output
    assert "in step 4 at 'load' hangs" in run.output
    assert f"rank {victim}" in run.record["error"]
    assert run.newest_step() == 3
    said = f"{'ends itself' if is_alone else 'rank 1 is named; ended'}, with a time-out of {timeout_s} s"
    outcomes.keep(fault, technique, said, None if is_alone else noticed_s, ended_s, 4 - 1 - run.newest_step())


@pytest.mark.parametrize("technique", cases(["ddp"], soak=["fsdp", "pp"]))
def test_a_rank_that_does_not_start_is_named(start: Callable, outcomes: object, technique: str) -> None:
    """Machines that do not come have a time-out of their own (`tests/network/test_machines.py`)."""
    timeout_s = round(patient(STEP_TIMEOUT_S))
    run = start(technique, "--start_timeout_s", str(timeout_s), fault="hang rank=1 point=start")
    assert run.end(60) != 0
    assert f"Rank 1 did not start within {timeout_s} s (start_timeout_s)" in run.output
    assert not (run.results / "run_record.json").exists()
    outcomes.keep(12, technique, f"in its start: rank 1 is named, with a time-out of {timeout_s} s")


@pytest.mark.parametrize("technique", cases(["ddp"], slow=["pp"], soak=["fsdp", "machines"]))
def test_the_first_failure_is_the_one_that_is_reported(start: Callable, outcomes: object, technique: str) -> None:
    run = start(technique, fault=f"raise {AT_STEP_4}")
    run.wait_for_checkpoint(3)
    failed_s = time.monotonic()
    assert run.end(ENDED_S + 1) != 0
    ended_s = time.monotonic() - failed_s
    record = run.record
    assert (record["status"], record["failed_rank"], record["failed_step"]) == ("failed", 1, 3)
    assert "a fault on purpose, in step 4" in record["error"]
    assert run.alive() == []
    assert "Exception ignored" not in run.output, "whoever is told to end while it ends has said all"
    outcomes.keep(10, technique, "rank 1's error is in the record", ended_s=ended_s)


NO_STEP = {
    "nan": (23, "failed", "The gradients of step 4 are not finite", "the step is not taken, nothing is saved"),
    "oom": (24, "oom", "by the plan 4096 rows fit: pass --batch_size 4096", "recorded, with the batch that fits"),
}
"""By the kind of fault: its number, and the run's status, words and outcome."""


@pytest.mark.parametrize(
    ("technique", "kind"),
    cases(
        [("ddp", "nan"), ("ddp", "oom")],
        slow=[("pp", "nan"), ("machines", "nan")],
        soak=[("single", "nan"), ("single", "oom"), ("fsdp", "nan")],
    ),
)
def test_a_step_that_cannot_be_taken_stops_all_before_it(
    start: Callable, outcomes: object, technique: str, kind: str
) -> None:
    number, status, said, outcome = NO_STEP[kind]
    run = start(technique, fault=f"{kind} rank={0 if technique == 'single' else 1} step=4 point=batch")
    assert run.end(120) != 0
    assert said in run.output
    assert kind == "nan" or "Out of memory (rank" in run.output
    assert run.newest_step() == 3
    assert verify(run.results / "checkpoints" / "checkpoint-3")
    assert run.record["status"] == status
    outcomes.keep(number, technique, outcome)


@pytest.mark.parametrize("technique", cases(["single"], slow=["ddp"]))
def test_a_results_folder_has_one_owner_at_a_time(start: Callable, outcomes: object, technique: str) -> None:
    first = start(technique, fault="hang rank=0 step=2 point=batch")
    first.wait_for_checkpoint(1)
    second = start(technique)
    assert second.end(60) == (1 if technique == "ddp" else BAD_INPUT_EXIT_CODE), "torchrun has an exit code of its own"
    assert "Another run is writing to the results folder run" in second.output
    with pytest.raises(subprocess.TimeoutExpired):  # the negative control: without a time-out it goes on hanging
        first.process.wait(STEP_TIMEOUT_S + 1)
    assert len(first.alive()) == first.ranks
    assert first.newest_step() == 1
    first.kill()
    first.end(10)
    start(technique).finish()  # a lock goes with its process
    outcomes.keep(15, technique, "the second is refused")


@pytest.mark.parametrize("technique", cases(["single"], slow=["pp", "machines"], soak=["ddp", "fsdp"]))
def test_a_run_whose_steps_are_done_goes_on_to_its_end(start: Callable, completed: Callable, technique: str) -> None:
    (completed(technique) / "run_record.json").unlink()  # as if it had been killed before it was written
    again = start(technique, *LAST)
    assert again.finish()["validation_losses"][-1][0] == STEPS
    assert f"resumes after step {STEPS}" in again.output


def test_a_refused_resume_leaves_the_record_of_a_completed_run(start: Callable, completed: Callable) -> None:
    record = completed("single") / "run_record.json"
    before = record.read_bytes()
    again = start("single", "--train_rows", "32", *LAST)
    assert again.end(60) == BAD_INPUT_EXIT_CODE
    assert all(f"{rows} rows" in again.output for rows in (33, 32))
    assert record.read_bytes() == before


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [(TERM, 1, "was told to end (SIGTERM)"), (INT, 130, "error: interrupted; --resume_from_checkpoint last")],
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
@pytest.mark.parametrize(("technique", "who"), [("single", "this run"), ("ddp", "this rank")])
def test_a_run_whose_terminal_is_closed_says_so_and_leaves_a_record(start: Callable, technique: str, who: str) -> None:
    """torchrun passes the signal on to its ranks."""
    run = start(technique)
    run.wait_for_checkpoint(1)
    run.process.send_signal(signal.SIGHUP)
    assert run.end(ENDED_S) != 0
    assert f"error: {who} was told to end (SIGHUP)" in run.output
    assert "--resume_from_checkpoint last" in run.output
    assert run.record["status"] == "interrupted"
    assert run.alive() == []


@pytest.mark.slow
@pytest.mark.parametrize("is_own_start", [True, False], ids=["make run", "the pages' command"])
def test_on_one_machine_ranks_and_torchrun_read_nothing_from_the_network(
    start: Callable, monkeypatch: pytest.MonkeyPatch, is_own_start: bool
) -> None:
    """Whoever writes into torchrun's store has code run, and into the ranks' has them connect elsewhere."""
    monkeypatch.setenv(KEEPS_NO_PORT, str(int(is_own_start)))
    run = start("ddp", fault="hang rank=1 step=2 point=batch")
    run.wait_for_checkpoint(1)
    launcher = psutil.Process(run.process.pid)
    processes = (launcher, *launcher.children(recursive=True))
    found = [one for each in processes for one in each.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    to_network = [one.laddr.port for one in found if one.laddr.ip not in ("127.0.0.1", "::1")]
    assert len(found) > len(to_network), "gloo's, on the loopback"
    assert len(to_network) == (not is_own_start)
    for port in to_network:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))
        assert store.num_keys() <= 1, "none but its own"


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["ddp", "pp"])
def test_an_early_stop_goes_on_counting(start: Callable, technique: str) -> None:
    """Weights that do not change: the first validation is the best, and the fourth worse one is that of step 5."""
    settings = ("--early_stopping_patience", "4", "--learning_rate", "1e-30")
    assert start(technique, *settings, fault=f"kill {AT_STEP_4}").end(120) != 0
    record = start(technique, *settings, *LAST).finish()
    assert record["checkpoints"]["went_on_from"] == "checkpoint-3"
    assert record["validation_losses"][-1][0] == 5


@pytest.mark.slow
def test_of_a_damaged_newest_checkpoint_the_one_before_is_gone_on_from(start: Callable) -> None:
    run = start("single", fault="kill step=5 point=batch")
    assert run.end(120) != 0
    damaged = run.results / "checkpoints" / "checkpoint-4" / "shards" / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:100])
    again = start("single", *LAST)
    assert again.finish()["checkpoints"]["went_on_from"] == "checkpoint-3"
    assert "checkpoint-4 is damaged: shards/__0_0.distcp has 100 of" in again.output
    assert (run.results / "checkpoints" / "checkpoint-4.bad").is_dir()


def test_torchrun_starts_a_lost_rank_again_and_the_run_goes_on(
    start: Callable, outcomes: object, tmp_path: Path
) -> None:
    run = start("ddp", fault=f"kill rank=1 step=5 point=batch once={tmp_path / 'happened'}", restarts=1)
    assert run.finish()["checkpoints"]["went_on_from"] == "checkpoint-4"
    outcomes.keep(1, "ddp", "torchrun --max_restarts: resumes by itself", lost_steps=5 - 1 - 4)


def test_a_command_that_the_system_killed_is_said_to_be(outcomes: object) -> None:
    with pytest.raises(RuntimeError, match="was killed, possibly as memory ran out"):
        stream_command([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    outcomes.keep(25, "all", "said to be killed, possibly as memory ran out")
