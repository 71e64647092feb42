"""What would run on the GPUs at hand, where a run folder was made for more: the command, with its plan."""

from collections.abc import Sequence
from dataclasses import replace

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.hardware.devices import gpu_of_device
from common.planning.job import BatchShape
from common.planning.plans import Plan, plan_run


def on_fewer(run: RunConfig, devices: int) -> tuple[RunConfig, str]:
    """The run on so many devices, and the command that starts it.

    From a way to share the work that one device cannot take, it goes to the folder of its technique for one.
    """
    start = f"torchrun --nproc_per_node {devices}" if devices > 1 and not run.parallelism.layers_in_turn else "python"
    try:
        return replace(run, devices=devices), f"`{start} my_workflow_<technique>.py --devices {devices}`"
    except BadInputError:
        if devices > 1:
            raise
    alone = run.changed_to(parallel="single", devices=1, learning_rate_scaling="none")
    folder = run.goal.folder_for_one or run.method.folder_for_one
    return alone, f"a run folder of {folder}"


def offer(run: RunConfig, names: Sequence[str]) -> str:
    """What to start on the GPUs of these names instead, with what it would take of each by the plan.

    Rows are planned with the run's longest, as no data were read yet.
    """
    try:
        fewer, command = on_fewer(run, len(names))
    except BadInputError as refusal:
        return f"choose another run folder, as this one does not run on {len(names)} ({refusal})"
    return f"use {command}{_planned(fewer, names[0])}, or choose another run folder"


def _planned(run: RunConfig, name: str) -> str:
    """In brackets; empty where the catalogue lacks the GPU, or the planner something else."""
    gpu, rows = gpu_of_device(name), run.rows_per_rank
    if gpu is None:
        return ""
    target_length = run.max_target_length if run.goal.summarizes else 0
    batch = BatchShape(rows, run.max_length, run.max_length, target_length=target_length)
    try:
        plan = plan_run(run, batch, gpu)
    except BadInputError:
        return ""
    return f" ({_verdict(run, plan)})"


def _verdict(run: RunConfig, plan: Plan) -> str:
    memory, gpu = plan.devices[plan.tightest], plan.cluster.gpus[plan.tightest]
    planned = f"{memory.peak_gib:.1f} of {gpu.memory_gib:.1f} GiB planned for rows of {run.max_length} tokens"
    if plan.fits:
        return planned
    rows = plan.max_batch_size
    if not rows:
        return f"{planned}: not even one row fits"
    return f"{planned}: pass --batch_size {rows} --gradient_accumulation_steps {-(-run.rows_per_rank // rows)}"
