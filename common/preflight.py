"""The real training step on the real devices, so that a run fails in its first minute and not in its third hour.

    python -m common.preflight 2.1_lora_finetuning/run_0_cpu_x1
    python -m common.preflight 2.2_lora_finetuning_with_ddp/run_1_a6000_48g_x2 --seq-len 1024 --batch_size 4

Settings, model, data and plan are checked first. Then every rank builds the model, or its stage, with random weights of
its real shape (nothing is downloaded), takes three optimizer steps on the longest batch that can come up, validates one
batch, and saves and reloads what it trained. What was measured is called so; the rest is projected. Nothing is written
into the repository; `--json FILE` keeps the figures.

Exit code 0: it passed; 1: it does not fit, or something failed; 2: the question is wrong.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate.utils import gather_object
from peft import PeftModel
from tabulate import tabulate
from torch.utils.data import Sampler
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from common.architectures import UnknownArchitectureError, read_architecture
from common.data import Tokens, load_splits, longest_batch, tokens_of
from common.device_maps import whole_model_on
from common.disk_needs import check_room_to_save
from common.hardware import (
    CPU_DEVICE,
    Gpu,
    MemoryReading,
    cpu_device,
    find_gpu,
    forget_peak,
    gpu_of_device,
    gpus,
    read_memory,
)
from common.labelled_data import label_names_of
from common.launch import (
    BAD_INPUT_EXIT_CODE,
    SPEAK_FIRST_S,
    Rank,
    check_settings_and_data,
    detect_launcher,
    rank_started,
    torchrun_command,
)
from common.memory_plan import OPTIMIZER_BYTES, BatchShape
from common.minilm import MINILM
from common.models import (
    EMBEDDED_BASE,
    EMBEDDED_SUMMARIZER,
    add_lora,
    any_shape_config,
    check_equal_logits,
    load_base_model,
    load_tokenizer,
    longest_readable,
    next_token_logits,
    train_own_weights,
)
from common.pipeline import Pipeline, StageModule, trained_stage
from common.pipeline_training import PipelineTrainer, save_parts
from common.placement import StageMap, place_stages
from common.planner import LARGEST_BATCH, Plan, plan_run, why
from common.run_config import REPOSITORY, BadInputError, RunConfig
from common.run_record import settings_without_paths, write_json
from common.settings import run_of_folder
from common.sharded_run import check_sharding_inputs, model_to_train, trainer_class
from common.sharded_training import ShardedTrainer, save_whole
from common.sharding import mesh_of
from common.tensor_parallel import check_divisible, split_by_plan
from common.tensor_training import TensorParallelTrainer
from common.training import OBJECTIVES, CountingTrainer, SummaryTrainer, give_up, trainer_of_rows, training_arguments

STEPS = 3
"""Optimizer steps; the first one also warms up, so that the last two are timed."""


# -- what is tried


@dataclass(frozen=True)
class Rows:
    """The longest batches of a run, each of one rank."""

    train: list[Tokens]
    validation: list[Tokens]
    count: int | None
    """Training rows of the whole run; None = not known."""
    source: str
    """Where the rows come from, in words."""


def longest_rows(rows: list[Tokens], count: int, task: str) -> list[Tokens]:
    """The `count` rows with the most tokens, longest first.

    With summarization the longest texts each have one of the longest summaries: no batch can be larger.
    """
    longest = sorted(rows, key=lambda row: -len(row["input_ids"]))[:count]
    if task != "summarization":
        return longest
    summaries = sorted((row["labels"] for row in rows), key=len, reverse=True)
    return [{**row, "labels": summary} for row, summary in zip(longest, summaries, strict=False)]


def rows_of_run(run: RunConfig) -> Rows:
    """The longest of the run's own rows, as the tokenizer for random weights cuts them.

    Raises:
        BadInputError: rows are missing or malformed, or have no answer within `max_length`.
    """
    splits, tokenizer = load_splits(run), load_tokenizer(run)
    tokenizer_is_own = run.model == MINILM or (REPOSITORY / run.model).resolve() in (EMBEDDED_BASE, EMBEDDED_SUMMARIZER)
    try:
        train, validation = (tokens_of(rows, tokenizer, run) for rows in (splits.train, splits.validation))
    except BadInputError as cut:
        if tokenizer_is_own:
            raise
        raise BadInputError(
            f"{str(cut).rstrip('.')}, or, as these are tokens of the embedded tokenizer and the model's own may make "
            f"fewer, pass --seq-len {run.max_length}."
        ) from None
    return Rows(
        longest_rows(train, run.batch_size, run.task),
        longest_rows(validation, run.evaluation_batch_size, run.task),
        len(train),
        f"the longest of {len(train):,}" + ("" if tokenizer_is_own else ", in tokens of the embedded tokenizer"),
    )


def rows_of_length(run: RunConfig, tokens: int) -> Rows:
    """Rows of exactly so many tokens, all of them learnt, for a run whose data are not here yet.

    Raises:
        BadInputError: a row of that length has nothing to predict.
    """
    if tokens < 2:
        raise BadInputError(f"--seq-len is {tokens}, but must be at least 2: the first token is not predicted.")
    tokenizer = load_tokenizer(run)
    # no special ones: padding's embedding is zero, and a norm of zeros makes gradients explode
    ordinary = sorted(set(range(tokenizer.vocab_size)) - set(tokenizer.all_special_ids))
    ids = list(islice(cycle(ordinary), tokens))
    labels: int | list[int] = ids
    if run.task == "classification":
        labels = len(label_names_of(run)) - 1
    elif run.task == "summarization":
        labels = list(islice(cycle(ordinary), run.max_summary_length))
    row = {"input_ids": ids, "attention_mask": [1] * tokens, "labels": labels}
    count = run.train_rows if run.train_rows > 0 else None
    return Rows([row] * run.batch_size, [row] * run.evaluation_batch_size, count, "by --seq-len, all of it learnt")


def with_rows_at_hand(run: RunConfig) -> RunConfig:
    """The run on embedded rows, where its own are not needed: with classification they say which labels there are."""
    if run.task == "classification":
        return run
    if run.task == "summarization":
        return replace(run, data="assets/chat_summaries", text_column="dialogue", summary_column="summary")
    return replace(run, data=RunConfig().data)


def check_length(run: RunConfig, rows: Rows, option: str) -> None:
    """Refuse rows that are longer than the model reads.

    Raises:
        BadInputError: with both lengths; `option` is what the user can lower.
    """
    longest = max(len(row["input_ids"]) for row in (*rows.train, *rows.validation))
    readable = longest_readable(any_shape_config(run.model))
    if readable and longest > readable:
        raise BadInputError(
            f"The longest row has {longest} tokens, but {run.model} reads {readable}: pass {option} {readable}."
        )


def batch_of(run: RunConfig, rows: Rows) -> BatchShape:
    """The shape of the longest batch; the longest rows alone need not have every label."""
    batch = longest_batch(rows.train, run.batch_size)
    return replace(batch, classes=len(label_names_of(run))) if batch.classes else batch


def device_of(run: RunConfig) -> Gpu | None:
    """A device of the run to plan with: the GPU at hand, or the one the folder was made for; None = both unknown.

    The ranks of a CPU run share the machine's memory: each has an equal part.
    """
    if run.device == "cpu":
        cpu = cpu_device()
        return replace(cpu, memory_gib=cpu.memory_gib / run.world_size)
    return gpu_of_device(gpus()[1][0]) or (find_gpu(run.gpu) if run.gpu else None)


def unknown_to_planner(run: RunConfig) -> str:
    """What the planner does not know of this run, which then goes without a plan; empty = nothing."""
    if device_of(run) is None:
        return f"the catalogue lacks {gpus()[1][0]}; --gpu may name one of like memory and speed"
    if run.optimizer not in OPTIMIZER_BYTES:
        return f"the planner does not know the optimizer {run.optimizer}"
    try:
        read_architecture(run.model)
    except UnknownArchitectureError as unknown:
        return str(unknown)
    return ""


def place_and_plan(run: RunConfig, batch: BatchShape) -> tuple[StageMap, Plan | None]:
    """Which stage holds which layers, with mp and pp, and the plan; None: the planner does not know something.

    Raises:
        BadInputError: layers cannot be placed, say because of what the planner does not know.
    """
    unknown = unknown_to_planner(run)
    if run.parallel not in ("mp", "pp"):
        return {}, None if unknown else plan_run(run, batch, device_of(run))
    if unknown:
        raise BadInputError(f"Layers are placed by their planned memory, but {unknown}.")
    placement = place_stages(run, batch, device_of(run))
    return placement.stage_map, placement.plan


def total_steps(run: RunConfig, row_count: int | None) -> int | None:
    """Optimizer steps of the whole run; None where the number of rows, and so of steps, is not known."""
    if run.max_steps > 0:
        return run.max_steps
    if row_count is None:
        return None
    batches = -(-row_count // (run.batch_size * run.data_parallel_ranks))
    return run.epochs * -(-batches // run.accumulation_steps)


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
    accumulated = -(-rows * run.accumulation_steps // fitting)
    return f"{said}try --batch_size {fitting} --accumulation_steps {accumulated}"


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
    fewer = f"validation has batches of its own: pass --evaluation_batch_size {len(rows.validation) // 2 or 1}"
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
    makes_steps = SummaryTrainer if run.task == "summarization" else CountingTrainer
    if run.is_sharded:
        makes_steps = trainer_class(run, rank)
    if run.parallel == "pp":
        makes_steps = partial(PipelineTrainer, pipeline=Pipeline(StageModule(model, run, rank), run, rank))
    if run.parallel == "tp":
        makes_steps = partial(TensorParallelTrainer, rank=rank)
    arguments = training_arguments(replace(run, max_steps=STEPS, report_to="none"), folder)
    arguments.per_device_train_batch_size = len(rows.train)
    arguments.eval_strategy = arguments.save_strategy = arguments.logging_strategy = "no"
    arguments.load_best_model_at_end = False
    # validation is divided among the ranks batch by batch: one for each
    validation = rows.validation * run.data_parallel_ranks
    tokenizer = load_tokenizer(run)
    trainer = trainer_of_rows(
        model, tokenizer, rows.train, validation, arguments, rank, [], makes_steps, OBJECTIVES[run.task]
    )
    trainer.batches = RepeatedBatch(len(rows.train), STEPS, run.accumulation_steps)
    return trainer


def trained_model(run: RunConfig, stage_map: StageMap, rank: Rank) -> PreTrainedModel | PeftModel:
    """The base model, or with pp and tp this rank's part, with adapters, or with what the run trains switched on."""
    if run.parallel == "pp":
        return trained_stage(run, stage_map, rank)
    if run.is_sharded:
        return model_to_train(run, rank)
    model = load_base_model(run, device_map_of_rank(run, stage_map, rank))
    if run.technique == "full":
        train_own_weights(model, run)
    else:
        model = add_lora(model, run)
    if run.parallel == "tp":
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
    if run.technique != "full":
        what, reloaded = "adapter", PeftModel.from_pretrained(load_base_model(run, device_map), folder)
    else:
        what, reloaded = "model", load_base_model(run, device_map, source=folder)
    return check_equal_logits(expected, reloaded, batch, what, run.precision)


