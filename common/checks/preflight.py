"""The real training step on the real devices, so that a run fails in its first minute and not in its third hour.

    python -m common.preflight 2.1_lora_finetuning/run_0_cpu_x1
    python -m common.preflight 2.2_lora_finetuning_with_ddp/run_1_a6000_48g_x2 --seq-len 1024 --batch_size 4

Settings, model, data and plan are checked first. Then every rank builds the model, or its stage, with random weights
of its real shape (nothing is downloaded), and tries each phase of a run: three optimizer steps on the longest batch
that can come up, a batch of validation, saving and reloading, and answers to a batch, judged. What was measured is
called so; the rest is projected. Nothing is written into the repository; `--json FILE` keeps the result as data.

Exit code 0: it passed; 1: it does not fit, or something failed; 2: the question is wrong.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from common.base.command_line import refuse_half_a_rank, refused_in_one_sentence, silent_if_well
from common.base.errors import BadInputError, NotPlannedError
from common.base.run_config import LARGEST, RunConfig
from common.checks.folder_runs import folder_parser, run_of_folder
from common.checks.inputs import check_room_to_save, check_schedule, check_settings, check_training_rows
from common.checks.measured_steps import Measured, answered_at_once, measure_all
from common.checks.tried_rows import Rows, batch_of, rows_of_length, rows_of_run
from common.data.splits import load_splits
from common.hardware.devices import CPU_DEVICE, Gpu, cpu_device, find_gpu, gpu_of_device, gpus, read_memory
from common.hardware.prices import usual_price
from common.models.answering import answering_stages
from common.models.placement import Placement, evaluation_of_rows, place_stages, with_rows_at_once
from common.planning.job import OPTIMIZER_BYTES, BatchShape, EvaluationShape, architecture_of_run
from common.planning.plan_texts import outlined, why
from common.planning.plans import LARGEST_BATCH, Plan, plan_run
from common.planning.terms import DeviceMemory
from common.records.store import without_paths, write_json
from common.runtime.launchers import ranks_command
from common.runtime.world import detect_launcher, is_main_process


def device_of(run: RunConfig) -> Gpu | None:
    """Return a device to plan with: the GPU at hand, or else the one that the folder was made for; None: unknown."""
    if run.device == "cpu":  # ranks share the machine's memory
        cpu = cpu_device(read_memory("cpu").now_gib)
        return replace(cpu, memory_gib=cpu.memory_gib / run.world_size)
    return gpu_of_device(gpus()[1][0]) or (find_gpu(run.gpu) if run.gpu else None)


def place_and_plan(
    run: RunConfig, batch: BatchShape, evaluation: EvaluationShape | None = None
) -> tuple[Placement, str]:
    """Return which stage holds which layers (with mp and pp) with the plan, and why there is none, where it is None."""
    device, no_plan = device_of(run), ""
    try:
        architecture_of_run(run, batch)
    except NotPlannedError as unknown:
        no_plan = str(unknown)
    if run.optim not in OPTIMIZER_BYTES:
        no_plan = f"the planner does not know the optimizer {run.optim}"
    if device is None:
        no_plan = f"the catalogue lacks {gpus()[1][0]}; --gpu may name one of like memory and speed"
    if run.parallelism.splits_layers:
        if no_plan:
            raise BadInputError(f"Layers are placed by their planned memory, but {no_plan}.")
        return place_stages(run, batch, device, evaluation), ""
    return Placement({}, (), None if no_plan else plan_run(run, batch, device, evaluation)), no_plan


def total_steps(run: RunConfig, row_count: int | None) -> int | None:
    """Return the number of optimizer steps of the whole run; None: it depends on `row_count`, which is not known."""
    return None if row_count is None and run.max_steps < 0 else run.total_steps(row_count or 0)


def planned_gib(plan: Plan | None, number: int) -> float | None:
    """Return a device's planned memory as `Measured` has it: of the process on CPU, on a GPU without overhead."""
    return None if plan is None else _as_measured(plan.devices[number], plan.cluster.gpus[number])


def _as_measured(memory: DeviceMemory, gpu: Gpu) -> float:
    return memory.peak_gib if gpu.name == CPU_DEVICE else memory.allocated_gib


