"""Check a run's settings, model, data, disk and memory, before anything is loaded or started."""

import sys
import tempfile

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import literal_of
from common.checks.disk_needs import check_disk
from common.data.splits import load_splits
from common.models.loading import any_shape_config, check_attention, load_tokenizer
from common.models.quantization import check_bitsandbytes
from common.runtime.rank import check_gpus
from common.runtime.world import detect_launcher, was_restarted
from common.tasks.answers import check_independent_judge
from common.training.checkpoints import check_checkpoint
from common.training.placement import check_placement_and_memory
from common.training.sharded_run import check_sharding_inputs
from common.training.tensor_parallel import check_divisible


def check_inputs(run: RunConfig) -> None:
    """Check the run's settings, model, data, disk and memory, cheaply and before anything is written or started.

    Raises:
        BadInputError: what is unknown, missing or malformed, or cannot fit.
    """
    check_settings_and_data(run)
    if not (run.resume_from_checkpoint or was_restarted()):  # what it wrote before takes the room that it needs
        check_disk(run)
    if run.parallelism.splits_matrices:
        check_divisible(any_shape_config(run.model), run.devices)
    if run.is_sharded:
        check_sharding_inputs(run)
    if run.resume_from_checkpoint:
        check_checkpoint(run, detect_launcher(), len(load_splits(run).train))
    check_placement_and_memory(run, load_splits(run).train, load_tokenizer(run))


def check_settings_and_data(run: RunConfig) -> None:
    """Check the run's settings, model and data; not whether they fit.

    Raises:
        BadInputError: what is unknown, missing or malformed.
    """
    from transformers import SchedulerType
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )
    from transformers.training_args import OptimizerNames

    check_folder(run)
    check_results_folder(run)
    check_gpus(run)
    check_attention(run)
    check_bitsandbytes(run)
    if run.goal.chats:
        check_independent_judge(run)
    for tracker in run.report_to.split(","):
        if tracker not in ("none", "all", *INTEGRATION_TO_CALLBACK):
            known = ", ".join(INTEGRATION_TO_CALLBACK)
            raise BadInputError(f"report_to names {tracker!r}: choose none, or some of {known}.")
        if tracker in INTEGRATION_TO_CALLBACK and tracker not in get_available_reporting_integrations():
            raise BadInputError(f"report_to names {tracker}, which is not installed: `pip install {tracker}`.")
    for name, known in (("lr_scheduler_type", SchedulerType), ("optim", OptimizerNames)):
        names = [choice.value for choice in known]
        if getattr(run, name) not in names:
            raise BadInputError(f"{name} is {getattr(run, name)!r}: choose one of {', '.join(names)}.")
    load_tokenizer(run)
    row_count = len(load_splits(run).train)
    if row_count < run.data_parallel_ranks:
        raise BadInputError(f"There are {row_count} training rows for {run.world_size} ranks: give each at least one.")


def check_results_folder(run: RunConfig) -> None:
    """Refuse results that could not be written, or that would go elsewhere.

    Raises:
        BadInputError: with the folder, and the reason.
    """
    folder = run.results_folder(run.run_name or "any").parent
    there = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise BadInputError(
            f"Nothing can be written into {folder} ({error.strerror}): pass --results_root with a folder that can."
        ) from None
    own = folder / run.run_name
    if run.run_name and own.is_symlink():
        raise BadInputError(f"The results folder {own.name} is a link to elsewhere: pass another --run_name.")


def _does(own: RunConfig, run: RunConfig) -> bool:
    """Whether a folder of such a literal, `own`, takes the technique and the parallelism of `run`."""
    asked, way = run.method, run.parallelism
    if own.parallelism.shards:  # 2.6
        return way.splits_rows and (not asked.quantizes or (way.takes_4_bits and not way.replicates))
    if own.parallelism.pipelines:  # 2.7
        return way.pipelines and not asked.quantizes
    if own.method.quantizes:  # 2.3
        return asked.quantizes and (way.is_single or way.replicates)
    return (run.technique, run.parallel) == (own.technique, own.parallel)


def check_folder(run: RunConfig) -> None:
    """Refuse what the run folder's workflow does not do: it would do its own all the same.

    Raises:
        BadInputError: with both techniques, or both ways to share the work.
    """
    if not run.run_folder:
        return
    own = literal_of(REPOSITORY / run.run_folder)
    if run.task != own.task:
        raise BadInputError(
            f"task is {run.task}, but the workflow of {run.run_folder} is for {own.task}: leave --task out, or go to "
            "another folder."
        )
    main = getattr(sys.modules["__main__"], "RUN", None)
    if isinstance(main, RunConfig) and main.run_folder == run.run_folder and main.loop != run.loop:
        raise BadInputError(
            f"loop is {run.loop}, but this workflow's is {main.loop}: leave --loop out, and take the other workflow of "
            f"{run.run_folder}."
        )
    if own.goal.folder_for_one or _does(own, run):  # a task's own folder does all that the task is done with
        return
    setting = "technique" if run.technique != own.technique else "parallel"
    raise BadInputError(
        f"{setting} is {getattr(run, setting)}, but the workflow of {run.run_folder} is for {own.technique} with "
        f"{own.parallel}: leave --{setting} out, or go to another folder (`python -m common.dry_run` and the planner "
        "take any)."
    )
