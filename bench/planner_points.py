"""What the planner's memory is checked against on a GPU: real training steps, parts of `python -m bench.lease`.

Every point is a model with random weights, made on the GPU, and two optimizer steps, of which the second counts.

Nothing is fitted to these points: the closed form has no constant that a measurement could set.
"""

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.checks.dry_run import dry_run
from common.checks.folder_training import tried_by_folder
from common.checks.measured_steps import StepClock
from common.checks.tried_rows import rows_of_length
from common.hardware.devices import Gpu, MemoryReading, forget_peak, gpu_of_device, gpus, read_memory
from common.planning.architectures import read_architecture
from common.planning.gpu_overhead import memory_with_overhead
from common.planning.job import BatchShape, job_of_run
from common.planning.shares import whole_model
from common.planning.terms import DeviceMemory
from common.runtime.recorder import Trial
from common.runtime.world import Rank

STEPS = 2  # the second has optimizer states from its start, and so the highest peak
POINTS_PATH = REPOSITORY / "bench" / "planner_points.json"
TECHNIQUES = ("full", "lora")
MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b")
SHAPES = ((4, 512), (1, 2048), (1, 8192))  # rows and their length in tokens
QLORA_MODELS = ("llama-3.1-8b", "qwen2.5-7b")
LARGE_QLORA_MODEL = "llama-3.1-70b"  # in 4 bits it has room on one card of 141 GB
TOO_LARGE = 1.3  # planned memory over the card's from which on a point is not even tried


