"""How far the planner's memory is from a dry run and from GPUs; and how soon it comes.

An error is what was planned over what was found, less one: above zero too much was planned, below too little.
"""

import os
import statistics
import subprocess
import sys
import timeit
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from bench.entries import Entry, measured, read_kept
from bench.page.runs import Compared
from bench.planner_points import POINTS_PATH, SHAPES, Step, point_of, step_of
from common.base.paths import REPOSITORY
from common.checks.dry_run import dry_run
from common.models.placement import place_stages
from common.planning.architectures import read_architecture
from common.planning.job import job_of_run
from common.planning.memory_plan import device_memory
from common.planning.shares import whole_model
from common.reporting.rows import NOT_RUN

COMMAND = "python -m bench planner"
POINTS_COMMAND = "python -m bench.lease --only point && python -m bench planner"

DRY_RUN_BARS, MEASURED_BARS = (0.01, 0.05), (0.03, 0.08)  # largest mean and largest single error
MEASURED_POINTS = 20  # steps on a GPU that these errors should be of, at least
PLANNER_BAR_S, DRY_RUN_BAR_S = 1.0, 20.0
ROUNDS = 5

DECODERS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen2.5-7b")
# rows and their length in tokens, as far as each model can read; and long rows, so that scores and masks count
MODEL_SHAPES = {
    **dict.fromkeys(DECODERS, SHAPES),
    "roberta-large": ((4, 512), (16, 256), (16, 512)),
    "bart-large-cnn": ((4, 512), (2, 1024), (8, 1024)),
}
# families that differ from Llama in a few operations; the second shape is longer than the window of those that have one
FAMILY_SHAPES = {
    "smollm3-3b": ((4, 512), (1, 8192)),
    "ministral-3-8b": ((4, 512), (1, 8192)),
    "olmo-2-0425-1b": ((4, 512), (2, 2048)),
    "olmo-3-7b": ((4, 512), (1, 8192)),
    "phi-3-mini-4k": ((4, 512), (2, 4096)),
    "phi-4": ((4, 512), (1, 8192)),
    "gemma-3-1b": ((8, 256), (2, 2048)),
    "gpt2": ((4, 512), (8, 1024)),
}
MIXTURES = ("mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b-0924", "gpt-oss-20b")
SPECIAL_SHAPES = {"llama-3.2-1b": (1, 4096), "roberta-large": (16, 512)}
# with points of full fine-tuning of the linear layers alone
LINEAR_ONLY = ("llama-3.1-8b", "llama-3.2-1b", "roberta-large", "bart-large-cnn")
TECHNIQUES_AND_TARGETS = (("lora", "all-linear"), ("full", "all"), ("full", "all-linear"))
EMBEDDED, SMOLVLM = "assets/embedded_vision_base", "smolvlm-instruct"
# vision-language models: rows, their length in tokens, and the squares of a row's picture
SEEING_SHAPES = (
    *((EMBEDDED, shape) for shape in ((1, 64, 1), (2, 96, 4), (8, 64, 1))),
    *((SMOLVLM, shape) for shape in ((4, 1600, 17), (8, 256, 2))),
)
DIVIDED = (("llama-3.1-8b", "h200", 2), ("llama-3.2-3b", "a6000", 4))  # models, GPUs of a kind, and how many
QUICK_POINTS = 4
MOST_WORKERS = 4

PLANNER = [sys.executable, "-m", "common.planner", "--model", "llama-3.1-8b", "--gpu", "a6000", "--gpus", "4", "--json"]
DRY_RUN_CODE = """
from common.checks.dry_run import BatchShape, RunConfig, dry_run
run = RunConfig(model="llama-3.1-8b", technique="lora", precision="bf16", weights="random")
print(dry_run(run, BatchShape(1, 2048, 2047)).peak_gib)
"""
DRY_RUN = [sys.executable, "-c", DRY_RUN_CODE]