def measure_all(run: RunConfig, rows: Rows, stage_map: StageMap, plan: Plan | None) -> list[Measured]:
    """`measure` as one rank of the world; what all devices measured, in their order, on every rank."""
    with rank_started(run) as rank, tempfile.TemporaryDirectory(prefix="preflight-") as own_folder:
        folder = Path(gather_object([own_folder])[0])  # stages save parts of one model
        return gather_object(measure(run, rows, stage_map, plan, rank, folder))


# -- the answer


def announcement(run: RunConfig, rows: Rows, plan: Plan | None) -> str:
    """What is going to be tried, and what was planned for it."""
    batch = batch_of(run, rows)
    summaries = f" with summaries of up to {batch.target_length}" if batch.target_length else ""
    shape = f"{batch.rows} rows of up to {batch.length} tokens{summaries} ({rows.source})"
    tried = f"tries {run.technique} of {run.model} with {run.parallel} on {run.devices} x {run.device}: {shape}"
    if plan is None:
        return f"{tried}\nno plan: {unknown_to_planner(run)}"
    memory, gpu = plan.devices[plan.tightest], plan.cluster.gpus[plan.tightest]
    layers, where = "", "per device"
    if plan.job.parallel in ("mp", "pp"):
        layers = f"layers on each stage: {', '.join(str(sum(share.layers)) for share in plan.shares)}\n"
        where = "on the fullest device"
    return (
        f"{tried}\n{layers}planned for {gpu.name}: {memory.peak_gib:.2f} of {gpu.memory_gib:.1f} GiB {where}, "
        f"{planned_step_s(run, plan):.3g} s per step; {why(plan)}"
    )


