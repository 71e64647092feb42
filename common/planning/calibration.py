"""What kept records of a GPU say about its speed: how many times as fast a run was as the model has it."""

from typing import Any

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.hardware.devices import Gpu
from common.planning.job import BatchShape
from common.planning.run_jobs import architecture_of_run, job_of_run
from common.planning.shares import whole_model
from common.planning.step_speed import computing_time


def times_as_fast(record: dict[str, Any], gpu: Gpu) -> float | None:
    """Return the measured tokens per second of a run on one GPU over those that the model has for rows as it had.

    Rows count with their mean length. None where the record does not say what its rows were, its model has no shape
    here, or the GPU does not compute as it did.
    """
    rank, planned = record["world"][0], record.get("planned")
    if not planned or not rank.get("samples"):
        return None
    longest = planned["batch"]
    try:
        run = RunConfig.of_record(record["config"])
        length = max(1, round(rank["tokens"] / rank["samples"] / run.goal.sequences_per_row))
        batch = BatchShape(longest["rows"], length, min(longest["labelled"], length), task=run.task)
        architecture = architecture_of_run(run, batch)
        seconds = computing_time(architecture, job_of_run(run, batch), whole_model(architecture), gpu).total_s
    except BadInputError:
        return None
    return record["tokens_per_s"] / (batch.tokens / seconds)
