"""Check a run's settings, model, data, disk and memory, before anything is loaded or started."""

import math
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig, check_choice, names_in
from common.base.run_folders import literal_of, workflow_does
from common.checks.optimizers import check_optimizer, check_schedule
from common.checks.tokens import check_rows_readable, tokens_without_embedding
from common.data.rows import Row
from common.data.splits import check_tokens, load_splits
from common.hardware.devices import size_text
from common.models.compiled_layers import check_compiler
from common.models.families import check_quantizable, check_targets, suited_to_model
from common.models.loading import (
    any_shape_config,
    check_attention,
    check_liger,
    check_model,
    load_tokenizer,
    model_class,
    model_without_weights,
)
from common.models.minilm import check_minilm
from common.models.placement import check_placement_and_memory
from common.models.quantization import check_bitsandbytes
from common.models.trained_weights import with_trained_weights
from common.models.weight_files import check_weight_files
from common.records.store import default_run_name
from common.runtime.disks import check_free_for_run, may_be_restarted_in
from common.runtime.rank import check_gpus, threads_per_rank
from common.runtime.world import detect_launcher
from common.training.part import part_class
from common.training.resuming import check_checkpoint, digests_of
from common.training.saver import MOST_BEST_WEIGHTS, MOST_FULL_STATES, CheckpointSize, checkpoint_size


def check_inputs(run: RunConfig) -> RunConfig:
    """Check the run's settings, rows, model, disk and memory, cheaply and before anything is written or started.

    Returns:
        The run, with defaults changed that cannot work with its model (`suited_to_model`), and the rows that are
        validated and answered at once as its plan chose them.

    Raises:
        BadInputError: what is unknown, missing or malformed, or cannot fit.
    """
    run = check_settings(run)
    splits, tokenizer = load_splits(run), load_tokenizer(run)
    check_training_rows(run, splits.train)
    results = run.results_folder(run.run_name or default_run_name(run, detect_launcher()))
    if not (run.resume_from_checkpoint or may_be_restarted_in(results)):  # what was written takes room
        check_disk(run)
    if run.resume_from_checkpoint:
        check_checkpoint(run, detect_launcher(), digests_of(splits))
    check_tokens(splits, tokenizer, run)
    check_rows_readable(run, splits, tokenizer)
    return check_placement_and_memory(run, splits, tokenizer)


def check_settings(run: RunConfig) -> RunConfig:
    """Check the run's settings, its tokenizer, and that its model can be divided as they say; no row is read.

    Returns:
        The run, with defaults changed that cannot work with its model (`suited_to_model`).

    Raises:
        BadInputError: what is unknown, missing or malformed.
    """
    check_folder(run)
    check_results_folder(run)
    check_gpus(run)
    check_threads(run)
    check_attention(run)
    check_bitsandbytes(run)
    check_compiler(run)
    if run.goal.is_judged and run.independent_judge == "minilm":
        check_minilm("independent_judge is minilm", "--independent_judge none")
    check_trackers(run)
    check_optimizer(run)
    tokenizer = load_tokenizer(run)
    run = suited_to_model(run)
    tokens_without_embedding(run, tokenizer)
    check_targets(run)
    check_quantizable(run)
    check_liger(run)
    _check_parallelism(run)
    _check_pairs(run)
    check_weights(run)
    return run


def check_trackers(run: RunConfig) -> None:
    """Check that each experiment tracker is one that Transformers knows, and is installed.

    Raises:
        BadInputError: with the one that is not.
    """
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    trackers = names_in(run.report_to)
    for tracker in trackers:
        check_choice("A tracker in report_to", tracker, ("none", "all", *INTEGRATION_TO_CALLBACK))
        if tracker not in INTEGRATION_TO_CALLBACK and len(trackers) > 1:
            raise BadInputError(
                f"report_to is {run.report_to}, but {tracker} cannot be combined with others: pass it alone, or leave "
                "it out."
            )
        if tracker in INTEGRATION_TO_CALLBACK and tracker not in get_available_reporting_integrations():
            raise BadInputError(f"report_to names {tracker}, which is not installed: `pip install {tracker}`.")


def check_threads(run: RunConfig) -> None:
    """Check that a CPU run asks for no more threads than this machine has; one thread a device is always granted.

    Raises:
        BadInputError: with how many each device may have.
    """
    ranks_here = run.ranks_per_node
    if run.threads > threads_per_rank(ranks_here):
        raise BadInputError(
            f"threads is {run.threads} for each of {ranks_here} ranks here, but this machine has {os.cpu_count()}: "
            f"pass --threads {threads_per_rank(ranks_here)}."
        )


def check_weights(run: RunConfig) -> None:
    """Check that the files of the run's pretrained model hold all that it needs, by their headers.

    Raises:
        BadInputError: as `check_weight_files`.
    """
    if run.weights == "pretrained":
        config = any_shape_config(run.model, run.model_revision)
        check_weight_files(run, check_model(run.model, run.model_revision), model_class(run, config), config)


def check_training_rows(run: RunConfig, rows: Sequence[Row]) -> None:
    """Check that there is a training row for each rank, or part that ranks draw from, and a schedule over their steps.

    Raises:
        BadInputError: there are too few, or the learning rate's schedule cannot be followed.
    """
    if len(rows) < run.partition_count:
        parts = f"{run.partition_count} {'partitions' if run.partitions else 'ranks'}"
        raise BadInputError(f"There are {len(rows)} training rows for {parts}: give each at least one.")
    check_schedule(run, run.total_steps(len(rows)))