def planned_step_s(run: RunConfig, plan: Plan) -> float:
    """Seconds of an optimizer step by the plan, with all its micro-batches."""
    return plan.time.total_s * run.accumulation_steps


def memory_table(plan: Plan | None, measured: Sequence[Measured]) -> str:
    """Memory of the training step, planned and measured, one row per device of each rank."""
    rows = []
    for number, found in enumerate(measured):
        planned = planned_gib(plan, number) if plan else None
        rows.append([
            found.rank,
            found.device,
            "no plan" if planned is None else f"{planned:.2f}",
            f"{found.peak_gib:.2f}",
            "-" if planned is None else f"{found.peak_gib / planned - 1:+.0%}",
            f"{found.capacity_gib:.1f}",
        ])  # fmt: skip
    headers = ["rank", "device", "planned\nGiB", "measured\nGiB", "difference", "capacity\nGiB"]
    aligned = ("right", "left", "right", "right", "right", "right")
    return tabulate(rows, headers, tablefmt="rounded_outline", colalign=aligned, disable_numparse=True)


def largest_batch(plan: Plan, measured: Sequence[Measured]) -> tuple[int, float]:
    """Rows per rank that fit if every planned byte takes what was measured for it; and measured over planned memory."""
    factor = max(found.peak_gib / planned_gib(plan, number) for number, found in enumerate(measured))
    devices = tuple(
        replace(gpu, memory_gib=found.capacity_gib / factor)
        for gpu, found in zip(plan.cluster.gpus, measured, strict=True)
    )
    return replace(plan, cluster=replace(plan.cluster, gpus=devices)).max_batch_size, factor


