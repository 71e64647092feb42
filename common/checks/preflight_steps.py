"""A preflight on the devices: some steps of the longest batch, validation, and a save, each measured."""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from accelerate.utils import gather_object
from peft import PeftModel
from torch.utils.data import Sampler
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from common.base.command_line import SPEAK_FIRST_S
from common.base.run_config import RunConfig
from common.checks.preflight_rows import Rows
from common.hardware.devices import (
    CPU_DEVICE,
    MemoryReading,
    forget_peak,
    read_memory,
)
from common.models.loading import (
    add_lora,
    check_equal_logits,
    load_base_model,
    load_tokenizer,
    next_token_logits,
    train_own_weights,
)
from common.planning.device_maps import whole_model_on
from common.planning.plans import Plan
from common.runtime.rank import rank_started
from common.runtime.world import Rank
from common.tasks.objectives import objective_of
from common.training.export import give_up
from common.training.fsdp import mesh_of
from common.training.pipeline import Pipeline, StageModule, trained_stage
from common.training.pipeline_training import PipelineTrainer, save_parts
from common.training.placement import StageMap
from common.training.sharded_run import model_to_train, trainer_class
from common.training.sharded_training import ShardedTrainer, save_whole
from common.training.tensor_parallel import split_by_plan
from common.training.tensor_training import TensorParallelTrainer
from common.training.trainer import CountingTrainer, SummaryTrainer, trainer_of_rows, training_arguments

STEPS = 3
"""Optimizer steps; the first one also warms up, so that the last two are timed."""


# -- on the devices


class RepeatedBatch(Sampler[list[int]]):
    """The same batch again and again: every row of the data set, in order; each rank computes all of it."""

    world_size, rank = 1, 0

    def __init__(self, row_count: int, steps: int, accumulation_steps: int) -> None:
        """`steps`: optimizer steps of the one epoch."""
        self.row_count, self.step_count, self.accumulation_steps = row_count, steps, accumulation_steps

    def set_epoch(self, epoch: int) -> None:
        """Every epoch is alike."""

    def __iter__(self) -> Iterator[list[int]]:
        """The batch, as often as steps and accumulation need it."""
        for _ in range(len(self)):
            yield list(range(self.row_count))

    def steps(self) -> Iterator[list[int]]:
        """The rows of each optimizer step."""
        for _ in range(self.step_count):
            yield list(range(self.row_count)) * self.accumulation_steps

    def micro_batches(self, step: list[int]) -> list[list[int]]:
        """A step's rows, one list for each accumulation step."""
        return [step[start : start + self.row_count] for start in range(0, len(step), self.row_count)]

    def own(self, rows: list[int]) -> list[int]:
        """Each rank computes all of them."""
        return rows

    def __len__(self) -> int:
        """Batches of the epoch."""
        return self.step_count * self.accumulation_steps


