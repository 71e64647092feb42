"""A run with sharding from its settings: what is checked, the model with what is to be trained, and its trainer."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from peft import PeftModel
from transformers import PreTrainedModel, TrainerState

from common.data import load_splits
from common.device_maps import whole_model_on
from common.launch import Rank, accelerate_shards, detect_launcher
from common.loop_training import ABOUT_FILE, STATE_FILE
from common.memory_plan import ZERO
from common.models import add_lora, load_base_model, train_linear_layers
from common.placement import model_without_weights
from common.run_config import BadInputError, RunConfig
from common.run_record import default_run_name
from common.sharded_training import DdpTrainer, FsdpTrainer, ShardedTrainer
from common.sharding import describe_wrapping, modules_to_wrap, shard
from common.zero_training import ZeroTrainer, check_deepspeed


def check_sharding_inputs(run: RunConfig) -> None:
    """Check what sharding needs: DeepSpeed, classes to wrap, and a checkpoint to go on from.

    Raises:
        BadInputError: what is missing or does not fit, and what would.
    """
    if run.parallel.startswith("zero"):
        check_deepspeed()
    else:
        modules_to_wrap(model_without_weights(run), run.wrap)
    if run.resume_from:
        check_checkpoint(run)


def check_checkpoint(run: RunConfig) -> None:
    """Refuse a checkpoint that this run cannot go on from; FSDP's and plain loops' may be of another number of ranks.

    Raises:
        BadInputError: what it is of, and what the run is.
    """
    folder, own_name = Path(run.resume_from).expanduser(), run.run_name or default_run_name(run, detect_launcher())
    if not (folder / ABOUT_FILE).is_file():
        raise BadInputError(
            f"resume_from is {run.resume_from}, which holds no {ABOUT_FILE}: pass a folder checkpoint-<step> that a "
            "run of this folder wrote."
        )
    about = json.loads((folder / ABOUT_FILE).read_text(encoding="utf-8"))
    if about["parallel"] != run.parallel and run.is_sharded:
        raise BadInputError(
            f"resume_from is a checkpoint of {about['parallel']}, but parallel is {run.parallel}: pass --parallel "
            f"{about['parallel']}."
        )
    technique = "full" if run.technique == "full" else "lora"
    if about["technique"] != technique:
        raise BadInputError(
            f"resume_from is a checkpoint of {about['technique']}, but technique is {run.technique}: pass --technique "
            f"{about['technique']}."
        )
    if about["ranks"] != run.devices and run.parallel in ZERO:
        raise BadInputError(
            f"resume_from is a checkpoint of {about['ranks']} ranks, but there are {run.devices}, and DeepSpeed's "
            f"parts fit no other number: pass --devices {about['ranks']} (FSDP's can be divided anew)."
        )
    if about["rows_per_step"] != run.effective_batch_size:
        raise BadInputError(
            f"resume_from is a checkpoint of steps of {about['rows_per_step']} rows, but this run's have "
            f"{run.effective_batch_size} (batch_size {run.batch_size} x accumulation_steps {run.accumulation_steps} x "
            f"{run.devices} ranks): make them equal, or rows would be skipped or repeated."
        )
    done, steps = TrainerState.load_from_json(str(folder / STATE_FILE)).global_step, total_steps(run)
    if done >= steps:
        raise BadInputError(
            f"resume_from is a checkpoint after step {done}, and this run has {steps}: nothing is left to train; raise "
            "--epochs or --max_steps."
        )
    if folder.resolve().is_relative_to(run.results_folder(own_name).resolve()):
        raise BadInputError(
            f"resume_from lies in the results of a run called {own_name}, as this one would be: pass another "
            "--run_name."
        )


def model_to_train(run: RunConfig, rank: Rank) -> PreTrainedModel | PeftModel:
    """The base with its trained weights switched on; with FSDP divided, so that no GPU ever holds all of it.

    It loads on the host. DeepSpeed, and Accelerate where it was launched with an FSDP file, divide it when training
    begins; with ddp, for comparison, it stays whole on each rank's device.

    Raises:
        BadInputError: the model lacks a class to wrap, or layers to train.
    """
    model = whole_model_to_train(run, rank.device if run.parallel == "ddp" else "cpu")
    if run.parallel != "fsdp":
        return model
    if rank.is_main:
        print(describe_wrapping(model, run.wrap))
    return model if accelerate_shards() else shard(model, run, rank)


def total_steps(run: RunConfig) -> int:
    """Optimizer steps of the whole run."""
    if run.max_steps > 0:
        return run.max_steps
    return run.epochs * -(-len(load_splits(run).train) // run.effective_batch_size)


def whole_model_to_train(run: RunConfig, device: str) -> PreTrainedModel | PeftModel:
    """The base with its trained weights switched on, whole."""
    model = load_base_model(run, whole_model_on(device))
    if run.technique != "full":
        return add_lora(model, run)
    train_linear_layers(model, run.target_modules)
    return model


def trainer_class(run: RunConfig, rank: Rank) -> Callable[..., ShardedTrainer]:
    """Who makes the step: FSDP2, DeepSpeed, or for comparison DDP."""
    if run.parallel.startswith("zero"):
        return partial(ZeroTrainer, run=run, rank=rank)
    return partial(DdpTrainer if run.parallel == "ddp" else FsdpTrainer, rank=rank)
