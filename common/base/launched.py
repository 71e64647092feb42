"""Whether a process was told all that a launcher tells a rank, or nothing of it."""

import os
from collections.abc import Mapping

from common.base.errors import BadInputError, begin_of
from common.base.paths import command_here

TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # by every launcher, to each rank
TOLD_BY_TORCHRUN = ("LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_MAX_RESTARTS")  # besides
RUN_ID = "TORCHELASTIC_RUN_ID"
NO_NUMBERS = {"MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", RUN_ID}
# alone these make no process a rank: a cluster's scripts set them before any is started, and a run leaves them
MEETING_PLACE = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"}
# how many processes MPI has started, which Accelerate takes for ranks
MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
LAST_PORT, MOST_DIGITS = 65535, 9


def is_of_torchrun() -> bool:
    """Return whether torchrun, or a launcher that is made of it, has started this process."""
    return RUN_ID in os.environ


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
            f"{' '.join(told)}`, and start ranks by torchrun, accelerate launch or `{command_here('launch')}`."
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
