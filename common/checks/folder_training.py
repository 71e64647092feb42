"""A run's training as its own folder writes it, so that preflight, bench and tests measure the loop that is run."""

from inspect import signature
from pathlib import Path
from types import ModuleType

from transformers import PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import run_folders, workflow_does, workflows_of
from common.checks.folder_runs import import_workflow
from common.checks.tried_rows import Rows
from common.data.rows import Splits
from common.models.loading import load_base_model, load_tokenizer
from common.models.placement import Placement
from common.planning.device_maps import whole_model_on
from common.runtime.recorder import RunRecorder, Trial
from common.runtime.world import Rank
from common.training.export import DeviceMap
from common.training.loop import TrainingLoop


def workflow_of(run: RunConfig) -> ModuleType:
    """Return the workflow that trains a run: of its folder, or of the first that trains so where it has none."""
    folder = REPOSITORY / run.run_folder if run.run_folder else folder_for(run)
    for workflow in map(import_workflow, workflows_of(folder)):
        if workflow.RUN.loop == run.loop:
            return workflow
    raise BadInputError(f"loop is {run.loop}, but no workflow of {folder.name} has it: leave --loop out.")


def folder_for(run: RunConfig) -> Path:
    """Return the first run folder whose workflow trains as a run does that has no folder of its own."""
    for folder, own in run_folders().items():
        if own.task == run.task and workflow_does(own, run.technique, run.parallel):
            return folder
    raise BadInputError(f"No run folder trains {run.technique} with {run.parallel}: choose another of the two.")


def device_map_of_rank(placement: Placement, rank: Rank) -> DeviceMap | None:
    """Return where a whole model loads with mp on GPUs, divided as the stages are; else None."""
    return placement.stage_map if len(rank.devices) > 1 else None


def trained_by_folder(
    log: RunRecorder | Trial,
    data: Splits,
    tokenizer: PreTrainedTokenizerBase | None = None,
    placement: Placement | None = None,
) -> TrainingLoop:
    """Call `train` of the run's own workflow on every rank, with what it takes; return its loop."""
    run, rank = log.run, log.rank
    train = workflow_of(run).train
    given = {"log": log, "data": data, "tokenizer": tokenizer or load_tokenizer(run), "placement": placement}
    taken = signature(train).parameters
    if "model" in taken:
        device_map = device_map_of_rank(placement, rank) if placement else None
        given["model"] = load_base_model(run, device_map or whole_model_on(rank.device))
    return train(**{name: given[name] for name in taken})


def tried_by_folder(log: Trial, rows: Rows, placement: Placement | None = None) -> TrainingLoop:
    """Train on the longest batch alone, again and again, by the run's own workflow; return its loop."""
    # validation is divided among the ranks batch by batch: one for each
    validation = rows.validation * log.run.data_parallel_ranks
    return trained_by_folder(log, Splits(rows.train, validation, []), placement=placement)
