"""What starts ranks keeps to this user, and a process is told all that a launcher tells a rank, or nothing of it."""

import os
import stat
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from common import launch
from common.base.command_line import BAD_INPUT_EXIT_CODE, ended_by_one_sentence, refused_in_one_sentence
from common.base.errors import BadInputError, RunStoppedError
from common.base.launched import MEETING_PLACE, MPI_SIZES, RUN_ID, TOLD, TOLD_BY_TORCHRUN, check_told
from common.base.run_config import RunConfig
from common.checks import preflight
from common.checks.run_start import run_started
from common.runtime.launchers import ranks_command, torchrun_command
from common.runtime.rank import start_command
from common.runtime.torchrun import KEPT_S, folder_of_user, meeting_file, nodes_command

BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
BY_TORCHRUN = BY_HAND | {
    "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0", RUN_ID: "none",
}  # fmt: skip


def without(told: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in told.items() if name not in names}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BY_HAND,
        BY_TORCHRUN,
        BY_TORCHRUN | {"WORLD_SIZE": "8", "RANK": "5", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
        {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
        {"MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "False"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "1"},
    ],
    ids=[
        "alone",
        "by hand",
        "torchrun",
        "torchrun by srun",
        "a cluster's meeting place",
        "a run that has ended",
        "in a job of several tasks",
    ],
)
def test_an_environment_that_is_whole_is_taken(environment: dict[str, str]) -> None:
    check_told(environment)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        *(({name: BY_TORCHRUN[name]}, name) for name in BY_TORCHRUN if name not in MEETING_PLACE),
        *((without(BY_HAND, name), f"no {name}") for name in TOLD),
        *((without(BY_TORCHRUN, name), f"no {name}") for name in TOLD_BY_TORCHRUN),
        (BY_HAND | {"MASTER_ADDR": ""}, "no MASTER_ADDR"),
        *((BY_HAND | {name: text}, name) for name in without(BY_HAND, "MASTER_ADDR") for text in ("x", "-1", "1.5")),
        (BY_HAND | {"RANK": "9" * 5000}, "RANK"),
        (BY_HAND | {"RANK": "5"}, "RANK"),
        (BY_HAND | {"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        (BY_HAND | {"RANK": "0"}, "LOCAL_RANK"),
        (BY_HAND | {"MASTER_PORT": "70000"}, "MASTER_PORT"),
        (BY_TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE"),
        (BY_TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK"),
        (BY_TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "many"}, "TORCHELASTIC_MAX_RESTARTS"),
        *(({name: size}, name) for name in MPI_SIZES for size in ("2", "x")),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "SLURM_PROCID"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS"),
    ],
)
def test_half_an_environment_or_values_of_no_rank_are_refused_by_name(
    environment: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: False)
    with pytest.raises(BadInputError, match=named) as refused:
        check_told(environment)
    assert "unset" in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("left", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
def test_what_another_launcher_left_is_said_at_once_whichever_rank_it_would_be(
    left: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of whatever begins a run: a workflow, a command that starts one, a notebook's cell; and of nothing else."""
    for name in BY_TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(left, "1")

    def begin() -> None:
        with ended_by_one_sentence():
            pytest.fail("it began")

    monkeypatch.setattr("common.launch.check_inputs", lambda run: pytest.fail("it began"))
    monkeypatch.setattr(sys, "argv", ["launch", "2.1_lora_finetuning/run_0_cpu_x1"])
    for command in (begin, launch.main, lambda: preflight.main(["2.1_lora_finetuning/run_0_cpu_x1"])):
        with pytest.raises(SystemExit) as ended:
            command()
        assert ended.value.code == BAD_INPUT_EXIT_CODE
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert left in said
    with pytest.raises(BadInputError, match=left), run_started(RunConfig()):
        pytest.fail("it began")
    for command in (launch.main, preflight.main):
        monkeypatch.setattr(sys, "argv", ["command", "2.1_lora_finetuning/run_0_cpu_x1", "--help"])
        with pytest.raises(SystemExit, match="0"):
            command()
    with refused_in_one_sentence():
        print("a report")


def test_a_torchrun_on_one_machine_meets_nobody_over_the_network() -> None:
    run = RunConfig(parallel="ddp", devices=2)
    for command in (
        nodes_command(1, 2),
        torchrun_command("script.py", 2),
        ranks_command(run, "script.py", []),
        start_command(run).split(),
    ):
        options = dict(pairwise(command))
        assert (options["--nproc_per_node"], options["--rdzv_conf"]) == ("2", "store_type=file")
        assert "--standalone" not in command
    assert "--rdzv_endpoint" in nodes_command(2, 2)


def test_the_folder_where_ranks_meet_is_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = folder_of_user()
    assert folder_of_user() == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(RunStoppedError, match="can be written by others"):
        folder_of_user()
    folder.rmdir()
    for make in (folder.touch, lambda: folder.symlink_to(tmp_path)):
        make()
        with pytest.raises(RunStoppedError, match="can be written by others"):
            folder_of_user()
        folder.unlink()


def test_what_killed_processes_left_where_ranks_meet_goes_with_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = Path(meeting_file())
    nobody = 2**22 + 1  # more than Linux counts processes to
    left, new, live = (own.parent / f"{process}-29500" for process in (nobody, nobody + 1, os.getpid()))
    for file, age_s in ((left, KEPT_S + 60), (new, 60), (live, KEPT_S + 60)):
        file.touch()
        os.utime(file, (file.stat().st_mtime - age_s,) * 2)
    assert set(own.parent.iterdir()) == {own, left, new, live}
    again = Path(meeting_file())
    assert set(own.parent.iterdir()) == {own, again, new, live}
    assert {stat.S_IMODE(file.stat().st_mode) for file in (own, again)} == {0o600}