def announcement(run: RunConfig, rows: Rows, plan: Plan | None, no_plan: str) -> str:
    """Return what is going to be tried, and what was planned for it, or why nothing was."""
    batch = batch_of(run, rows)
    summaries = f" with summaries of up to {batch.target_length}" if batch.target_length else ""
    shape = f"{batch.rows} rows of up to {batch.length} tokens{summaries} ({rows.source})"
    tried = f"tries {run.technique} of {run.model} with {run.parallel} on {run.devices} x {run.device}: {shape}"
    if plan is None:
        return f"{tried}\nno plan: {no_plan}"
    memory, gpu = plan.fullest
    layers, where = "", "per device"
    if plan.job.parallelism.splits_layers:
        layers = f"layers on each stage: {', '.join(str(sum(share.layers)) for share in plan.shares)}\n"
        where = "on the fullest device"
    return (
        f"{tried}\n{layers}planned for {gpu.name}: {memory.peak_gib:.2f} of {gpu.memory_gib:.1f} GiB {where}, "
        f"{planned_step_s(run, plan):.3g} s per step; {why(plan)}"
        + (f"\nbeside training, {plan.higher_phase}" if plan.higher_phase else "")
        + (f"\nof the run itself, {plan.phase_times.said}" if plan.phase_times else "")
    )


def planned_step_s(run: RunConfig, plan: Plan) -> float:
    """Return the planned seconds of an optimizer step, with all its micro-batches."""
    return plan.time.total_s * run.gradient_accumulation_steps


def memory_table(plan: Plan | None, measured: Sequence[Measured]) -> str:
    """Return the memory of the training step, planned and measured, one row per device of each rank."""
    rows = []
    for number, found in enumerate(measured):
        planned, peak = planned_gib(plan, number), found.peak_gib
        beside = ("no plan", "-") if planned is None else (f"{planned:.2f}", f"{peak / planned - 1:+.0%}")
        rows.append([found.rank, found.device, beside[0], f"{peak:.2f}", beside[1], f"{found.capacity_gib:.1f}"])
    headers = ["rank", "device", "planned\nGiB", "measured\nGiB", "difference", "capacity\nGiB"]
    return outlined(rows, headers, texts=[1])


def largest_batch(plan: Plan, measured: Sequence[Measured]) -> tuple[int, float]:
    """Return the rows per rank that fit if memory grows as measured, and measured over planned memory."""
    factor = max(found.peak_gib / planned_gib(plan, number) for number, found in enumerate(measured))
    devices = tuple(
        replace(gpu, memory_gib=found.capacity_gib / factor)
        for gpu, found in zip(plan.cluster.gpus, measured, strict=True)
    )
    return replace(plan, cluster=replace(plan.cluster, gpus=devices)).max_batch_size, factor


def figures(
    run: RunConfig, rows: Rows, plan: Plan | None, no_plan: str, measured: Sequence[Measured]
) -> dict[str, Any]:
    """Return the result as data: memory in GiB, times in seconds; without a plan, what is planned is None."""
    batch = batch_of(run, rows)
    slowest_or_fullest = ("step_time_s", "validation_time_s", "validation_peak_gib", "merging_peak_gib",
                          "answers_time_s", "answers_peak_gib", "logit_difference")  # fmt: skip
    return {
        "settings": without_paths(run.to_dict()),
        "rows": batch.rows,
        "tokens": batch.length,
        "validation_rows": len(rows.validation),
        "answered_rows": answered_at_once(run, rows, answering_stages(run)),
        "devices": [asdict(found) | {"planned_gib": planned_gib(plan, n)} for n, found in enumerate(measured)],
        "planned_step_time_s": planned_step_s(run, plan) if plan else None,
        **{name: max(getattr(found, name) for found in measured) for name in slowest_or_fullest},
        "largest_batch": largest_batch(plan, measured)[0] if plan else None,
        "no_plan": no_plan,
    }