class StepClock(TrainerCallback):
    """When each optimizer step ended."""

    def __init__(self, devices: Sequence[str]) -> None:
        """`devices` (`cpu`, `cuda:0`) are waited for before the clock is read."""
        self.devices = devices
        self.ends_s: list[float] = []

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Note the time."""
        for device in self.devices:
            if device != "cpu":
                torch.accelerator.synchronize(device)
        self.ends_s.append(time.perf_counter())

    @property
    def step_time_s(self) -> float:
        """Seconds of a step, the first one left out."""
        return median(end_s - start_s for start_s, end_s in zip(self.ends_s, self.ends_s[1:], strict=False))


@dataclass(frozen=True)
class Measured:
    """What a rank measured on one of its devices; memory in GiB, on CPU of the process (RSS), else as allocated."""

    rank: int
    device: str
    peak_gib: float
    """Of the training steps."""
    validation_peak_gib: float
    capacity_gib: float
    step_time_s: float
    validation_time_s: float
    logit_difference: float
    """Largest absolute one between what was trained and what was reloaded; one rank reloads, others have 0."""


@contextmanager
def phase(name: str, rank: Rank, remedy: str) -> Iterator[None]:
    """Say on rank 0 when a phase starts and how long it took; out of memory ends it with `remedy` and exit code 1."""
    start_s = time.perf_counter()
    if rank.is_main:
        print(f"{name} ...")
    try:
        yield
    except torch.OutOfMemoryError:
        if not rank.is_main:
            time.sleep(SPEAK_FIRST_S)  # torchrun ends the others once one has gone: one sentence is enough
        memories = {device: read_memory(device) for device in rank.devices}
        device, memory = max(memories.items(), key=lambda pair: pair[1].peak_gib / pair[1].total_gib)
        print(
            f"error: {name}: out of memory on {device}, {memory.peak_gib:.1f} of {memory.total_gib:.1f} GiB "
            f"allocated; {remedy}.",
            file=sys.stderr,
        )
        sys.exit(1)
    if rank.is_main:
        print(f"{name}: {time.perf_counter() - start_s:.1f} s")


def planned_gib(plan: Plan, number: int) -> float:
    """What the plan says of the memory that `Measured` has: of the whole process on CPU, on a GPU without overhead.

    `number` counts devices, and so with one device each, ranks.
    """
    memory = plan.devices[number]
    return memory.peak_gib if plan.cluster.gpus[number].name == CPU_DEVICE else memory.allocated_gib


def smaller_batch(run: RunConfig, rows: int, plan: Plan | None) -> str:
    """What to do when a batch of so many rows runs out of memory: what fits by the plan, or half where it was wrong."""
    said = f"the plan said {max(memory.peak_gib for memory in plan.devices):.1f} GiB, " if plan else ""
    half = rows // 2 - rows // 2 % run.micro_batches
    fitting = plan.max_batch_size if plan and not plan.fits else half
    if fitting == 0:
        return f"{said}and not even one row fits: set gradient_checkpointing, lower --max_length, or use larger devices"
    accumulated = -(-rows * run.gradient_accumulation_steps // fitting)
    return f"{said}try --batch_size {fitting} --gradient_accumulation_steps {accumulated}"


def measure(
    run: RunConfig, rows: Rows, stage_map: StageMap, plan: Plan | None, rank: Rank, folder: Path
) -> list[Measured]:
    """Build, train, validate, save and reload on this rank's devices; `folder` takes what is saved, of all ranks.

    Raises:
        SystemExit: memory ran out; the sentence has been said.
        RuntimeError: what was saved is not what was trained.
    """
    elsewhere = "see in nvidia-smi what else is on the device, or use a smaller --model"
    with phase("build model", rank, elsewhere):
        trainer = trainer_of_longest_batch(run, rows, stage_map, rank, folder)
        clock = StepClock(rank.devices)
        trainer.add_callback(clock)
    with phase(f"{STEPS} steps on the longest batch", rank, smaller_batch(run, len(rows.train), plan)):
        _forget_peak(rank)
        trainer.train()
        training = [read_memory(device) for device in rank.devices]
    fewer = f"validation has batches of its own: pass --per_device_eval_batch_size {len(rows.validation) // 2 or 1}"
    with phase("validation of one batch", rank, fewer):
        validation, validation_time_s = validate(trainer, rank)
    with phase("save and reload", rank, elsewhere):
        difference = save_and_reload(run, trainer, stage_map, rank, folder)
    return [
        Measured(
            rank.rank,
            device,
            trained.peak_gib,
            validated.peak_gib,
            trained.total_gib / (rank.world_size if device == "cpu" else 1),
            clock.step_time_s,
            validation_time_s,
            difference,
        )
        for device, trained, validated in zip(rank.devices, training, validation, strict=True)
    ]


def _forget_peak(rank: Rank) -> None:
    for device in rank.devices:
        if device != "cpu":  # a process's peak cannot be reset
            forget_peak(device)


def trainer_of_longest_batch(
    run: RunConfig, rows: Rows, stage_map: StageMap, rank: Rank, folder: Path
) -> CountingTrainer:
    """The run's own trainer, which takes `STEPS` optimizer steps, every micro-batch of them the longest batch.

    `stage_map` says with mp and pp which stage, and so which device, holds which layers.
    """
    model = trained_model(run, stage_map, rank)
    makes_steps = SummaryTrainer if run.goal.summarizes else CountingTrainer
    if run.is_sharded:
        makes_steps = trainer_class(run, rank)
    if run.parallelism.pipelines:
        makes_steps = partial(PipelineTrainer, pipeline=Pipeline(StageModule(model, run, rank), run, rank))
    if run.parallelism.splits_matrices:
        makes_steps = partial(TensorParallelTrainer, rank=rank)
    arguments = training_arguments(replace(run, max_steps=STEPS, report_to="none"), folder)
    arguments.per_device_train_batch_size = len(rows.train)
    arguments.eval_strategy = arguments.save_strategy = arguments.logging_strategy = "no"
    arguments.load_best_model_at_end = False
    # validation is divided among the ranks batch by batch: one for each
    validation = rows.validation * run.data_parallel_ranks
    tokenizer = load_tokenizer(run)
    trainer = trainer_of_rows(
        model, tokenizer, rows.train, validation, arguments, rank, [], makes_steps, objective_of(run)
    )
    trainer.batches = RepeatedBatch(len(rows.train), STEPS, run.gradient_accumulation_steps)
    return trainer


def trained_model(run: RunConfig, stage_map: StageMap, rank: Rank) -> PreTrainedModel | PeftModel:
    """The base model, or with pp and tp this rank's part, with adapters, or with what the run trains switched on."""
    if run.parallelism.pipelines:
        return trained_stage(run, stage_map, rank)
    if run.is_sharded:
        return model_to_train(run, rank)
    model = load_base_model(run, device_map_of_rank(run, stage_map, rank))
    if not run.method.has_adapters:
        train_own_weights(model, run)
    else:
        model = add_lora(model, run)
    if run.parallelism.splits_matrices:
        return split_by_plan(model, mesh_of(rank))
    return model