def _check_parallelism(run: RunConfig) -> None:
    if (run.parallelism.divides_tensors or run.parallelism.pipelines) and run.parallelism.part == type(
        run.parallelism
    ).part:
        raise BadInputError(
            f"parallel is {run.parallel}, which can be planned, but not trained with: its row in common/base/specs.py "
            "names no part of its own; pass another --parallel."
        )
    part_class(run).check(run)


def _check_pairs(run: RunConfig) -> None:
    """Refuse what DPO's loss cannot have: adapters of the head, whose own weights it reads, and dropout."""
    if not (run.goal.compares and run.method.has_adapters):
        return
    if "lm_head" in run.target_names:
        raise BadInputError(
            f"target_modules is {run.target_modules}, but log-probabilities are found by the head's own weights, "
            "without its adapter: leave lm_head out."
        )
    if run.lora_dropout:
        raise BadInputError(
            f"lora_dropout is {run.lora_dropout}, but DPO takes its steps without dropout, so that model and reference "
            "are alike at first: pass --lora_dropout 0."
        )


def check_results_folder(run: RunConfig) -> None:
    """Check that results can be written, and go into no folder that a run has not made.

    Raises:
        BadInputError: with the folder, and the reason.
    """
    results = run.results_folder(run.run_name or default_run_name(run, detect_launcher()))
    folder = results.parent
    there = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    try:
        tempfile.TemporaryFile(dir=there).close()
        check_free_for_run(results)
    except OSError as error:  # also of a name that is too long
        raise BadInputError(
            f"Nothing can be written into {folder} ({error.strerror}): pass --results_root with a folder that can."
        ) from None


def check_folder(run: RunConfig) -> None:
    """Check that the workflow of the run folder does what is asked: it would do its own all the same.

    Raises:
        BadInputError: with both tasks, techniques, parallelisms or loops.
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
    if workflow_does(own, run.technique, run.parallel):
        return
    setting = "technique" if run.technique != own.technique else "parallel"
    raise BadInputError(
        f"{setting} is {getattr(run, setting)}, but the workflow of {run.run_folder} is for {own.technique} with "
        f"{own.parallel}: leave --{setting} out, or go to another folder (`python -m common.dry_run` and the planner "
        "take any)."
    )


# -- the disk


@dataclass(frozen=True)
class DiskNeed:
    """What a run writes: full states and best weights, so many at the same time, and at its end models, in bytes.

    Records, logs and pictures, which are small, are left out.
    """

    checkpoint: CheckpointSize
    full_states: int
    best_weights: int
    models_bytes: int

    @property
    def total_bytes(self) -> int:
        """The most that is there at the same time."""
        return (
            self.full_states * self.checkpoint.state_bytes
            + self.best_weights * self.checkpoint.weights_bytes
            + self.models_bytes
        )


def disk_need(run: RunConfig) -> DiskNeed:
    """Return what `run` writes, by the shape of its model.

    Raises:
        BadInputError: no shape is known of the model, or it has no such target modules.
    """
    model = model_without_weights(run)
    models_bytes = (2 if run.method.quantizes else 1) * sum(weight.nbytes for weight in model.parameters())
    with torch.random.fork_rng(devices=[]):  # adapters draw their start, which the run's own are to draw
        model = with_trained_weights(model, run)
    size = checkpoint_size(run, model.parameters())
    if run.method.has_adapters:  # they are saved beside the merged model
        models_bytes += size.weights_bytes
    return DiskNeed(
        size,
        _at_once(run.save_steps, run, MOST_FULL_STATES),
        _at_once(run.eval_steps, run, MOST_BEST_WEIGHTS),
        models_bytes,
    )


def _at_once(interval: float, run: RunConfig, most: int) -> int:
    """Return how many of the checkpoints after each `interval` steps (0 = unknown) are there at once, up to `most`."""
    steps = 1 if interval < 1 else run.max_steps  # the interval is a share of all, or their number may be known
    return min(most, math.ceil(steps / interval)) if interval and steps > 0 else most


def check_disk(run: RunConfig) -> None:
    """Check that the disk of the run's results can hold its checkpoints and models.

    Raises:
        BadInputError: with what it needs, what is free, and what takes less; or the model has no such target modules.
    """
    need = disk_need(run)
    there = next(each for each in run.results_folder("any").parents if each.exists())
    free = shutil.disk_usage(there).free
    if free < need.total_bytes:
        fewer = ", or --save_steps 0.5 for two full states" if need.full_states > 2 else ""
        raise BadInputError(
            f"This run would write up to {size_text(need.total_bytes)} ({need.full_states} full states of "
            f"{size_text(need.checkpoint.state_bytes)}, {need.best_weights} times the best weights of "
            f"{size_text(need.checkpoint.weights_bytes)}, and {size_text(need.models_bytes)} of tuned models), but "
            f"{size_text(free)} are free in {there}: make room there, or pass --results_root with a folder on another "
            f"disk{fewer}."
        )


def check_room_to_save(run: RunConfig) -> None:
    """Check that the folder for temporary files has room for one model, which a preflight saves; an adapter is small.

    Raises:
        BadInputError: with its size and what is free.
    """
    if run.method.has_adapters:
        return
    folder, size = tempfile.gettempdir(), sum(weight.nbytes for weight in model_without_weights(run).parameters())
    free = shutil.disk_usage(folder).free
    if free < size:
        raise BadInputError(
            f"The preflight saves the model once, {size_text(size)}, but {size_text(free)} are free in {folder}: set "
            "TMPDIR to a folder on another disk."
        )