def entries(quick: bool) -> list[Entry]:
    """All of the planner's figures; `quick`: with few points of the dry run, and once instead of five times."""
    points = dry_run_grid()
    compared = compared_with_dry_run(points[:: -(-len(points) // QUICK_POINTS)] if quick else points)
    return [
        *error_entries("planner, closed form against dry run", compared, bars=DRY_RUN_BARS),
        *gpu_entries(POINTS_PATH),
        *speed_entries(1 if quick else ROUNDS),
    ]


def error_entries(
    name: str,
    compared: Sequence[Compared],
    command: str = COMMAND,
    bars: tuple[float | None, float | None] = (None, None),
) -> list[Entry]:
    """Mean and worst error of some points, as shares, with the largest allowed of each; without points: not run."""
    if not compared:
        return [
            measured(f"{name}: {what} {NOT_RUN}", None, "share", command, at_most=bar)
            for what, bar in zip(("mean error", "worst error"), bars, strict=True)
        ]
    worst = max(compared, key=lambda each: abs(each.error))
    mean = statistics.fmean(abs(each.error) for each in compared)
    where = f"{worst.run}: {worst.planned_gib:.2f} of {worst.measured_gib:.2f} GiB"
    return [
        measured(f"{name}, {len(compared)} points: mean error", mean, "share", command, at_most=bars[0]),
        measured(f"{name}: worst error ({where})", abs(worst.error), "share", command, at_most=bars[1]),
    ]


# -- against the dry run


def dry_run_grid() -> list[Step]:
    """Six models in three precisions, with and without checkpointing, at two or three shapes; then special cases.

    These are long rows, divided layers, mixtures, and pictures.

    Full fine-tuning is of every weight, but for some points with linear layers only, or with divided layers.
    """
    techniques, checkpointings = ("lora", "full"), (False, True)
    points = [
        step_of(technique, model, checkpointing, shape, precision=precision)
        for technique, model, checkpointing, precision in product(
            techniques, MODEL_SHAPES, checkpointings, ("bf16", "bf16-mixed", "fp32")
        )
        for shape in MODEL_SHAPES[model][:: 1 if precision == "bf16" else 2]
    ]
    for technique, (model, shape), checkpointing in product(techniques, SPECIAL_SHAPES.items(), checkpointings):
        points.append(step_of(technique, model, checkpointing, shape, attention="eager"))
        points.append(step_of(technique, model, checkpointing, shape, attention="eager", precision="fp32"))
        points.append(step_of(technique, model, checkpointing, shape, padded=True))
    for technique, checkpointing in product(techniques, checkpointings):
        points.append(step_of(technique, "llama-3.1-8b", checkpointing, (4, 512), parallel="ddp", devices=4))
    points += [step_of(technique, "llama-3.1-8b", False, (1, 2048), labelled=64) for technique in techniques]
    for model, checkpointing in product(LINEAR_ONLY, checkpointings):
        points.append(step_of("full", model, checkpointing, (4, 512), target_modules="all-linear"))
    points.append(step_of("full", LINEAR_ONLY[0], False, (4, 512), target_modules="all-linear", precision="fp32"))
    points += [
        step_of("lora", model, checkpointing, shape, lora_dropout=0.0)
        for model, checkpointing, shape in product(DECODERS, checkpointings, SHAPES)
    ]
    return [*points, *family_points(), *mixture_points(), *divided_points(), *seeing_points()]


def mixture_points() -> list[Step]:
    """Mixtures of experts, of whose adapters attention has all.

    Frozen experts are in bf16 alone: of fp32 Transformers' fallback, which dry runs take, makes gradients that a GPU's
    grouped product does not.
    """
    ways = [("lora", "bf16"), *(("full", precision) for precision in ("bf16", "bf16-mixed", "fp32"))]
    adapted, eager = {"full": {}, "lora": {"target_modules": "q_proj,k_proj,v_proj,o_proj"}}, {"gpt-oss-20b": "eager"}
    return [
        step_of(
            technique,
            model,
            checkpointing,
            shape,
            precision=precision,
            attention=eager.get(model, "sdpa"),
            **adapted[technique],
        )
        for model, (technique, precision), (checkpointing, shape) in product(
            MIXTURES, ways, ((False, (2, 512)), (True, (4, 2048)))
        )
    ]


def divided_points() -> list[Step]:
    """Layers divided among GPUs: of one process (mp), and of a pipeline with either schedule (pp)."""
    pipeline = {"parallel": "pp", "micro_batches": 4}
    ways = ({"parallel": "mp"}, {**pipeline, "schedule": "1f1b"}, {**pipeline, "schedule": "gpipe"})
    common = {"target_modules": "all-linear"}
    return [
        step_of(technique, model, False, (8, 512), gpu=gpu, devices=devices, **common, **way)
        for (model, gpu, devices), technique, way in product(DIVIDED, ("lora", "full"), ways)
    ]


def seeing_points() -> list[Step]:
    """Rows with pictures: towers that are frozen and that are trained, each with all ways to train and to compute.

    These change in turn from one shape to the next, as all of them together would take an hour.
    """
    ways = list(product(TECHNIQUES_AND_TARGETS, ("bf16", "bf16-mixed", "fp32"), (True, False)))
    shares: tuple[dict[str, Any], ...] = ({}, {"parallel": "ddp", "devices": 4})
    points = []
    for number, (model, (*shape, tiles)) in enumerate(SEEING_SHAPES):
        for place, ((technique, targets), precision, is_frozen) in enumerate(ways):
            turn = number + place
            settings = {
                "task": "visual_questions",
                "target_modules": targets,
                "precision": precision,
                "freeze_vision_tower": is_frozen,
                **shares[turn // 2 % 2],
            }
            points.append(step_of(technique, model, turn % 2 == 1, tuple(shape), tiles=tiles, **settings))
    return points


def family_points() -> list[Step]:
    """Each family in each way to train and to compute; attention and adapters' dropout change in turn."""
    ways = list(product(TECHNIQUES_AND_TARGETS, ("bf16", "bf16-mixed", "fp32"), (False, True)))
    points = []
    for model, shapes in FAMILY_SHAPES.items():
        for turn, (shape, ((technique, targets), precision, checkpointing)) in enumerate(product(shapes, ways)):
            dropout = {"lora_dropout": 0.0} if technique == "lora" and turn % 4 > 1 else {}
            settings = {"target_modules": targets, "precision": precision, **dropout}
            attention = "eager" if turn % 3 == 0 and shape == shapes[0] else "sdpa"
            points.append(step_of(technique, model, checkpointing, shape, attention=attention, **settings))
    return points


def compared_with_dry_run(points: Sequence[Step]) -> list[Compared]:
    """Closed form and dry run of each point; dry runs take a second each, and so several processes."""
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    # spawned, not forked: torch has threads already
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as at_once:
        found = zip(points, at_once.map(dry_run_gib, points), strict=True)
        return [Compared(point.name, closed_form_gib(point), gib) for point, gib in found]


def dry_run_gib(point: Step) -> float:
    """Peak of allocated memory by dry run, on the fullest device."""
    return dry_run(point.run, point.batch).peak_gib


def closed_form_gib(point: Step) -> float:
    """Peak of allocated memory in closed form, on the fullest device."""
    if point.run.stage_count > 1:
        return max(device.allocated_gib for device in place_stages(point.run, point.batch).plan.devices)
    # on a GPU: so dry runs count operations, too, whatever the run's device
    job = replace(job_of_run(point.run, point.batch), cpu_operations=False)
    architecture = read_architecture(point.run.model)
    return device_memory(architecture, job, whole_model(architecture)).allocated_gib


# -- against GPUs


def gpu_entries(path: Path) -> list[Entry]:
    """What `bench.planner_points` measured: errors of closed form and dry run."""
    ran = [record for record in read_kept(path) if record["outcome"] == "ran"]
    ours, dry = (
        [
            Compared(point_of(record).step.name, record[planned], record["allocated_gib"])
            for record in ran
            if record[planned]
        ]
        for planned in ("planned_gib", "dry_run_gib")  # a dry run quantizes no weights
    )
    name = "planner, steps whose CUDA peaks were measured"
    return [
        measured(name, len(ran), "runs", POINTS_COMMAND, at_least=MEASURED_POINTS),
        *error_entries("planner, closed form against measured CUDA peaks", ours, POINTS_COMMAND, MEASURED_BARS),
        *error_entries("planner, dry run against measured CUDA peaks", dry, POINTS_COMMAND),
    ]


# -- how soon the answer comes


def speed_entries(rounds: int) -> list[Entry]:
    """Seconds of a process that asks once, its start and its imports included; medians of the rounds."""
    asked = "4 A6000, Llama 8B, every technique and way"
    planner_s, dry_run_s = process_s(PLANNER, rounds), process_s(DRY_RUN, rounds)
    return [
        measured(f"planner, one answer ({asked})", planner_s, "s", COMMAND, at_most=PLANNER_BAR_S),
        measured("planner, one dry run (LoRA of Llama 8B, 1x2048)", dry_run_s, "s", COMMAND, at_most=DRY_RUN_BAR_S),
    ]


def process_s(command: list[str], rounds: int) -> float:
    """Median seconds of a command in a process of its own, on one core."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ask = partial(subprocess.run, command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, check=True)
    return statistics.median(timeit.repeat(ask, number=1, repeat=rounds))
