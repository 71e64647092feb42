"""Ranks that torchrun starts again, perhaps on fewer or more machines: where they meet, and the same steps."""

import os
import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

from common.base.errors import BadInputError, RunStoppedError
from common.base.run_config import RunConfig
from common.records.store import default_run_name
from common.runtime.world import detect_launcher, may_start_again

POLL_S = 0.05
NEWEST, THERE = "newest start", "all are there"


def run_as_started(run: RunConfig) -> RunConfig:
    """Return the run on as many ranks as torchrun has started, with the same rows in each step, under the same name.

    `torchrun --nnodes 1:4 --max_restarts 3` starts the ranks of a run on several machines again, on those that there
    are. Without `--max_restarts`, or with the ranks that the run asks for, it stays as it is.

    Raises:
        BadInputError: So many ranks cannot take the run's steps.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started == run.world_size or not _is_elastic(run):
        return run
    changes: dict[str, object] = {
        "devices": started,
        "nodes": started // int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "run_name": run.run_name or default_run_name(run, detect_launcher()),
        "learning_rate": run.peak_learning_rate,
        "learning_rate_scaling": "none",
    }
    if run.goal.summarizes:  # whose rows are divided into parts, of which a rank may have several
        return run.changed_to(**changes, partitions=run.partition_count)
    if run.dp_replicate_size > 1:
        copies, rest = divmod(started, run.shard_ranks)
        if rest:
            raise BadInputError(
                f"{started} ranks started, which are no whole copies of {run.shard_ranks} ranks (dp_replicate_size "
                f"{run.dp_replicate_size}): start more machines, or fewer."
            )
        changes["dp_replicate_size"] = copies
    return run.changed_to(**changes, **_same_step(run, started))


def takes_in_no_machine(run: RunConfig) -> bool:
    """Return whether torchrun may start the ranks again, but on no machine that is added.

    In its own store, where it shares it, it says only at the first start where the ranks meet (PyTorch 2.13,
    dynamic_rendezvous.py).
    """
    return _is_elastic(run) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _is_elastic(run: RunConfig) -> bool:
    """Return whether the run's ranks may be started again, on another number of machines."""
    return may_start_again() and run.nodes > 1 and run.parallelism.resumes_on_other_ranks


def _same_step(run: RunConfig, ranks: int) -> dict[str, object]:
    """Return what lets so many ranks share a step's rows equally, with no more at once than the run has.

    Raises:
        BadInputError: They cannot.
    """
    rows, rest = divmod(run.effective_batch_size, ranks)
    if rest:
        possible = [count for count in range(1, run.world_size + 1) if run.effective_batch_size % count == 0]
        raise BadInputError(
            f"{ranks} ranks started, which cannot share the {run.effective_batch_size} rows of a step equally: start "
            f"{', '.join(map(str, possible))} ranks, or begin with a --per_device_train_batch_size or "
            "--gradient_accumulation_steps that they can share."
        )
    at_once = max(size for size in range(1, run.per_device_train_batch_size + 1) if rows % size == 0)
    return {"per_device_train_batch_size": at_once, "gradient_accumulation_steps": rows // at_once}


# -- where the ranks of one start meet


def store_of_this_start(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Return a store for the ranks of this start alone, once all that torchrun started are there.

    It is a part of torchrun's own store, or, where torchrun was told not to share it, the first rank's.

    Raises:
        RunStoppedError: With the ranks that did not come within `timeout_s`.
    """
    is_shared = os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=rank == 0 and not is_shared,
        timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
    )  # fmt: skip
    return part_of_this_start(store, rank, world_size, timeout_s)


def part_of_this_start(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Return a part of a launcher's store, once all ranks are there.

    The store still has what ranks of earlier starts said, and torchrun's own count of starts leaves out those for which
    a machine came or went. So the first rank names each start anew, and the others announce themselves under the newest
    name; they know by their own word in its answer that it is of their start.

    Raises:
        RunStoppedError: With the ranks that did not come within `timeout_s`.
    """
    own, deadline_s = uuid4().hex, time.monotonic() + timeout_s
    if rank == 0:
        store.set(NEWEST, own)
    part = None
    while time.monotonic() < deadline_s:
        if store.check([NEWEST]):
            part = dist.PrefixStore(store.get(NEWEST).decode(), store)
            part.set(f"rank{rank}", own)
            if rank == 0 and not _missing(part, world_size):
                part.set(THERE, " ".join(part.get(f"rank{number}").decode() for number in range(world_size)))
            if part.check([THERE]) and own in part.get(THERE).decode().split():
                return part
        time.sleep(POLL_S)
    missing = ", ".join(map(str, (part and _missing(part, world_size)) or [0]))
    raise RunStoppedError(
        f"Rank {missing} did not start within {timeout_s:g} s (start_timeout_s): its output says why; where importing "
        "takes longer, pass a longer --start_timeout_s."
    )


def _missing(part: dist.Store, world_size: int) -> list[int]:
    return [number for number in range(world_size) if not part.check([f"rank{number}"])]
