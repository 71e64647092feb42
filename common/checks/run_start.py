"""The start of a workflow, on every rank."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from accelerate.utils import gather_object

from common.base.errors import BadInputError
from common.base.launched import check_told
from common.base.run_config import RunConfig
from common.checks.inputs import check_inputs
from common.data.splits import load_splits
from common.runtime.elastic import cannot_add_machines, run_as_started
from common.runtime.machines import check_members_agree, member_of
from common.runtime.rank import rank_started
from common.runtime.recorder import RunRecorder
from common.runtime.world import Rank
from common.training.resuming import digests_of


@contextmanager
def run_started(run: RunConfig) -> Iterator[RunRecorder]:
    """Start this rank, check the run's inputs, and yield the recorder, whose `run` may have other ranks than asked."""
    check_told(os.environ)
    asked, run = run, run_as_started(run)
    with rank_started(run) as rank:
        if rank.is_main and run != asked:
            print(
                f"{run.devices} of {asked.devices} ranks started: each takes {run.rows_per_rank} rows at once, "
                f"{run.gradient_accumulation_steps} times, so that a step has {run.effective_batch_size} rows as before"
            )
        if rank.is_main and cannot_add_machines(asked):
            print(
                "note: a machine can be added only if TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 was set for torchrun, on "
                "all machines"
            )
        with torch.random.fork_rng(devices=[]):  # adapters draw their start, whatever the checks have drawn
            checked = checked_everywhere(run, rank) if run.nodes > 1 else check_inputs(run)
        # each rank's plan chose how many rows its device answers at once: ranks with unlike devices take the fewest
        at_once = min(gather_object([checked.per_device_eval_batch_size]))
        checked = replace(checked, per_device_eval_batch_size=at_once)
        log = RunRecorder(checked, rank)
        log.command_rows = asked.per_device_eval_batch_size
        log.row_digests = digests_of(load_splits(checked))
        yield log


def checked_everywhere(run: RunConfig, rank: Rank) -> RunConfig:
    """Check the run's inputs on each machine; raise BadInputError on all for what one lacks, or two differ in."""
    try:
        asked, run = run, check_inputs(run)
        own = replace(run, per_device_eval_batch_size=asked.per_device_eval_batch_size)  # chosen by its own plan
        said = member_of(rank.rank, own, load_splits(run).train)
    except (BadInputError, OSError) as refusal:
        said = f"{socket.gethostname()}: {refusal}"
    everyone = gather_object([said])
    if refused := dict.fromkeys(each for each in everyone if isinstance(each, str)):
        raise BadInputError(" ".join(refused))
    check_members_agree(everyone)
    return run
