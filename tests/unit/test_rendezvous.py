"""Where members meet is found in four places, the first that says it counts; nonsense is refused in one sentence."""

import json
import os
import sys
from pathlib import Path

import pytest

from common.base.errors import BadInputError
from common.runtime.rendezvous import PORT, Meeting, find_meeting

TORCHRUN = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000", "RANK": "2", "WORLD_SIZE": "3"}
SLURM = {
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_JOB_ID": "1234567",
}
VALOHAI_SOURCE = "Valohai's distributed.json"


@pytest.fixture(autouse=True)
def nobody_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No source in this process's own environment."""
    for name in os.environ:
        if name.startswith(("SLURM_", "VH_", "TORCHELASTIC_")) or name in TORCHRUN:
            monkeypatch.delenv(name)


def set_all(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def distributed_task(folder: Path, own: str = "0", ids: tuple[str, ...] = ("0", "1", "2", "3")) -> dict[str, object]:
    """Valohai's file of a task with four members, as the machine of member `own` has it."""
    members = [
        {
            "announce_time": f"2026-11-22T10:00:0{number}+00:00",
            "identity": f"i-{member}",
            "job_id": f"exec-{member}",
            "member_id": member,
            "network": {"exposed_ports": {}, "local_ips": [f"10.0.0.{10 + number}"], "public_ips": []},
        }
        for number, member in enumerate(ids)
    ]
    config = {"group_name": "task-1", "member_id": own, "required_count": len(ids)}
    task = {"config": config, "members": members, "self": members[ids.index(own)]}
    (folder / "distributed.json").write_text(json.dumps(task))
    return task


@pytest.fixture
def valohai_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for Valohai's file, which its library reads."""
    monkeypatch.setenv("VH_CONFIG_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """SLURM's command first on PATH: it knows one list of hosts."""
    command = tmp_path / "scontrol"
    command.write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames gpu[07-09,12]" ] || { echo "Invalid hostlist: $3" >&2; exit 1; }\n'
        "printf 'gpu07\\ngpu08\\ngpu09\\ngpu12\\n'\n"
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return command


def refused(*static: object) -> str:
    with pytest.raises(BadInputError) as found:
        find_meeting(*static)
    assert "\n" not in str(found.value)
    return str(found.value)


# -- a static address


@pytest.mark.parametrize(
    ("master", "address", "port"),
    [("10.0.0.1", "10.0.0.1", PORT), ("10.0.0.1:4000", "10.0.0.1", 4000), ("gpu-1.lan:65535", "gpu-1.lan", 65535)],
)
def test_a_static_address_has_a_port_or_the_usual_one(master: str, address: str, port: int) -> None:
    assert find_meeting(master, 4, 3) == Meeting(address, port, 3, 4, "--master")


def test_address_port_and_source_are_said() -> None:
    said = str(find_meeting("10.0.0.1:4000", 4, 3))
    assert said == "rank 3 of 4 meets the others at 10.0.0.1:4000 (--master)"


@pytest.mark.parametrize("master", ["10.0.0.1:", "10.0.0.1:http", "gpu07:0", "gpu07:65536", ":4000", "::1", "a:²"])
def test_a_bad_address_is_refused(master: str) -> None:
    assert refused(master, 4, 0) == (
        f"master is {master!r}: pass ADDRESS or ADDRESS:PORT, such as 10.0.0.1:29500, with a port from 1 to 65535."
    )


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_out_of_range_is_refused(rank: int) -> None:
    assert refused("10.0.0.1", 4, rank) == (
        f"This is rank {rank} of 4 (--master), but ranks go from 0 to 3: pass one of them by --machine_rank."
    )


def test_an_address_without_the_number_of_machines_is_refused() -> None:
    assert refused("10.0.0.1") == (
        "master is '10.0.0.1', but machines is 0: pass --machines with how many there are, and --machine_rank with "
        "which of them this is, from 0."
    )


def test_a_number_of_machines_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, TORCHRUN)  # it would win, and the options would be forgotten
    assert refused("", 4, 1) == (
        "machines is 4 and machine_rank 1, but there is no --master to meet at: pass --master ADDRESS:PORT, too, or "
        "leave both out where a launcher says them."
    )


def test_a_world_of_one_has_nobody_to_average_with(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = (
        "but gradients are averaged among at least two: start more machines, or train on one by "
        "my_workflow_summarization_torchrun.py."
    )
    assert refused("10.0.0.1", 1, 0) == f"There is a world of 1 (--master), {rest}"
    set_all(monkeypatch, {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"})
    assert refused() == f"There is a world of 1 (torchrun's environment), {rest}"


# -- torchrun's environment


def test_torchruns_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, TORCHRUN)
    assert find_meeting() == Meeting("10.0.0.1", 4000, 2, 3, "torchrun's environment")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert find_meeting() == Meeting("10.0.0.1", 4000, 2, 3, "torchrun's environment", has_store=True)


@pytest.mark.parametrize("name", TORCHRUN)
def test_half_of_torchruns_environment_is_none(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    set_all(monkeypatch, TORCHRUN)
    monkeypatch.delenv(name)
    assert refused().startswith("Nobody says where the machines meet")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "one", "RANK is 'one' in the environment, but should be a number: correct it."),
        (
            "MASTER_PORT",
            "65536",
            "MASTER_PORT is '65536' in the environment, but should be a port from 1 to 65535: correct or unset it.",
        ),
        (
            "RANK",
            "3",
            "This is rank 3 of 3 (torchrun's environment), but ranks go from 0 to 2: start it again by its launcher.",
        ),
    ],
)
def test_nonsense_in_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    set_all(monkeypatch, {**TORCHRUN, name: value})
    assert refused() == said


# -- Valohai


@pytest.mark.parametrize("own", ["0", "1", "2", "3"])
def test_a_distributed_valohai_task_is_read(valohai_folder: Path, own: str) -> None:
    distributed_task(valohai_folder, own)
    assert find_meeting() == Meeting("10.0.0.10", PORT, int(own), 4, VALOHAI_SOURCE)


@pytest.mark.parametrize(
    ("ids", "master"),
    [
        (("10", "9", "8", "11"), "10.0.0.12"),  # as numbers, not as texts
        (("d", "10", "b", "9"), "10.0.0.11"),  # as texts, where one is no number
    ],
)
def test_members_rank_by_their_ids(valohai_folder: Path, ids: tuple[str, ...], master: str) -> None:
    meetings = []
    for own in ids:
        distributed_task(valohai_folder, own, ids)
        meetings.append(find_meeting())
    assert {meeting.address for meeting in meetings} == {master}
    assert sorted(meeting.rank for meeting in meetings) == [0, 1, 2, 3]
    assert meetings[ids.index("9")].rank == 1


def test_the_port_of_a_valohai_task_can_be_chosen(valohai_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed_task(valohai_folder)
    monkeypatch.setenv("MASTER_PORT", "4000")
    assert find_meeting().port == 4000


def test_a_file_that_says_no_meeting_place_is_refused(valohai_folder: Path) -> None:
    file = valohai_folder / "distributed.json"
    task = distributed_task(valohai_folder)
    for content in (
        "{",
        "[]",
        "{}",
        json.dumps({**task, "members": []}),
        json.dumps({**task, "members": [{**task["self"], "member_id": 0}]}),
        json.dumps({**task, "members": [{**task["self"], "network": {**task["self"]["network"], "local_ips": []}}]}),
        json.dumps({**task, "config": {**task["config"], "member_id": "7"}}),
    ):
        file.write_text(content)
        said = refused()
        assert said.startswith(f"{file} does not say where a distributed Valohai task meets ("), content
        assert said.endswith("start the step as a Task of the type Distributed, with valohai-utils installed."), content


def test_a_task_without_valohais_library_is_refused(valohai_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed_task(valohai_folder)
    monkeypatch.setitem(sys.modules, "valohai", None)  # importing it is an ImportError
    said = refused()
    assert "(ModuleNotFoundError: " in said
    assert said.endswith("with valohai-utils installed.")
    (valohai_folder / "valohai.py").write_text("raise AttributeError('of another version')\n")
    monkeypatch.syspath_prepend(valohai_folder)
    monkeypatch.delitem(sys.modules, "valohai")
    assert "(AttributeError: of another version): " in refused()


# -- SLURM


def test_a_job_step_of_slurm_is_read(monkeypatch: pytest.MonkeyPatch, scontrol: Path) -> None:
    set_all(monkeypatch, SLURM)
    assert find_meeting() == Meeting("gpu07", 19567, 1, 4, "SLURM job 1234567")
    set_all(monkeypatch, {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000"})
    assert find_meeting() == Meeting("10.0.0.7", 4000, 1, 4, "SLURM job 1234567")


def test_a_plain_list_of_hosts_needs_no_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_all(monkeypatch, {**SLURM, "SLURM_STEP_NODELIST": "gpu07,gpu12", "PATH": str(tmp_path)})
    assert find_meeting().address == "gpu07"


def test_a_list_that_nobody_spells_out_is_refused(
    monkeypatch: pytest.MonkeyPatch, scontrol: Path, tmp_path: Path
) -> None:
    set_all(monkeypatch, {**SLURM, "SLURM_STEP_NODELIST": "gpu[7-"})
    rest = "put scontrol on PATH, or set MASTER_ADDR to the first host."
    assert refused() == (
        "SLURM's hosts are gpu[7-, which `scontrol show hostnames` does not spell out here (Invalid hostlist: gpu[7-): "
        + rest
    )
    scontrol.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refused().endswith(f"No such file or directory: 'scontrol'): {rest}")


# -- which of them


def test_the_first_source_that_says_it_counts(
    monkeypatch: pytest.MonkeyPatch, valohai_folder: Path, scontrol: Path
) -> None:
    set_all(monkeypatch, SLURM)
    assert find_meeting().source == "SLURM job 1234567"
    distributed_task(valohai_folder)
    assert find_meeting().source == VALOHAI_SOURCE
    set_all(monkeypatch, TORCHRUN)
    assert find_meeting().source == "torchrun's environment"
    assert find_meeting("10.0.0.9", 2, 1).source == "--master"


def test_no_source_at_all_is_refused_with_all_that_there_are() -> None:
    assert refused() == (
        "Nobody says where the machines meet: start each by torchrun, by srun or as a distributed Valohai task, or "
        "pass --master ADDRESS:PORT --machines N --machine_rank 0 (1, 2, ... on the others)."
    )
