"""Check a run's settings, model, data, disk and memory, before anything is loaded or started."""

import heapq
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase, SchedulerType
from transformers.training_args import OptimizerNames

from common.base.errors import BadInputError, check_installed, reading
from common.base.paths import REPOSITORY, command_here
from common.base.run_config import SHARDED_OPTIMIZERS, RunConfig, check_choice, names_in
from common.base.run_folders import literal_of, workflow_does
from common.base.specs import Parallelism
from common.data.pairs import encode_pairs
from common.data.row_checks import say_once
from common.data.rows import Row, Splits, place_of, shown, texts_of, tokens_in
from common.data.splits import check_tokens, load_splits
from common.data.templates import prompt_ids
from common.hardware.devices import size_text
from common.models.compiled_layers import check_compiler
from common.models.families import check_quantizable, check_targets, suited_to_model, warn_of_strange_rows
from common.models.loading import (
    any_shape_config,
    check_attention,
    check_liger,
    check_model,
    load_tokenizer,
    longest_readable,
    model_class,
    model_without_weights,
    weight_dtype,
)
from common.models.placement import check_placement_and_memory
from common.models.quantization import check_bitsandbytes
from common.models.real_models import check_minilm
from common.models.tiled_mlp import check_tiles
from common.models.trained_weights import with_trained_weights
from common.models.weight_files import check_weight_files
from common.records.store import default_run_name
from common.runtime.disks import check_free_for_run, may_be_restarted_in
from common.runtime.rank import check_gpus, threads_per_rank
from common.runtime.world import detect_launcher
from common.tasks.forgetting import general_rows
from common.tasks.scoring import reward_functions
from common.training.optimizers import make_schedule, optimizer_class, training_arguments
from common.training.part import part_class
from common.training.resuming import check_checkpoint, digests_of
from common.training.saver import MOST_BEST_WEIGHTS, MOST_FULL_STATES, CheckpointSize, checkpoint_size

OTHER_OPTIMIZERS = f"Choose another one, such as {', '.join(SHARDED_OPTIMIZERS)}."
OTHER_SCHEDULES = "Choose another one, such as cosine, linear or constant_with_warmup."
# of a square of weights: of fewer than 4,096 bitsandbytes' states have 32 bits, and of fewer than 100,000 no pages
WIDTH = 320
USED = ("pad_token", "bos_token", "eos_token", "unk_token", "sep_token", "cls_token")  # written, whatever texts have
UNKNOWN = "\U0010ffff"  # a character that no vocabulary has
TEMPLATE_TOKENS = 1_000  # more than a chat template writes around a row's texts
PICTURED_ROWS = 128  # rows whose pictures are looked at: those with the longest texts


def check_inputs(run: RunConfig) -> RunConfig:
    """Refuse settings, rows, model, disk or memory that a run cannot have, before anything is written or started.

    Return the run as `check_settings` does, with the rows that its plan chose to validate and answer at once.
    """
    run = check_settings(run)
    splits, tokenizer = load_splits(run), load_tokenizer(run)
    check_training_rows(run, splits.train)
    if not (run.resume_from_checkpoint or may_be_restarted_in(results_of(run))):  # what was written takes room
        check_disk(run)
    if run.resume_from_checkpoint:
        check_checkpoint(run, detect_launcher(), digests_of(splits))
    if run.tells_forgetting:
        general_rows(run, tokenizer)
    check_tokens(splits, tokenizer, run)
    check_rows_readable(run, splits, tokenizer)
    warn_of_strange_rows(run)
    return check_placement_and_memory(run, splits, tokenizer)


def check_settings(run: RunConfig) -> RunConfig:
    """Refuse settings that cannot be, or not with this model; return the run as `suited_to_model` does."""
    first = (check_folder, check_results_folder, check_gpus, check_threads, check_attention, check_bitsandbytes,
             check_compiler, check_trackers)  # fmt: skip
    for check in first:
        check(run)
    if run.goal.is_judged and run.independent_judge == "minilm":
        check_minilm("independent_judge is minilm", "--independent_judge none")
    tokenizer = load_tokenizer(run)
    run = suited_to_model(run)
    tokens_without_embedding(run, tokenizer)
    of_model = (check_optimizer, check_targets, check_quantizable, check_liger, check_tiles, _check_parallelism,
                _check_log_probs, check_weights)  # fmt: skip
    for check in of_model:
        check(run)
    return run


