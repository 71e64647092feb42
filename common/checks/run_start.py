"""The start of a workflow, on every rank."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.utils import gather_object

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.checks.inputs import check_inputs
from common.data.splits import load_splits
from common.runtime.machines import Member, check_members_agree, member_of
from common.runtime.rank import rank_started
from common.runtime.recorder import RunRecorder
from common.runtime.world import Rank


@contextmanager
def run_started(run: RunConfig, resumes: bool = False) -> Iterator[RunRecorder]:
    """Start this rank, check the run's inputs, and yield what records its steps; end the rank afterwards."""
    with rank_started(run) as rank:
        yield RunRecorder(checked_everywhere(run, rank) if run.nodes > 1 else check_inputs(run), rank, resumes)


def checked_everywhere(run: RunConfig, rank: Rank) -> RunConfig:
    """Check the run's inputs on each of its machines, and that all of these have the same.

    Raises:
        BadInputError: What one machine lacks, or in what two differ; on every rank.
    """
    said: Member | str
    try:
        run = check_inputs(run)
        said = member_of(rank.rank, run, load_splits(run).train)
    except (BadInputError, OSError) as refusal:
        said = f"{socket.gethostname()}: {refusal}"
    everyone = gather_object([said])
    refused = dict.fromkeys(each for each in everyone if isinstance(each, str))
    if refused:
        raise BadInputError(" ".join(refused))
    check_members_agree(everyone)
    return run
