"""How far the planner's memory is from a dry run, from published peaks and from GPUs; and how soon it comes.

An error is what was planned over what was found, less one: above zero too much was planned, below too little.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench import planner_points
from bench.entries import Entry, measured
from bench.planner_points import POINTS_PATH, SHAPES
from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.checks.dry_run import dry_run
from common.models.placement import place_stages
from common.planning.architectures import Architecture, read_architecture
from common.planning.job import BatchShape, Job
from common.planning.memory_plan import device_memory
from common.planning.plans import job_of_run
from common.planning.published_memory import (
    CALIBRATION,
    LIKELY,
    PEAKS_PATH,
    architectures_of,
    errors_of,
    held_out_points,
    points,
    points_of,
    safe_share,
    sources,
    t4_job,
    verdicts_on,
)
from common.planning.shares import whole_model
from common.records.store import Record, kept_records
from common.reporting.benchmark import PHASE_BARS, compared_by_phase
from common.reporting.rows import NOT_RUN

COMMAND = "python -m bench planner"
POINTS_COMMAND = "python -m bench.lease --only point && python -m bench planner"

DRY_RUN_BARS = (0.02, 0.05)
MEASURED_BARS = (0.03, 0.08)
"""Largest mean and largest single error."""
MEASURED_POINTS = 20
"""Steps on a GPU that these errors should be of, at least."""
HELD_OUT_BARS = (0.08, 0.9)
"""Largest mean error of what is likely, and smallest share of errors within 15 %, where no constant was fitted."""
PLANNER_BAR_S, DRY_RUN_BAR_S = 1.0, 20.0
ROUNDS, DRY_RUN_ROUNDS, QUICK_ROUNDS = 5, 3, 1

DECODERS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen2.5-7b")
MODEL_SHAPES = {
    **dict.fromkeys(DECODERS, SHAPES),
    "roberta-large": ((4, 512), (16, 256), (16, 512)),
    "bart-large-cnn": ((4, 512), (2, 1024), (8, 1024)),
}
"""Rows and their length in tokens, as far as each model can read."""
SPECIAL_SHAPES = {"llama-3.2-1b": (1, 4096), "roberta-large": (16, 512)}
"""Long rows, so that attention scores and masks count."""
LINEAR_ONLY = ("llama-3.1-8b", "llama-3.2-1b", "roberta-large", "bart-large-cnn")
"""Models with points of full fine-tuning of the linear layers alone."""
TECHNIQUES_AND_TARGETS = (("lora", "all-linear"), ("full", "all"), ("full", "all-linear"))
EMBEDDED, SMOLVLM = "assets/embedded_vision_base", "smolvlm-instruct"
SEEING_SHAPES = (
    *((EMBEDDED, shape) for shape in ((1, 64, 1), (2, 96, 4), (8, 64, 1))),
    *((SMOLVLM, shape) for shape in ((4, 1600, 17), (8, 256, 2))),
)
"""Models that see: rows, their length in tokens, and the squares of a row's picture."""
DIVIDED = (("llama-3.1-8b", "h200", 2), ("llama-3.2-3b", "a6000", 4))
"""Models that are divided among GPUs of a kind, and how many."""
QUICK_POINTS = 4
MOST_WORKERS = 4
FITCHECK = "fitcheck-llm==0.3.1"

PLANNER = [sys.executable, "-m", "common.planner", "--model", "llama-3.1-8b", "--gpu", "a6000", "--gpus", "4", "--json"]
DRY_RUN_CODE = """
from common.checks.dry_run import BatchShape, RunConfig, dry_run
run = RunConfig(model="llama-3.1-8b", technique="lora", precision="bf16", weights="random")
print(dry_run(run, BatchShape(1, 2048, 2047)).peak_gib)
"""


@dataclass(frozen=True)
class Compared:
    """What was planned for a point, and what was found, both in GiB."""

    point: str
    planned_gib: float
    found_gib: float

    @property
    def error(self) -> float:
        """Above zero: too much was planned."""
        return self.planned_gib / self.found_gib - 1


