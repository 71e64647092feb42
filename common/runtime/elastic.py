"""Ranks that torchrun starts again, perhaps on fewer or more machines: where they meet, and the same steps."""

import os
import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

from common.base.errors import BadInputError, RunStoppedError
from common.base.run_config import RunConfig
from common.base.settings import BY_MODEL
from common.records.store import default_run_name
from common.runtime.torchrun import folder_of_user
from common.runtime.world import detect_launcher, may_start_again

POLL_S = 0.05
NEWEST, LIST = "newest start", "all that are there"


def run_as_started(run: RunConfig) -> RunConfig:
    """Return the run on as many ranks as torchrun has started.

    `torchrun --nnodes 1:4 --max_restarts 3` starts the ranks of a run on several machines again, on those that are
    left. Steps keep their rows and their learning rate, and results their name. Without `--max_restarts`, or with the
    ranks that the run asks for, it stays as it is.
    """
    if run.learning_rate == BY_MODEL and _is_elastic(run):
        raise BadInputError(
            "learning_rate is chosen by the model, but ranks that may be started again on other machines keep theirs: "
            "pass --learning_rate."
        )
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
    if run.parallelism.shards and started < 2:
        raise BadInputError(f"1 rank started, but {run.parallel} divides the model among two or more: start more.")
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


def cannot_add_machines(run: RunConfig) -> bool:
    """Return whether torchrun may start the run's ranks again, but not on a machine that is added.

    When torchrun shares its store with the ranks, it writes their meeting address only once, so that a machine which is
    added later never finds it (PyTorch 2.13, dynamic_rendezvous.py).
    """
    return _is_elastic(run) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _is_elastic(run: RunConfig) -> bool:
    """Return whether the run's ranks may be started again, on another number of machines."""
    return may_start_again() and run.nodes > 1 and run.parallelism.resumes_on_other_ranks and run.sp_size == 1


def _same_step(run: RunConfig, ranks: int) -> dict[str, object]:
    """Return what lets so many ranks share a step's rows equally, with no more at once than the run has."""
    rows, rest = divmod(run.effective_batch_size, ranks)
    if rest:
        on_each = int(os.environ["LOCAL_WORLD_SIZE"])
        counts = range(on_each, max(run.world_size, ranks) + 1, on_each)
        possible = [count for count in counts if run.effective_batch_size % count == 0]
        raise BadInputError(
            f"{ranks} ranks started, which cannot share the {run.effective_batch_size} rows of a step equally: start "
            f"{' or '.join(map(str, possible)) or 'other'} ranks, or begin with a --per_device_train_batch_size or "
            "--gradient_accumulation_steps that they can share."
        )
    at_once = max(size for size in range(1, run.per_device_train_batch_size + 1) if rows % size == 0)
    return {"per_device_train_batch_size": at_once, "gradient_accumulation_steps": rows // at_once}


def store_of_this_start(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Return a store for the ranks of this start alone, once all that torchrun started are there.

    On one machine it is a file; on several a part of torchrun's own store, or, where torchrun was told not to share it,
    the first rank's. Those listen on every interface, and whoever writes into them says where the ranks connect to.
    """
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        place = folder_of_user() / f"{os.getppid()}-{os.environ['MASTER_PORT']}"
        return part_of_this_start(dist.FileStore(str(place), world_size), rank, world_size, timeout_s)
    is_master = rank == 0 and os.environ["TORCHELASTIC_USE_AGENT_STORE"] != "True"
    place, timeout = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(*place, is_master=is_master, timeout=timeout, wait_for_workers=False)
    except dist.DistNetworkError:
        raise _not_started([0], timeout_s) from None
    return part_of_this_start(store, rank, world_size, timeout_s)


def part_of_this_start(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Return a part of a launcher's store, once all ranks are there; a RunStoppedError names those that did not come.

    The store still has what ranks of earlier starts said, and torchrun's own count of starts leaves out those for which
    a machine came or went. So the first rank names each start anew, and the others announce themselves under the newest
    name. Once all have, the first rank lists them; a rank accepts a list only if its own id is in it.
    """
    own, announced = uuid4().hex, ""
    ranks = [f"rank{number}" for number in range(world_size)]
    deadline_s = time.monotonic() + timeout_s
    if rank == 0:
        store.set(NEWEST, own)
    while time.monotonic() < deadline_s:
        newest = own if rank == 0 else _value(store, NEWEST)
        part = dist.PrefixStore(newest, store)
        if newest != announced:
            part.set(ranks[rank], own)
            announced = newest
        if newest and rank == 0 and part.check(ranks):
            part.set(LIST, " ".join(_value(part, name) for name in ranks))
        if newest and own in _value(part, LIST).split():
            return part
        time.sleep(POLL_S)
    missing = [number for number, name in enumerate(ranks) if not part.check([name])] if announced else [0]
    raise _not_started(missing or [0], timeout_s)


def _value(store: dist.Store, name: str) -> str:
    """Return what a store has under a name; empty where it has nothing yet."""
    return store.get(name).decode() if store.check([name]) else ""


def _not_started(ranks: list[int], timeout_s: float) -> RunStoppedError:
    return RunStoppedError(
        f"Rank {', '.join(map(str, ranks))} did not start within {timeout_s:g} s (start_timeout_s): its output says "
        "why; where importing takes longer, pass a longer --start_timeout_s."
    )