def check_trackers(run: RunConfig) -> None:
    """Raise BadInputError unless Transformers knows each experiment tracker, and it is installed."""
    from transformers.integrations import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

    trackers = names_in(run.report_to)
    for tracker in trackers:
        check_choice("A tracker in report_to", tracker, ("none", "all", *INTEGRATION_TO_CALLBACK))
        if tracker not in INTEGRATION_TO_CALLBACK and len(trackers) > 1:
            raise BadInputError(f"report_to is {run.report_to}, but {tracker} cannot be combined: pass it alone.")
        if tracker in INTEGRATION_TO_CALLBACK and tracker not in get_available_reporting_integrations():
            raise BadInputError(f"report_to names {tracker}, which is not installed: `pip install {tracker}`.")


def check_threads(run: RunConfig) -> None:
    """Raise BadInputError where a CPU run asks for more threads than this machine has; each rank may have one."""
    ranks, most = run.ranks_per_node, threads_per_rank(run.ranks_per_node)
    if run.threads > most:
        raise BadInputError(
            f"threads is {run.threads} for each of {ranks} ranks here, but this machine has {os.cpu_count()}: pass "
            f"--threads {most} at most."
        )


def check_optimizer(run: RunConfig) -> None:
    """Raise BadInputError unless Transformers knows optimizer and schedule, and the optimizer works here."""
    check_choice("optim", run.optim, [each.value for each in OptimizerNames])
    check_choice("lr_scheduler_type", run.lr_scheduler_type, [each.value for each in SchedulerType])
    if run.optim in SHARDED_OPTIMIZERS:  # PyTorch's own
        return
    weights = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float32 if run.method.has_adapters else weight_dtype(run))
    what = f"optim is {run.optim}, which"
    with reading(what, OTHER_OPTIMIZERS, "built"):
        kind, settings = optimizer_class(weights, run)
    if "model" in settings or "optimizer_dict" in settings:
        raise BadInputError(f"{what} takes its steps in the backward pass, before clipping. {OTHER_OPTIMIZERS}")
    if hasattr(kind, "train"):
        raise BadInputError(f"{what} trains and validates with different weights. {OTHER_OPTIMIZERS}")
    with reading(what, OTHER_OPTIMIZERS, "built"):
        optimizer = kind(weights.parameters(), **settings)
        if run.device == "cpu":  # a GPU that only looks ahead is left alone
            for weight in weights.parameters():
                weight.grad = torch.ones_like(weight)
            optimizer.step()


def check_schedule(run: RunConfig, steps: int) -> None:
    """Raise BadInputError unless a run of so many steps can follow its learning-rate schedule."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=run.peak_learning_rate)
    what = f"lr_scheduler_type is {run.lr_scheduler_type}, which"
    with reading(what, OTHER_SCHEDULES, "followed"):
        schedule = make_schedule(optimizer, run, steps)
        if isinstance(schedule, LambdaLR):
            warmup = training_arguments(run).get_warmup_steps(steps)
            # where its formula changes
            places = {place for end in (0, warmup, steps) for place in (end - 1, end, end + 1) if 0 <= place <= steps}
            for factor in schedule.lr_lambdas:
                list(map(factor, places))
            return
    raise BadInputError(f"{what} follows validations, but learning rates here follow steps alone. {OTHER_SCHEDULES}")


def check_weights(run: RunConfig) -> None:
    """Raise BadInputError unless the files of a pretrained model hold all that it needs, by their headers."""
    if run.weights == "pretrained":
        config = any_shape_config(run.model, run.model_revision)
        check_weight_files(run, check_model(run.model, run.model_revision), model_class(run, config), config)


def check_training_rows(run: RunConfig, rows: Sequence[Row]) -> None:
    """Raise BadInputError unless each rank, or partition, has a training row, and the schedule can be followed."""
    if len(rows) < run.partition_count:
        parts = f"{run.partition_count} {'partitions' if run.partitions else 'ranks'}"
        raise BadInputError(f"There are {len(rows)} training rows for {parts}: give each at least one.")
    check_schedule(run, run.total_steps(len(rows)))


def _check_parallelism(run: RunConfig) -> None:
    holds_a_part = run.parallelism.divides_tensors or run.parallelism.pipelines
    if holds_a_part and run.parallelism.part == Parallelism.part:
        raise BadInputError(
            f"parallel is {run.parallel}, which can be planned, but not trained with: its row names no part of its own."
        )
    part_class(run).check(run)


def _check_log_probs(run: RunConfig) -> None:
    if run.goal.rewards:
        reward_functions(run)
    if run.use_vllm:
        check_installed("vllm", "use_vllm is True", "`pip install 'trl[vllm]'`, or leave --use_vllm out")
    if not (run.goal.reads_log_probs and run.method.has_adapters):
        return
    if run.targets_head:
        raise BadInputError(
            f"target_modules is {run.target_modules}, but TRL's head reads no adapter of it: leave lm_head out."
        )
    if run.lora_dropout:  # model and reference are to be alike at first
        raise BadInputError(
            f"lora_dropout is {run.lora_dropout}, but this task trains without it: pass --lora_dropout 0."
        )


def results_of(run: RunConfig) -> Path:
    """Return the folder that takes the run's results when it starts here."""
    return run.results_folder(run.run_name or default_run_name(run, detect_launcher()))