def report(run: RunConfig, rows: Rows, plan: Plan | None, measured: Sequence[Measured]) -> str:
    """The result for a terminal."""
    what = "the process" if run.device == "cpu" else "what PyTorch allocates; context and gaps come on top"
    validation_s = max(found.validation_time_s for found in measured)
    validation_gib = max(found.validation_peak_gib for found in measured)
    lines = [
        f"memory of the training step ({what}):",
        memory_table(plan, measured),
        *time_lines(run, rows, plan, max(found.step_time_s for found in measured)),
        *([largest_batch_line(run, plan, measured)] if plan else []),
        f"validation: measured {validation_s:.2f} s and a peak of {validation_gib:.2f} GiB for "
        f"{len(rows.validation)} {rows_unit(run)}",
        "passed: trained, validated, saved and reloaded; logits measured "
        f"{max(found.logit_difference for found in measured):.1e} apart",
    ]
    return "\n".join(lines)


def figures(run: RunConfig, rows: Rows, plan: Plan | None, measured: Sequence[Measured]) -> dict[str, Any]:
    """What `report` says as data: memory in GiB, times in seconds; without a plan, what is planned is None."""
    batch = batch_of(run, rows)
    return {
        "settings": settings_without_paths(run),
        "rows": batch.rows,
        "tokens": batch.length,
        "validation_rows": len(rows.validation),
        "devices": [
            {**asdict(found), "planned_gib": planned_gib(plan, number) if plan else None}
            for number, found in enumerate(measured)
        ],
        "planned_step_time_s": planned_step_s(run, plan) if plan else None,
        "step_time_s": max(found.step_time_s for found in measured),
        "validation_time_s": max(found.validation_time_s for found in measured),
        "validation_peak_gib": max(found.validation_peak_gib for found in measured),
        "logit_difference": max(found.logit_difference for found in measured),
        "largest_batch": largest_batch(plan, measured)[0] if plan else None,
        "no_plan": "" if plan else unknown_to_planner(run),
    }


def rows_unit(run: RunConfig) -> str:
    """What a batch is counted in: stages work on the same rows, ranks else on their own."""
    return "rows" if run.parallel in ("mp", "pp", "tp") else "rows per rank"