@dataclass(frozen=True)
class Step:
    """A training step whose memory the closed form and the dry run tell."""

    run: RunConfig
    batch: BatchShape

    @property
    def name(self) -> str:
        """What distinguishes it from others, in a few words."""
        run, batch = self.run, self.batch
        special = [
            run.quantization if run.technique == "qlora" else "",
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


def step_of(
    technique: str,
    model: str,
    checkpointing: bool,
    shape: tuple[int, int],
    padded: bool = False,
    labelled: int | None = None,
    tiles: int = 0,
    **settings: Any,
) -> Step:
    """Return a step with random weights; full fine-tuning is of every weight unless `settings` say otherwise."""
    rows, length = shape
    run = RunConfig(
        technique=technique,
        model=model,
        gradient_checkpointing=checkpointing,
        weights="random",
        device="cuda",
        report_to="none",
        **{"precision": "bf16", "target_modules": "all" if technique == "full" else "all-linear", **settings},
    )
    return Step(run, BatchShape(rows, length, labelled or length - 1, padded, tiles=tiles))


@dataclass(frozen=True)
class Point:
    """A training step to be measured.

    Attributes:
        length: Tokens of a row.
        linear_only: Full fine-tuning trains the linear layers alone; else every weight.
    """

    technique: str
    model: str
    rows: int
    length: int
    gradient_checkpointing: bool
    linear_only: bool = False
    quantization: str = "nf4"

    @property
    def step(self) -> Step:
        """What is measured."""
        linear_only = {"target_modules": "all-linear"} if self.linear_only else {}
        shape, settings = (self.rows, self.length), {"quantization": self.quantization, **linear_only}
        return step_of(self.technique, self.model, self.gradient_checkpointing, shape, **settings)

    def planned(self, gpu: Gpu) -> DeviceMemory:
        """The closed form's answer."""
        architecture, step = read_architecture(self.model), self.step
        return memory_with_overhead(architecture, job_of_run(step.run, step.batch), whole_model(architecture), gpu)


# -- which points


def all_points() -> list[Point]:
    """Full and LoRA in every shape, full fine-tuning of linear layers alone, and QLoRA."""
    checkpointings = (False, True)
    grid, linear_grid = product(TECHNIQUES, MODELS, SHAPES, checkpointings), product(MODELS, SHAPES[:1], checkpointings)
    return [
        *(Point(technique, model, *shape, checkpointing) for technique, model, shape, checkpointing in grid),
        *(Point("full", model, *shape, checkpointing, linear_only=True) for model, shape, checkpointing in linear_grid),
        *qlora_points(),
    ]


def qlora_points() -> list[Point]:
    """Weights in 4 bits: middling models in every shape, a large one, and double quantization."""
    grid, both = product(QLORA_MODELS, SHAPES, (False, True)), (QLORA_MODELS[0], LARGE_QLORA_MODEL)
    return [
        *(Point("qlora", model, *shape, checkpointing) for model, shape, checkpointing in grid),
        *(Point("qlora", LARGE_QLORA_MODEL, *shape, True) for shape in SHAPES[:2]),
        Point("qlora", LARGE_QLORA_MODEL, 1, 512, False),
        *(Point("qlora", model, *SHAPES[0], True, quantization="nf4-double") for model in both),
    ]


# -- one point, in its own process


def watched_steps(run: RunConfig, batch: BatchShape, device: str) -> MemoryReading:
    """Return a device's memory after two optimizer steps by the technique's own workflow, whose peak is the second's.

    A CPU, on which points are rehearsed, has the process's memory instead.
    """
    asked = replace(run, max_steps=STEPS, per_device_train_batch_size=batch.rows)
    from_the_first_step_on = StepClock([], partial(forget_peak, device))
    with tempfile.TemporaryDirectory() as folder:
        log = Trial(asked, Rank(0, 1, device, "python"), Path(folder), [from_the_first_step_on])
        tried_by_folder(log, rows_of_length(asked, batch.length))
    return read_memory(device)


def measure_here(point: Point, device: str = "cuda") -> dict[str, Any]:
    """The point's figures in GiB, from this process's device; `oom` where its memory does not suffice."""
    try:
        memory = watched_steps(replace(point.step.run, device=device), point.step.batch, device)
    except torch.OutOfMemoryError:
        return {"outcome": "oom"}
    return {"outcome": "ran", "allocated_gib": memory.peak_gib, "reserved_gib": memory.peak_reserved_gib}


# -- all points


def measured_point(point: Point, here: Gpu, measure_one: Callable[[Point], dict[str, Any]]) -> dict[str, Any]:
    """The point's record: its settings, what was planned, and what came of it, by `measure_one`."""
    planned = point.planned(here)
    is_tried = planned.peak_gib <= TOO_LARGE * here.memory_gib
    outcome = measure_one(point) if is_tried else {"outcome": "skipped"}
    return {
        **asdict(point),
        "planned_gib": planned.allocated_gib,
        "planned_with_overhead_gib": planned.peak_gib,
        "capacity_gib": here.memory_gib,
        "dry_run_gib": None,
        **dict.fromkeys(("allocated_gib", "reserved_gib")),
        **outcome,
        "torch": torch.__version__,
        "gpu": here.name,
    }


def with_dry_run(record: dict[str, Any]) -> dict[str, Any]:
    """The record with the dry run's peak, which takes seconds and no GPU; a dry run quantizes no weights."""
    if record["dry_run_gib"] is not None or record["technique"] == "qlora":
        return record
    step = point_of(record).step
    return {**record, "dry_run_gib": dry_run(step.run, step.batch).peak_gib}


def point_of(record: dict[str, Any]) -> Point:
    """The point of a record; early ones lack fields that have their default."""
    return Point(**{name: record[name] for name in Point.__dataclass_fields__ if name in record})


def gpu_here() -> Gpu:
    """This machine's first GPU; refused where there is none, or the catalogue lacks it."""
    names = gpus()[1]  # asking PyTorch would start CUDA here, and take memory from the points
    if not names or not torch.cuda.is_available():
        raise BadInputError("PyTorch sees no GPU here: run this where one is; --rehearse tries all of it on a CPU.")
    gpu = gpu_of_device(names[0])
    if gpu is None:
        raise BadInputError(f"The GPU {names[0]} is not in the catalogue: add it to common/hardware/catalogue.toml.")
    return gpu
