"""Where the members of a world meet: several machines, one process each.

One of four sources says it: a static address, torchrun's environment, Valohai's or SLURM's. The first member listens
there, and the others connect (`common.runtime.membership`).
"""

import os
import subprocess
from dataclasses import dataclass

from common.base.errors import BadInputError
from common.base.parsing import OneSentenceParser

PORT = 29500  # torchrun's default, where no other one is given
LARGEST_PORT = 65535
STATIC = "--master"
VALOHAI_CONFIG = "/valohai/config"
JOIN_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Meeting:
    """Where the members of a world meet, and which of them this process is.

    Attributes:
        source: Where all this was found, for a reader.
        has_store: Whether a launcher listens there already, and answers for the members.
    """

    address: str
    port: int
    rank: int
    world_size: int
    source: str
    has_store: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} meets the others at {self.address}:{self.port} ({self.source})"


# -- the sources


def find_meeting(master: str = "", world_size: int = 0, rank: int = -1) -> Meeting:
    """Return the meeting place: the static one that is passed, else torchrun's, Valohai's or SLURM's.

    `master` is `address` or `address:port`; with it `world_size` and `rank` are needed.

    Raises:
        BadInputError: If no source says where, or what it says makes no sense.
    """
    if not master and (world_size or rank >= 0):
        raise BadInputError(
            f"machines is {world_size} and machine_rank {rank}, but there is no --master to meet at: pass --master "
            "ADDRESS:PORT, too, or leave both out where a launcher says them."
        )
    meeting = _static(master, world_size, rank) if master else _torchrun() or _valohai() or _slurm()
    if meeting is None:
        raise BadInputError(
            "Nobody says where the machines meet: start each by torchrun, by srun or as a distributed Valohai task, or "
            "pass --master ADDRESS:PORT --machines N --machine_rank 0 (1, 2, ... on the others)."
        )
    _check(meeting)
    return meeting


def _static(master: str, world_size: int, rank: int) -> Meeting:
    address, colon, port = master.partition(":")
    if not address or (colon and not _is_port(port)):
        raise BadInputError(
            f"master is {master!r}: pass ADDRESS or ADDRESS:PORT, such as 10.0.0.1:{PORT}, with a port from 1 to "
            f"{LARGEST_PORT}."
        )
    if world_size < 1:
        raise BadInputError(
            f"master is {master!r}, but machines is {world_size}: pass --machines with how many there are, and "
            "--machine_rank with which of them this is, from 0."
        )
    return Meeting(address, int(port or PORT), rank, world_size, STATIC)


def _torchrun() -> Meeting | None:
    if not {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"} <= set(os.environ):
        return None
    return Meeting(
        address=os.environ["MASTER_ADDR"],
        port=_port(PORT),
        rank=_number("RANK"),
        world_size=_number("WORLD_SIZE"),
        source="torchrun's environment",
        has_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _valohai() -> Meeting | None:
    """Return where the members of a distributed Valohai task meet, by Valohai's own library."""
    path = os.path.join(os.environ.get("VH_CONFIG_DIR", VALOHAI_CONFIG), "distributed.json")
    if not os.path.isfile(path):
        return None
    try:
        from valohai import distributed

        distributed.flush_state()  # of an earlier task in this process
        address, rank = distributed.master().primary_local_ip, distributed.rank
        world_size = distributed.required_count
    except Exception as error:  # the library may be missing or broken, and a broken file breaks it in many ways
        raise BadInputError(
            f"{path} does not say where a distributed Valohai task meets ({type(error).__name__}: {error}): start the "
            "step as a Task of the type Distributed, with valohai-utils installed."
        ) from None
    return Meeting(address, _port(PORT), rank, world_size, "Valohai's distributed.json")


def _slurm() -> Meeting | None:
    """Return where srun's job step meets: at the first host of its list, unless MASTER_ADDR names another."""
    names = ("SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID")
    if not set(names) <= set(os.environ):
        return None
    rank, world_size, job = (_number(name) for name in names[1:])
    address = os.environ.get("MASTER_ADDR") or _first_host(os.environ["SLURM_STEP_NODELIST"])
    port = _port(15000 + job % 10000)  # two jobs on one machine meet apart
    return Meeting(address, port, rank, world_size, f"SLURM job {job}")


def _first_host(hosts: str) -> str:
    """Return the first of `node[3-5,9],login`: SLURM's own command expands the list.

    Raises:
        BadInputError: If the command is missing, or does not understand the list.
    """
    if "[" not in hosts:
        return hosts.split(",")[0]
    command = ["scontrol", "show", "hostnames", hosts]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip()
        raise BadInputError(
            f"SLURM's hosts are {hosts}, which `scontrol show hostnames` does not spell out here ({reason}): put "
            "scontrol on PATH, or set MASTER_ADDR to the first host."
        ) from None


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 1 <= int(text) <= LARGEST_PORT


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise BadInputError(
            f"{name} is {os.environ[name]!r} in the environment, but should be a number: correct it."
        ) from None


def _port(default: int) -> int:
    port = os.environ.get("MASTER_PORT", str(default))
    if not _is_port(port):
        raise BadInputError(
            f"MASTER_PORT is {port!r} in the environment, but should be a port from 1 to {LARGEST_PORT}: correct or "
            "unset it."
        )
    return int(port)


def _check(meeting: Meeting) -> None:
    if meeting.world_size < 2:
        raise BadInputError(
            f"There is a world of {meeting.world_size} ({meeting.source}), but gradients are averaged among at least "
            "two: start more machines, or train on one by my_workflow_summarization_torchrun.py."
        )
    if not 0 <= meeting.rank < meeting.world_size:
        advice = "pass one of them by --machine_rank" if meeting.source == STATIC else "start it again by its launcher"
        raise BadInputError(
            f"This is rank {meeting.rank} of {meeting.world_size} ({meeting.source}), but ranks go from 0 to "
            f"{meeting.world_size - 1}: {advice}."
        )


def meeting_options(description: str | None = None) -> OneSentenceParser:
    """Return a parser with the options of a static address, for starting each machine by hand."""
    made = OneSentenceParser(
        description=description, epilog="Every setting in common/base/settings.py is an option, too: --field value."
    )
    made.add_argument("--master", default="", help="ADDRESS or ADDRESS:PORT of the first machine, where nobody says it")
    made.add_argument("--machines", type=int, default=0, help="with --master: how many there are")
    made.add_argument("--machine_rank", type=int, default=-1, help="with --master: which of them this is, from 0")
    made.add_argument("--join_timeout_s", type=float, default=JOIN_TIMEOUT_S, help="how long to wait for the others")
    return made