def report(run: RunConfig, rows: Rows, plan: Plan | None, measured: Sequence[Measured]) -> str:
    """Return the result for a terminal."""
    found = figures(run, rows, plan, "", measured)
    what = "the process" if run.device == "cpu" else "what PyTorch allocates; context and gaps come on top"
    # stages work on the same rows, ranks else on their own
    unit = "rows" if run.parallelism.splits_layers or run.parallelism.splits_matrices else "rows per rank"
    stages = answering_stages(run)
    lines = [
        f"memory of the training step ({what}):",
        memory_table(plan, measured),
        *time_lines(run, rows, plan, found["step_time_s"]),
    ]
    if plan:
        largest, factor = largest_batch(plan, measured)
        lines.append(
            f"largest batch: projected {largest:,}{' or more' if largest >= LARGEST_BATCH else ''} {unit}, by the plan "
            f"times measured over planned memory ({factor:.2f})"
        )
    validated = f"{found['validation_rows']} {unit}"
    answered = f"{found['answered_rows']} {f'rows of {stages} ranks' if stages > 1 else unit}"
    for name, of_plan, count in (("validation", "validation", validated), ("answers", "baseline evaluation", answered)):
        planned = ""
        if plan:
            devices = zip(plan.phases, plan.cluster.gpus, strict=True)
            named = [(phase, gpu) for phases, gpu in devices for phase in phases if phase.name == of_plan]
            planned = f", planned {max(_as_measured(phase.memory, gpu) for phase, gpu in named):.2f} GiB"
        lines.append(
            f"{name}: measured {found[f'{name}_time_s']:.2f} s and a peak of {found[f'{name}_peak_gib']:.2f} GiB for "
            f"{count}{planned}"
        )
    difference = found["logit_difference"]
    lines.append(f"passed: trained, validated, saved, reloaded and answered; logits measured {difference:.1e} apart")
    return "\n".join(lines)


def time_lines(run: RunConfig, rows: Rows, plan: Plan | None, step_time_s: float) -> list[str]:
    """Return a step's time beside the planned one, and what follows for the whole training and its cost."""
    planned = "no plan"
    if plan:
        planned_s = planned_step_s(run, plan)
        planned = f"planned {planned_s:.3g} s ({step_time_s / planned_s - 1:+.0%})"
    lines = [f"step time: measured {step_time_s:.3g} s, {planned}"]
    steps = total_steps(run, rows.count)
    if steps is None:
        return [*lines, "training time: not known without the number of rows; pass --train_rows or --max_steps"]
    training_s = steps * step_time_s
    lines.append(
        f"training time: projected {timedelta(seconds=round(training_s))} for {steps:,} steps, all on batches "
        "as long as this one; validation, checkpoints and answers come on top"
    )
    if (price := usual_price(device_of(run))) is None:
        return [*lines, "cost: no price"]
    usd = price.usd_per_hour * run.devices * training_s / 3600
    return [*lines, f"cost: projected {usd:,.2f} USD ({run.devices} x {price.usd_per_hour} per hour, {price.date})"]


def preflight(options: argparse.Namespace, run: RunConfig, arguments: Sequence[str]) -> int:
    """Check, plan, try and report; return the exit code. `arguments` start this command again, on every rank."""
    if options.json and not options.json.parent.is_dir():
        raise BadInputError(f"--json is {options.json}, but its folder does not exist: make it, or name another file.")
    is_rank = detect_launcher() == "torchrun"
    with silent_if_well() if is_rank else nullcontext():  # the process that started it has said the same
        run = check_settings(run)
        if options.seq_len is None:
            check_training_rows(run, load_splits(run).train)
            rows = rows_of_run(run)
        else:
            rows = rows_of_length(run, options.seq_len)
            check_schedule(run, total_steps(run, rows.count) or LARGEST)
    placement, no_plan = place_and_plan(run, batch_of(run, rows), evaluation_of_rows(run, rows.validation))
    plan = placement.plan
    run = with_rows_at_once(run, plan)
    rows = replace(rows, validation=rows.validation[: run.per_device_eval_batch_size])
    if not is_rank:
        print(announcement(run, rows, plan, no_plan), flush=True)
        if plan and not plan.may_fit and not options.anyway:
            print("not tried; --anyway tries it all the same")
            return 1
        check_room_to_save(run)
        if run.world_size > 1:  # in this process's place
            command = ranks_command(run, "-m", ["common.preflight", *arguments])
            os.execv(command[0], command)
    measured = measure_all(run, rows, placement)
    if is_main_process():
        print(report(run, rows, plan, measured))
        if options.json:
            write_json(figures(run, rows, plan, no_plan, measured), options.json)
    return 0


@refused_in_one_sentence()
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = folder_parser("preflight", __doc__)
    parser.add_argument("--anyway", action="store_true", help="try what does not fit by the plan, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was measured into this file")
    arguments = sys.argv[1:] if arguments is None else arguments
    options, overrides = parser.parse_known_args(arguments)
    run = run_of_folder(options.run_folder, overrides, parser.options)
    refuse_half_a_rank()
    sys.exit(preflight(options, replace(run, weights="random"), arguments))