def check_results_folder(run: RunConfig) -> None:
    """Raise BadInputError unless results can be written, and their folder is new, or a run made it."""
    results = results_of(run)
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
    """Raise BadInputError unless the workflow of the run folder does what is asked, as it would do its own."""
    if not run.run_folder:
        return
    own, main = literal_of(REPOSITORY / run.run_folder), getattr(sys.modules["__main__"], "RUN", None)
    is_started = isinstance(main, RunConfig) and main.run_folder == run.run_folder
    others = ""
    if run.task != own.task:
        setting, does = "task", own.task
    elif is_started and main.loop != run.loop:
        setting, does = "loop", main.loop
    elif run.sp_size > 1 and own.sp_size == 1:
        setting, does, others = "sp_size", "1", " (2.8_full_finetuning_with_sp shares rows)"
    elif not workflow_does(own, run.technique, run.parallel):
        setting = "technique" if run.technique != own.technique else "parallel"
        does, others = f"{own.technique} with {own.parallel}", f" (`{command_here('dry_run')}` and the planner can)"
    else:
        return
    raise BadInputError(
        f"{setting} is {getattr(run, setting)}, but the workflow of {run.run_folder} is for {does}: leave --{setting} "
        f"out, or go to another workflow or folder{others}."
    )


@dataclass(frozen=True)
class DiskNeed:
    """What a run writes: so many full states and best weights at the same time, and at its end models, in bytes."""

    checkpoint: CheckpointSize
    full_states: int
    best_weights: int
    models_bytes: int

    @property
    def total_bytes(self) -> int:
        """The most that is there at the same time."""
        states = self.full_states * self.checkpoint.state_bytes
        return states + self.best_weights * self.checkpoint.weights_bytes + self.models_bytes


def disk_need(run: RunConfig) -> DiskNeed:
    """Return what `run` writes, by the shape of its model, but for records, logs and pictures, which are small."""
    model = model_without_weights(run)
    models_bytes = (2 if run.method.quantizes else 1) * sum(weight.nbytes for weight in model.parameters())
    with torch.random.fork_rng(devices=[]):  # adapters draw their start, which the run's own are to draw
        model = with_trained_weights(model, run)
    size = checkpoint_size(run, model.parameters())
    if run.method.has_adapters:  # they are saved beside the merged model
        models_bytes += size.weights_bytes

    def at_once(interval: float, most: int) -> int:
        """Return how many of the checkpoints after each `interval` steps (0 = unknown) are there at once."""
        steps = 1 if interval < 1 else run.max_steps  # the interval is a share of all, or their number may be known
        return min(most, math.ceil(steps / interval)) if interval and steps > 0 else most

    states, weights = at_once(run.save_steps, MOST_FULL_STATES), at_once(run.eval_steps, MOST_BEST_WEIGHTS)
    return DiskNeed(size, states, weights, models_bytes)


