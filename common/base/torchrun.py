"""torchrun: the words that start ranks, and whether a process was told all that a launcher tells a rank."""

import os
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from common.base.errors import BadInputError, RunStoppedError, begin_of

TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # by every launcher, to each rank
TOLD_BY_TORCHRUN = ("LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_MAX_RESTARTS")  # besides
RUN_ID = "TORCHELASTIC_RUN_ID"
NO_NUMBERS = {"MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", RUN_ID}
# alone these make no process a rank: a cluster's scripts set them before any is started, and a run leaves them
MEETING_PLACE = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"}
# how many processes MPI has started, which Accelerate takes for ranks
MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
KEPT_S = 24 * 60 * 60  # how long what a killed process has left where ranks meet stays at least
LAST_PORT, MOST_DIGITS = 65535, 9


def nodes_command(nodes: int, ranks_per_node: int, address: str = "ADDRESS") -> list[str]:
    """Return what starts the ranks of one machine, without the script: of several the same on each of them.

    Several machines meet at `address`, the first one's. On one machine they meet in a file of this user's alone:
    torchrun unpickles what it finds there, so that whoever reached a port of it could have code run.
    """
    words = ["--nnodes", str(nodes)] if nodes > 1 else []
    place = ["--rdzv_endpoint", f"{address}:29400"] if nodes > 1 else ["--rdzv_conf", "store_type=file"]
    return ["torchrun", *words, "--nproc_per_node", str(ranks_per_node), "--rdzv_backend", "c10d", *place]


def is_of_torchrun() -> bool:
    """Return whether torchrun, or a launcher that is made of it, has started this process."""
    return RUN_ID in os.environ


def meeting_file() -> str:
    """Return a new file for torchruns of one machine to meet in, after those of killed processes are removed."""
    import psutil  # here: few commands start ranks

    folder = folder_of_user()
    for path in folder.glob("[0-9]*-*"):
        process = path.name.partition("-")[0]
        with suppress(FileNotFoundError):
            is_old = time.time() - path.stat().st_mtime > KEPT_S  # where machines share the folder, others' go on
            if is_old and process.isdigit() and not psutil.pid_exists(int(process)):
                path.unlink()
    descriptor, path = tempfile.mkstemp(prefix=f"{os.getpid()}-", dir=folder)
    os.close(descriptor)
    return path


def folder_of_user() -> Path:
    """Return the folder where this user's launchers and ranks meet; RunStoppedError if others can write into it."""
    folder = Path(tempfile.gettempdir(), f"ranks-of-user-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise RunStoppedError(f"{folder}, where ranks meet, can be written by others: remove it, or set TMPDIR.")
    return folder


def check_told(environment: Mapping[str, str]) -> None:
    """Refuse, by BadInputError, an environment with a part of what a launcher tells a rank, or what no rank is told."""
    told = {name: environment[name] for name in (*TOLD, *TOLD_BY_TORCHRUN, RUN_ID) if name in environment}
    if told.keys() <= MEETING_PLACE:
        _check_alone(environment)
        return
    needed = (*TOLD, *TOLD_BY_TORCHRUN) if RUN_ID in told else TOLD
    missing = [name for name in needed if not told.get(name)]
    wrong = f"no {' and no '.join(missing)}" if missing else _what_no_rank_is_told(told)
    if wrong:
        have = ", ".join(f"{name}={begin_of(value, 40)!r}" for name, value in told.items())
        raise BadInputError(
            f"The environment has {have}, but {wrong}: a launcher tells each rank all of these. `unset "
            f"{' '.join(told)}`, and start ranks by torchrun, accelerate launch or `python -m common.launch`."
        )


def _what_no_rank_is_told(told: Mapping[str, str]) -> str:
    """Return which variables hold no number, or one that does not go with the others; empty where all is well."""
    texts = {name: value for name, value in told.items() if name not in NO_NUMBERS}
    for name, value in texts.items():
        if not (value.isascii() and value.isdigit() and len(value) <= MOST_DIGITS):
            return f"{name} should be a whole number from 0 on"
    numbers = {name: int(value) for name, value in texts.items()}
    ranks, rank = numbers["WORLD_SIZE"], numbers["RANK"]
    ranks_here = numbers.get("LOCAL_WORLD_SIZE", ranks)
    for name, least, most in (
        ("WORLD_SIZE", 1, ranks),
        ("RANK", 0, ranks - 1),
        ("LOCAL_WORLD_SIZE", 1, ranks),
        ("LOCAL_RANK", 0, min(ranks_here - 1, rank)),
        ("MASTER_PORT", 1, LAST_PORT),
    ):
        if name in numbers and not least <= numbers[name] <= most:
            return f"{name} should be from {least} to {max(least, most)}"
    return ""


def _check_alone(environment: Mapping[str, str]) -> None:
    """Refuse one of several processes that mpirun or srun have started, each of which would be a run of its own."""
    alone = dict.fromkeys(MPI_SIZES, "1") | {"SLURM_PROCID": "0"}
    if not os.isatty(0):  # a shell that srun has opened has the number of its step's tasks, but is alone
        alone["SLURM_STEP_NUM_TASKS"] = "1"
    for name, value in alone.items():
        if environment.get(name, value) != value:
            raise BadInputError(
                f"{name} is {begin_of(environment[name], 40)!r}: mpirun or srun has started several processes. Start "
                f"one torchrun on each machine (docs/several_machines.md), or `unset {name}` if this process is alone."
            )