def entries(quick: bool) -> list[Entry]:
    """All of the planner's figures; `quick`: with few points of the dry run, and once instead of five times.

    Raises:
        BadInputError: fitcheck-llm is not installed.
    """
    fitcheck = fitcheck_module()
    points = dry_run_grid()
    compared = compared_with_dry_run(points[:: -(-len(points) // QUICK_POINTS)] if quick else points)
    return [
        *grid_entries(compared, fitcheck),
        *published_entries(fitcheck),
        *published_memory_entries(),
        *kept_entries(kept_records()),
        *gpu_entries(POINTS_PATH),
        *speed_entries(*((QUICK_ROUNDS, QUICK_ROUNDS) if quick else (ROUNDS, DRY_RUN_ROUNDS))),
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
    where = f"{worst.point}: {worst.planned_gib:.2f} of {worst.found_gib:.2f} GiB"
    return [
        measured(f"{name}, {len(compared)} points: mean error", mean, "share", command, at_most=bars[0]),
        measured(f"{name}: worst error ({where})", abs(worst.error), "share", command, at_most=bars[1]),
    ]


# -- against the dry run


@dataclass(frozen=True)
class GridPoint:
    """A training step whose memory both the closed form and the dry run tell."""

    run: RunConfig
    batch: BatchShape

    @property
    def name(self) -> str:
        """What distinguishes it from the grid's other points."""
        run, batch = self.run, self.batch
        special = [
            "checkpointed" if run.gradient_checkpointing else "",
            "eager" if run.attention == "eager" else "",
            "padded" if batch.padded else "",
            "linear layers" if run.technique == "full" and run.target_modules != "all" else "",
            f"{run.parallel} x{run.devices}" if run.parallel != "single" else "",
            f"{run.schedule} of {run.micro_batches}" if run.parallel == "pp" else "",
            f"{batch.tiles} tiles" if batch.tiles else "",
            "trained tower" if batch.tiles and not run.freeze_vision_tower else "",
            f"{batch.labelled} labelled" if batch.labelled != batch.length - 1 else "",
            "no dropout" if run.technique == "lora" and not run.lora_dropout else "",
        ]
        words = [run.technique, run.model, run.precision, f"{batch.rows}x{batch.length}", *filter(None, special)]
        return " ".join(words)

    @property
    def job(self) -> Job:
        """As the closed form wants it, on a GPU: so dry runs count operations, too, whatever the run's device."""
        return replace(job_of_run(self.run, self.batch), cpu_operations=False)


def dry_run_grid() -> list[GridPoint]:
    """Six models in three precisions, with and without checkpointing, at two or three shapes; then special cases.

    Full fine-tuning is of every weight, but for some points with linear layers only, or with divided layers.
    """
    techniques, checkpointings = ("lora", "full"), (False, True)
    points = [
        _point(technique, model, checkpointing, shape, precision=precision)
        for technique, model, checkpointing, precision in product(
            techniques, MODEL_SHAPES, checkpointings, ("bf16", "bf16-mixed", "fp32")
        )
        for shape in MODEL_SHAPES[model][:: 1 if precision == "bf16" else 2]
    ]
    for technique, (model, shape), checkpointing in product(techniques, SPECIAL_SHAPES.items(), checkpointings):
        points.append(_point(technique, model, checkpointing, shape, attention="eager"))
        points.append(_point(technique, model, checkpointing, shape, attention="eager", precision="fp32"))
        points.append(_point(technique, model, checkpointing, shape, padded=True))
    for technique, checkpointing in product(techniques, checkpointings):
        points.append(_point(technique, "llama-3.1-8b", checkpointing, (4, 512), parallel="ddp", devices=4))
    points += [_point(technique, "llama-3.1-8b", False, (1, 2048), labelled=64) for technique in techniques]
    for model, checkpointing in product(LINEAR_ONLY, checkpointings):
        points.append(_point("full", model, checkpointing, (4, 512), target_modules="all-linear"))
    points.append(_point("full", LINEAR_ONLY[0], False, (4, 512), target_modules="all-linear", precision="fp32"))
    points += [*divided_points(), *seeing_points()]
    # fitcheck knows no dropout
    points += [
        _point("lora", model, checkpointing, shape, lora_dropout=0.0)
        for model, checkpointing, shape in product(DECODERS, checkpointings, SHAPES)
    ]
    return points


def divided_points() -> list[GridPoint]:
    """Layers divided among GPUs: of one process (mp), and of a pipeline with either schedule (pp)."""
    pipeline = {"parallel": "pp", "micro_batches": 4}
    ways = ({"parallel": "mp"}, {**pipeline, "schedule": "1f1b"}, {**pipeline, "schedule": "gpipe"})
    common = {"target_modules": "all-linear"}
    return [
        _point(technique, model, False, (8, 512), gpu=gpu, devices=devices, **common, **way)
        for (model, gpu, devices), technique, way in product(DIVIDED, ("lora", "full"), ways)
    ]


def seeing_points() -> list[GridPoint]:
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
            points.append(_point(technique, model, turn % 2 == 1, tuple(shape), tiles=tiles, **settings))
    return points


def _point(
    technique: str,
    model: str,
    checkpointing: bool,
    shape: tuple[int, int],
    padded: bool = False,
    labelled: int | None = None,
    tiles: int = 0,
    **settings: Any,
) -> GridPoint:
    rows, length = shape
    run = RunConfig(
        technique=technique,
        model=model,
        gradient_checkpointing=checkpointing,
        weights="random",
        device="cuda",
        **{"precision": "bf16", "target_modules": "all" if technique == "full" else "all-linear", **settings},
    )
    return GridPoint(run, BatchShape(rows, length, labelled or length - 1, padded, tiles=tiles))


def compared_with_dry_run(points: Sequence[GridPoint]) -> dict[GridPoint, Compared]:
    """Closed form and dry run of each point; dry runs take a second each, and so several processes."""
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    # spawned, not forked: torch has threads already
    with ProcessPoolExecutor(workers, get_context("spawn"), _one_thread) as at_once:
        found = zip(points, at_once.map(dry_run_gib, points), strict=True)
        return {point: Compared(point.name, closed_form_gib(point), gib) for point, gib in found}


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def dry_run_gib(point: GridPoint) -> float:
    """Peak of allocated memory by dry run, on the fullest device."""
    return dry_run(point.run, point.batch).peak_gib


def closed_form_gib(point: GridPoint) -> float:
    """Peak of allocated memory in closed form, on the fullest device."""
    if point.run.stage_count > 1:
        return max(device.allocated_gib for device in place_stages(point.run, point.batch).plan.devices)
    return planned_gib(read_architecture(point.run.model), point.job)


def planned_gib(architecture: Architecture, job: Job) -> float:
    """Peak of allocated memory on one device, without the GPU's own overhead."""
    return device_memory(architecture, job, whole_model(architecture)).allocated_gib


def grid_entries(compared: dict[GridPoint, Compared], fitcheck: Any) -> list[Entry]:
    """All points; and those that fitcheck knows, side by side."""
    accepted = [point for point in compared if fitcheck_accepts(point)]
    name = "planner, closed form against dry run"
    return [
        *error_entries(name, list(compared.values()), bars=DRY_RUN_BARS),
        *error_entries(f"{name}, points that fitcheck knows", [compared[point] for point in accepted]),
        *error_entries(
            "planner, fitcheck-llm against dry run, points that it knows",
            [fitcheck_at(point, compared[point].found_gib, fitcheck) for point in accepted],
        ),
    ]


# -- fitcheck-llm, which answers the same question


def fitcheck_module() -> Any:
    """The package.

    Raises:
        BadInputError: it is not installed.
    """
    try:
        import fitcheck
    except ImportError:
        raise BadInputError(
            f"fitcheck-llm, which the planner is compared with, is not installed: `pip install {FITCHECK}`."
        ) from None
    return fitcheck


def fitcheck_accepts(point: GridPoint) -> bool:
    """Whether fitcheck has a setting for all that is particular about a point."""
    run, batch = point.run, point.batch
    return (
        run.technique == "lora"
        and run.model in DECODERS
        and run.parallel == "single"
        and not run.precision.endswith("-mixed")
        and run.attention == "sdpa"
        and not run.lora_dropout
        and not batch.padded
        and batch.labelled == batch.length - 1
    )


def fitcheck_at(point: GridPoint, found_gib: float, fitcheck: Any) -> Compared:
    """Fitcheck's answer for a point of the grid."""
    architecture = read_architecture(point.run.model)
    return Compared(point.name, fitcheck_gib(fitcheck, architecture, point.job), found_gib)


def fitcheck_gib(fitcheck: Any, architecture: Architecture, job: Job) -> float:
    """Fitcheck's tensors: its total without its overhead, which is not allocated by PyTorch."""
    (stack,) = architecture.stacks
    model = fitcheck.ModelConfig(
        name=architecture.name,
        num_params=architecture.parameters,
        hidden_size=architecture.hidden,
        num_layers=stack.layers,
        num_attention_heads=architecture.heads,
        num_kv_heads=architecture.kv_heads,
        intermediate_size=architecture.intermediate,
        vocab_size=architecture.vocab,
        head_dim=architecture.head_dim,
        tie_word_embeddings=architecture.tied,
    )
    training = fitcheck.TrainingConfig(
        precision=job.precision,
        quantization="nf4" if job.technique == "qlora" else "none",
        double_quant=job.technique == "qlora" and job.quantization == "nf4-double",
        batch_size=job.batch.rows,
        seq_len=job.batch.length,
        lora_rank=job.lora_rank,
        lora_targets=list(job.target_modules) or [linear.name for linear in stack.linears],
        grad_checkpoint=job.gradient_checkpointing,
        flash_attn=job.attention != "eager",
    )
    report = fitcheck.estimate(model, training, fitcheck.get_gpu("t4"))
    return (report.total_mib - report.overhead_mib) / 1024


# -- against published peaks


def published_entries(fitcheck: Any) -> list[Entry]:
    """Ours and fitcheck's errors for a T4's measured peaks, by kind; only ours have bars, and eager attention none."""
    peaks = json.loads(PEAKS_PATH.read_text(encoding="utf-8"))
    architectures = architectures_of(peaks["models"])
    rows = peaks["peaks"]
    kinds = {
        "sdpa, unquantized": [row for row in rows if row["attention"] == "sdpa" and row["quantization"] == "none"],
        "sdpa, nf4": [row for row in rows if row["attention"] == "sdpa" and row["quantization"] == "nf4"],
        "eager": [row for row in rows if row["attention"] == "eager"],
        "all": rows,
        "all that fitcheck held out": [row for row in rows if row["held_out"]],
    }
    found = []
    for kind, chosen in kinds.items():
        ours, theirs = [], []
        for row in chosen:
            architecture, job = architectures[row["model"]], t4_job(row)
            name, gib = published_name(row), row["peak_allocated_gib"]
            ours.append(Compared(name, planned_gib(architecture, job), gib))
            theirs.append(Compared(name, fitcheck_gib(fitcheck, architecture, job), gib))
        bars = MEASURED_BARS if kind.startswith("sdpa") else (None, None)
        found += error_entries(f"planner, closed form against a T4's peaks, {kind}", ours, bars=bars)
        found += error_entries(f"planner, fitcheck-llm against a T4's peaks, {kind}", theirs)
    return found


def published_memory_entries() -> list[Entry]:
    """Errors of the likely memory against published figures, and whether what was said to fit did; all projected."""
    held_out, calibration = held_out_points(), points_of(CALIBRATION)
    errors, fitted = errors_of(held_out, LIKELY), errors_of(calibration, LIKELY)
    names = " and ".join(source.title.partition(",")[0] for source in sources().values() if source.held_out)
    name, verdicts = f"planner, likely memory, held out ({names})", verdicts_on(points())
    of_calibration = f"planner, likely memory, calibration ({sources()[CALIBRATION].title.partition(',')[0]})"
    ran = f"planner, {verdicts.ran} published runs that fitted"
    mean_bar, within_bar = HELD_OUT_BARS
    return [
        measured(f"{name}, {errors.figures} figures: mean error", errors.mean, "share", COMMAND, at_most=mean_bar),
        measured(f"{name}: within 15 %", errors.within_15, "share", COMMAND, at_least=within_bar),
        measured(f"{name}: at most the safe memory", safe_share(held_out), "share", COMMAND),
        measured(f"{of_calibration}, {fitted.figures} figures: mean error", fitted.mean, "share", COMMAND),
        measured(f"{of_calibration}: within 15 %", fitted.within_15, "share", COMMAND),
        measured(
            f"planner, {verdicts.ran_out} published runs that ran out of memory: said to fit",
            verdicts.false_fits,
            "runs",
            COMMAND,
            at_most=0,
        ),
        measured(f"{ran}: said not to fit", verdicts.refused, "runs", COMMAND),
        measured(f"{ran}: called tight", verdicts.tight, "runs", COMMAND),
    ]


def published_name(row: dict[str, Any]) -> str:
    """What distinguishes a peak from the others."""
    model = row["model"].rpartition("/")[2]
    return f"{model} {row['quantization']} {row['attention']} {row['rows']}x{row['length']}"


# -- against kept runs


def kept_entries(records: list[Record]) -> list[Entry]:
    """Return by how much plans were off in all phases of the kept runs."""
    compared = [
        Compared(f"{phase}, {each.run}", each.planned_gib, each.measured_gib)
        for phase, runs in compared_by_phase(records).items()
        for each in runs
    ]
    return error_entries("planner, phases of kept runs", compared, bars=PHASE_BARS)


# -- against GPUs


def gpu_entries(path: Path) -> list[Entry]:
    """What `bench.planner_points` measured: errors of closed form and dry run, and whether what was said to fit did."""
    records = planner_points.kept_records(path)
    ran = [record for record in records if record["outcome"] == "ran"]
    ours, dry = (
        [
            Compared(planner_points.point_of(record).label, record[planned], record["allocated_gib"])
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
        verdict_entry([record for record in records if record["card"]]),
    ]


def verdict_entry(records: Sequence[dict[str, Any]]) -> Entry:
    """Of the steps with a smaller card's memory, the share that ran where it was planned to fit, and else ran out."""
    name = "planner, steps with a smaller card's memory"
    if not records:
        return measured(f"{name}: right verdicts {NOT_RUN}", None, "share", POINTS_COMMAND)
    right = sum(
        (record["planned_with_overhead_gib"] <= record["capacity_gib"]) == (record["outcome"] == "ran")
        for record in records
    )
    ran = sum(record["outcome"] == "ran" for record in records)
    counts = f"{ran} ran, {len(records) - ran} ran out"
    return measured(f"{name}, {counts}: right verdicts", right / len(records), "share", POINTS_COMMAND)


# -- how soon the answer comes


def speed_entries(rounds: int, dry_run_rounds: int) -> list[Entry]:
    """Seconds of a process that asks once, its start and its imports included; medians of the rounds."""
    asked = "4 A6000, Llama 8B, every technique and way"
    dry = [sys.executable, "-c", DRY_RUN_CODE]
    planner_s, dry_run_s = process_s(PLANNER, rounds), process_s(dry, dry_run_rounds)
    return [
        measured(f"planner, one answer ({asked})", planner_s, "s", COMMAND, at_most=PLANNER_BAR_S),
        measured("planner, one dry run (LoRA of Llama 8B, 1x2048)", dry_run_s, "s", COMMAND, at_most=DRY_RUN_BAR_S),
    ]


def process_s(command: list[str], rounds: int) -> float:
    """Median seconds of a command in a process of its own, on one core.

    Raises:
        RuntimeError: it failed; the planner's 1, "it does not fit", is an answer.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    taken = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
        taken.append(time.perf_counter() - start_s)
        if done.returncode not in (0, 1) or not done.stdout:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return statistics.median(taken)