def largest_batch_line(run: RunConfig, plan: Plan, measured: Sequence[Measured]) -> str:
    """The largest batch in words."""
    rows, factor = largest_batch(plan, measured)
    count = f"{LARGEST_BATCH:,} or more" if rows >= LARGEST_BATCH else f"{rows:,}"
    return (
        f"largest batch: projected {count} {rows_unit(run)}, by the plan times measured over planned memory "
        f"({factor:.2f})"
    )


def time_lines(run: RunConfig, rows: Rows, plan: Plan | None, step_time_s: float) -> list[str]:
    """A step's time against the plan's, and what follows for the whole training and its cost."""
    planned = "no plan"
    if plan:
        planned_s = planned_step_s(run, plan)
        planned = f"planned {planned_s:.3g} s ({step_time_s / planned_s - 1:+.0%})"
    lines = [f"step time: measured {step_time_s:.3g} s, {planned}"]
    steps = total_steps(run, rows.count)
    if steps is None:
        return [*lines, "training time: not known without the number of rows; pass --train_rows or --max_steps"]
    training_s = steps * step_time_s
    duration = timedelta(seconds=round(training_s))
    lines.append(
        f"training time: projected {duration} for {steps:,} steps, all on batches as long as this one; validation, "
        "checkpoints and answers come on top"
    )
    gpu = device_of(run)
    if gpu is None or gpu.usd_per_hour is None:
        return [*lines, "cost: no price"]
    usd = gpu.usd_per_hour * run.devices * training_s / 3600
    return [*lines, f"cost: projected {usd:,.2f} USD ({run.devices} x {gpu.usd_per_hour} per hour, {gpu.price_date})"]


# -- the command line


def parser() -> argparse.ArgumentParser:
    """The command line's own options; the others are overrides of the run's settings."""
    made = argparse.ArgumentParser(
        prog="python -m common.preflight", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any setting of common/run_config.py can follow, such as --batch_size 4.",
    )  # fmt: skip
    made.add_argument("run_folder", type=Path, help="such as 2.1_lora_finetuning/run_0_cpu_x1")
    made.add_argument("--seq-len", type=int, help="rows of exactly so many tokens, in place of the run's data")
    made.add_argument("--anyway", action="store_true", help="try what does not fit by the plan, too")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write what was measured into this file")
    return made


def start_ranks(run: RunConfig, arguments: Sequence[str]) -> None:
    """Start this command again on every rank by torchrun, in this process's place."""
    if run.device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set it too, but warns about it
    command = torchrun_command("-m", run.world_size, "common.preflight", *arguments)
    sys.stdout.flush()  # what is still in the buffer would be lost
    os.execv(command[0], command)


def preflight(arguments: Sequence[str]) -> int:
    """Check, plan, try and report: the exit code.

    Raises:
        BadInputError: the run, its model or its data are not as they should be.
    """
    options, overrides = parser().parse_known_args(arguments)
    if options.json and not options.json.parent.is_dir():
        raise BadInputError(f"--json is {options.json}, but its folder does not exist: make it, or name another file.")
    run = replace(run_of_folder(options.run_folder, overrides), weights="random")
    if options.seq_len is None:
        check_settings_and_data(run)
        rows = rows_of_run(run)
        check_length(run, rows, "--max_length")
    else:
        check_settings_and_data(with_rows_at_hand(run))
        rows = rows_of_length(run, options.seq_len)
        check_length(run, rows, "--seq-len")
    if run.is_sharded:
        check_sharding_inputs(run)
    if run.parallel == "tp":
        check_divisible(any_shape_config(run.model), run.devices)
    batch = batch_of(run, rows)
    stage_map, plan = place_and_plan(run, batch)
    if detect_launcher() != "torchrun":
        print(announcement(run, rows, plan))
        if plan and not plan.fits and not options.anyway:
            print("not tried; --anyway tries it all the same")
            return 1
        check_room_to_save(run)
        if run.world_size > 1:
            start_ranks(run, arguments)
    measured = measure_all(run, rows, stage_map, plan)
    if os.environ.get("RANK", "0") == "0":
        print(report(run, rows, plan, measured))
        if options.json:
            write_json(figures(run, rows, plan, measured), options.json)
    return 0


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m common.preflight`."""
    try:
        sys.exit(preflight(sys.argv[1:] if arguments is None else arguments))
    except BadInputError as mistake:
        parser().exit(BAD_INPUT_EXIT_CODE, f"error: {mistake}\n")


if __name__ == "__main__":
    main()
