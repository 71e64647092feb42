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
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from tabulate import tabulate

from common.base.command_line import BAD_INPUT_EXIT_CODE
from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.checks.disk_needs import check_room_to_save
from common.checks.folder_runs import run_of_folder
from common.checks.inputs import check_settings_and_data
from common.checks.preflight_rows import Rows, batch_of, check_length, rows_of_length, rows_of_run, with_rows_at_hand
from common.checks.preflight_steps import Measured, measure_all, planned_gib
from common.hardware.devices import (
    Gpu,
    cpu_device,
    find_gpu,
    gpu_of_device,
    gpus,
)
from common.models.loading import (
    any_shape_config,
)
from common.planning.architectures import UnknownArchitectureError, read_architecture
from common.planning.job import OPTIMIZER_BYTES, BatchShape
from common.planning.plans import LARGEST_BATCH, Plan, plan_run, why
from common.records.store import settings_without_paths, write_json
from common.runtime.launchers import torchrun_command
from common.runtime.world import detect_launcher
from common.training.placement import StageMap, place_stages
from common.training.sharded_run import check_sharding_inputs
from common.training.tensor_parallel import check_divisible


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
    if run.optim not in OPTIMIZER_BYTES:
        return f"the planner does not know the optimizer {run.optim}"
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
    if not run.parallelism.splits_layers:
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
    batches = -(-row_count // (run.per_device_train_batch_size * run.data_parallel_ranks))
    return run.num_train_epochs * -(-batches // run.gradient_accumulation_steps)


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
    if plan.job.parallelism.splits_layers:
        layers = f"layers on each stage: {', '.join(str(sum(share.layers)) for share in plan.shares)}\n"
        where = "on the fullest device"
    return (
        f"{tried}\n{layers}planned for {gpu.name}: {memory.peak_gib:.2f} of {gpu.memory_gib:.1f} GiB {where}, "
        f"{planned_step_s(run, plan):.3g} s per step; {why(plan)}"
    )


def planned_step_s(run: RunConfig, plan: Plan) -> float:
    """Seconds of an optimizer step by the plan, with all its micro-batches."""
    return plan.time.total_s * run.gradient_accumulation_steps


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
    return "rows" if (run.parallelism.splits_layers or run.parallelism.splits_matrices) else "rows per rank"


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
        epilog="Any setting of common/base/run_config.py can follow, such as --batch_size 4.",
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
    if run.parallelism.splits_matrices:
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
