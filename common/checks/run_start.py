"""The start of a workflow, on every rank."""

from collections.abc import Iterator
from contextlib import contextmanager

from common.base.run_config import RunConfig
from common.checks.inputs import check_inputs
from common.runtime.rank import rank_started
from common.runtime.recorder import RunRecorder


@contextmanager
def run_started(run: RunConfig, resumes: bool = False) -> Iterator[RunRecorder]:
    """Start this rank, check the run's inputs, and yield what records its steps; end the rank afterwards."""
    with rank_started(run) as rank:
        yield RunRecorder(check_inputs(run), rank, resumes)