def device_map_of_rank(run: RunConfig, stage_map: StageMap, rank: Rank) -> dict[str, str | int]:
    """Where a whole model loads: with mp on GPUs divided as the stages are, else on this rank's one device."""
    return stage_map if len(rank.devices) > 1 else whole_model_on(rank.device)


def validate(trainer: CountingTrainer, rank: Rank) -> tuple[list[MemoryReading], float]:
    """Compute the validation loss of one batch per rank; memory of each device, and the time in seconds."""
    _forget_peak(rank)
    start_s = time.perf_counter()
    trainer.evaluate()  # ends with figures on the host, so that the devices have finished
    return [read_memory(device) for device in rank.devices], time.perf_counter() - start_s


def save_and_reload(run: RunConfig, trainer: CountingTrainer, stage_map: StageMap, rank: Rank, folder: Path) -> float:
    """Save the adapter, or the model, and load it again on one rank: the largest absolute difference of logits.

    With pp that is the last one, which has the logits of all stages. The trained model is given up, so that a device
    holds one model at a time.

    Raises:
        RuntimeError: what was saved is not what was trained.
    """
    trained = trainer.accelerator.unwrap_model(trainer.model)
    if isinstance(trainer, PipelineTrainer):
        batch = trainer.collated(trainer.eval_dataset[:1])
        expected = trainer.pipeline.logits(batch)
        save_parts(trained, folder, rank)
    elif isinstance(trainer, ShardedTrainer):
        batch = trainer.collated(trainer.eval_dataset[:1])
        logits = trainer.logits(batch).float()  # every rank has a part in it
        expected = logits if rank.is_main else None
        save_whole(trainer, folder)
    else:
        batch = trainer.data_collator(trainer.eval_dataset[:1])
        expected = next_token_logits(trained, batch) if rank.is_main else None
        if rank.is_main:
            trained.save_pretrained(folder)
    give_up(trainer, rank.device)
    if expected is None:
        return 0.0
    device_map = device_map_of_rank(run, stage_map, rank)
    if run.method.has_adapters:
        what, reloaded = "adapter", PeftModel.from_pretrained(load_base_model(run, device_map), folder)
    else:
        what, reloaded = "model", load_base_model(run, device_map, source=folder)
    return check_equal_logits(expected, reloaded, batch, what, run.precision)


def measure_all(run: RunConfig, rows: Rows, stage_map: StageMap, plan: Plan | None) -> list[Measured]:
    """`measure` as one rank of the world; what all devices measured, in their order, on every rank."""
    with rank_started(run) as rank, tempfile.TemporaryDirectory(prefix="preflight-") as own_folder:
        folder = Path(gather_object([own_folder])[0])  # stages save parts of one model
        return gather_object(measure(run, rows, stage_map, plan, rank, folder))