def check_disk(run: RunConfig) -> None:
    """Raise BadInputError unless the disk of the run's results can hold its checkpoints and models."""
    need = disk_need(run)
    there = next(each for each in run.results_folder("any").parents if each.exists())
    free = shutil.disk_usage(there).free
    if free < need.total_bytes:
        fewer = ", or --save_steps 0.5 for two full states" if need.full_states > 2 else ""
        raise BadInputError(
            f"This run would write up to {size_text(need.total_bytes)} ({need.full_states} full states of "
            f"{size_text(need.checkpoint.state_bytes)}, {need.best_weights} times the best weights of "
            f"{size_text(need.checkpoint.weights_bytes)}, and {size_text(need.models_bytes)} of tuned models), but "
            f"{size_text(free)} are free in {there}: make room, or pass --results_root with another disk{fewer}."
        )


def check_room_to_save(run: RunConfig) -> None:
    """Raise BadInputError unless the folder for temporary files has room for the model that a preflight saves."""
    if run.method.has_adapters:  # which are small
        return
    folder, size = tempfile.gettempdir(), sum(weight.nbytes for weight in model_without_weights(run).parameters())
    free = shutil.disk_usage(folder).free
    if free < size:
        raise BadInputError(
            f"A preflight saves {size_text(size)}, but {size_text(free)} are free in {folder}: set TMPDIR elsewhere."
        )


def check_rows_readable(run: RunConfig, splits: Splits, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise BadInputError unless the model has embeddings for all tokens of the rows, and positions for its answers."""
    if beyond := tokens_without_embedding(run, tokenizer):
        any_of_them = re.compile("|".join(map(re.escape, beyond)))
        for row in chain(splits.train, splits.validation, splits.test):
            found = next(filter(None, map(any_of_them.search, texts_of(row))), None)
            if found:
                raise BadInputError(
                    f"{place_of(row)} has the token {found[0]!r} in a text, for which {run.model} has no embedding: "
                    "remove it there, or from the tokenizer's added tokens."
                )
        say_once(f"{run.model}: it has no embedding for {shown(beyond)} of its tokenizer, which no row has")
    if run.goal.converses:
        learnt = [*splits.train, *splits.validation] if run.goal.rewards else []
        _check_positions(run, [*learnt, *splits.test], tokenizer)


def tokens_without_embedding(run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return tokens of texts that the model has no embedding for, as Gemma 3 of 1B for its larger siblings' pictures.

    Refuse one that is written whatever the texts, and the tokenizer of another model.
    """
    count = any_shape_config(run.model, run.model_revision).get_text_config().vocab_size
    added, roles = tokenizer.added_tokens_decoder, {getattr(tokenizer, role): role for role in USED}
    if tokenizer.unk_token_id not in tokenizer(UNKNOWN)["input_ids"]:
        roles.pop(tokenizer.unk_token, None)  # texts are written in bytes, and nothing is unknown
    beyond = {token: number for token, number in tokenizer.get_vocab().items() if number >= count}
    for token, number in beyond.items():
        role = roles.get(token) or ("part of its vocabulary" if number not in added else "")
        if not role and token in str(tokenizer.chat_template):
            role = "in its chat template"
        if role:
            raise BadInputError(
                f"The tokenizer of {run.model} has the token {token!r} as number {number} ({role}), but the model has "
                f"embeddings for {count:,}: take its own tokenizer, or add embeddings (`resize_token_embeddings`)."
            )
    return list(beyond)


def _check_positions(run: RunConfig, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> None:
    positions = longest_readable(any_shape_config(run.model, run.model_revision))
    if positions is None:
        return
    room = positions - run.max_new_tokens
    long = [row for row in rows if 4 * _characters(row) + TEMPLATE_TOKENS > room]  # a character has 4 bytes at most
    if run.goal.sees:
        long = heapq.nlargest(PICTURED_ROWS, rows, key=_characters)
    needed = [len(ids) + run.max_new_tokens for ids in prompt_ids(long, tokenizer)] if long else [0]
    if run.goal.compares and long:
        needed = list(map(max, needed, map(tokens_in, encode_pairs(long, tokenizer))))
    most = max(needed)
    if most > positions:
        fewer = run.max_new_tokens - (most - positions)
        instead = f"pass --max_new_tokens {fewer} or less, or " if fewer > 0 else ""
        raise BadInputError(
            f"{place_of(long[needed.index(most)])} takes {most:,} tokens with its answer "
            f"(max_new_tokens is {run.max_new_tokens}), but {run.model} has positions for {positions:,}: {instead}"
            "shorten such rows."
        )


def _characters(row: Row) -> int:
    return sum(map(len, texts_of(row))) + len(str(row.get("tools", "")))
