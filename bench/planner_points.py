"""What the planner's memory is checked against on a GPU: real training steps, parts of `python -m bench.lease`.

Every point is a model with random weights, made on the GPU, and two optimizer steps, of which the second counts. Points
with a smaller card's memory show whether what is said to fit does.

Nothing is fitted to these points: the closed form has no constant that a measurement could set.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import torch

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.checks.dry_run import dry_run
from common.checks.folder_training import tried_by_folder
from common.checks.preflight import StepClock
from common.checks.tried_rows import rows_of_length
from common.hardware.devices import (
    GIB,
    Gpu,
    MemoryReading,
    find_gpu,
    forget_peak,
    gpu_of_device,
    gpus,
    read_memory,
)
from common.planning.architectures import read_architecture
from common.planning.gpu_overhead import CONTEXT_GIB, memory_with_overhead
from common.planning.job import BatchShape
from common.planning.memory_plan import DeviceMemory
from common.planning.plans import job_of_run
from common.planning.shares import whole_model
from common.runtime.recorder import Trial
from common.runtime.world import Rank

STEPS = 2
"""The second has optimizer states from its start, and so the highest peak."""
POINTS_PATH = REPOSITORY / "bench" / "planner_points.json"
TECHNIQUES = ("full", "lora")
MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b")
SHAPES = ((4, 512), (1, 2048), (1, 8192))
"""Rows and their length in tokens, of the points with the whole card."""
QLORA_MODELS = ("llama-3.1-8b", "qwen2.5-7b")
LARGE_QLORA_MODEL = "llama-3.1-70b"
"""In 4 bits it has room on one card of 141 GB."""
SMALL_CARDS = ("a4000", "a5000", "a6000")
"""Of 16, 24 and 48 GB."""
SMALL_CARD_SHAPES = tuple(product((1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32), (512, 1024, 2048)))
FULLNESS = (0.5, 0.65, 0.75, 0.85, 0.9, 0.94, 0.98, 1.02, 1.06, 1.1, 1.15, 1.25, 1.4, 1.6)
"""Planned memory over a small card's, of the points to look for: seven that fit and seven that do not."""
TOO_LARGE = 1.3
"""Planned memory over the whole card's from which on a point is not even tried."""


@dataclass(frozen=True)
class Point:
    """A training step to be measured."""

    technique: str
    model: str
    rows: int
    length: int
    """Tokens of a row."""
    gradient_checkpointing: bool
    card: str = ""
    """The smaller card, by its name in the catalogue, whose memory it gets; empty = all that there is."""
    linear_only: bool = False
    """Whether full fine-tuning trains the linear layers alone; else every weight."""
    quantization: str = "nf4"
    """Of the frozen weights, with qlora."""

    @property
    def target_modules(self) -> str:
        """As the run is told."""
        return "all" if self.technique == "full" and not self.linear_only else "all-linear"

    @property
    def run(self) -> RunConfig:
        """The run whose step this is."""
        return RunConfig(
            technique=self.technique,
            device="cuda",
            model=self.model,
            weights="random",
            precision="bf16",
            target_modules=self.target_modules,
            gradient_checkpointing=self.gradient_checkpointing,
            quantization=self.quantization,
            report_to="none",
        )

    @property
    def batch(self) -> BatchShape:
        """Every token is learnt but the first, which nothing predicts."""
        return BatchShape(self.rows, self.length, self.length - 1)

    @property
    def label(self) -> str:
        """What distinguishes it from other points, in a few words."""
        special = {
            "linear layers": self.linear_only,
            "checkpointed": self.gradient_checkpointing,
            self.quantization: self.technique == "qlora",
            self.card: self.card,
        }
        told = (name for name, is_so in special.items() if is_so)
        return " ".join([self.technique, self.model, f"{self.rows}x{self.length}", *told])

    def planned(self, gpu: Gpu) -> DeviceMemory:
        """The closed form's answer."""
        architecture = read_architecture(self.model)
        return memory_with_overhead(architecture, job_of_run(self.run, self.batch), whole_model(architecture), gpu)


# -- which points


def all_points(here: Gpu) -> list[Point]:
    """With the whole card (also linear layers alone, and qlora), then with the memory of smaller ones."""
    grid = product(TECHNIQUES, MODELS, SHAPES, (False, True))
    whole_card = [Point(technique, model, *shape, checkpointing) for technique, model, shape, checkpointing in grid]
    linear_grid = product(MODELS, SHAPES[:1], (False, True))
    whole_card += [
        Point("full", model, *shape, checkpointing, linear_only=True) for model, shape, checkpointing in linear_grid
    ]
    whole_card += qlora_points()
    smaller = [card for card in SMALL_CARDS if find_gpu(card).memory_gib < here.memory_gib]
    return whole_card + [point for card in smaller for point in small_card_points(card)]


def qlora_points() -> list[Point]:
    """Weights in 4 bits: middling models in every shape, a large one, and double quantization."""
    grid = product(QLORA_MODELS, SHAPES, (False, True))
    points = [Point("qlora", model, *shape, checkpointing) for model, shape, checkpointing in grid]
    points += [Point("qlora", LARGE_QLORA_MODEL, *shape, True) for shape in SHAPES[:2]]
    points.append(Point("qlora", LARGE_QLORA_MODEL, 1, 512, False))
    for model in (QLORA_MODELS[0], LARGE_QLORA_MODEL):
        points.append(Point("qlora", model, *SHAPES[0], True, quantization="nf4-double"))
    return points


@cache
def small_card_points(card: str) -> list[Point]:
    """The points that are planned to fill the card nearest to each of `FULLNESS`, on either side of full."""
    gpu = find_gpu(card)
    grid = product(TECHNIQUES, MODELS, SMALL_CARD_SHAPES, (False, True))
    fullness = {}
    for technique, model, shape, checkpointing in grid:
        point = Point(technique, model, *shape, checkpointing, card)
        fullness[point] = point.planned(gpu).peak_gib / gpu.memory_gib
    chosen: list[Point] = []
    for wanted in FULLNESS:
        left = [point for point in fullness if point not in chosen and (fullness[point] > 1) == (wanted > 1)]
        chosen.append(min(left, key=lambda point: abs(fullness[point] - wanted)))
    return chosen


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
    if point.card:
        total_gib = torch.cuda.get_device_properties(0).total_memory / GIB
        # a card's context takes its share of it; here it lies outside of what the fraction caps
        torch.cuda.set_per_process_memory_fraction((find_gpu(point.card).memory_gib - CONTEXT_GIB) / total_gib)
    try:
        memory = watched_steps(replace(point.run, device=device), point.batch, device)
    except torch.OutOfMemoryError:
        return {"outcome": "oom"}
    return {"outcome": "ran", "allocated_gib": memory.peak_gib, "reserved_gib": memory.peak_reserved_gib}


# -- all points


def measured_point(point: Point, here: Gpu, measure_one: Callable[[Point], dict[str, Any]]) -> dict[str, Any]:
    """The point's record: its settings, what was planned, and what came of it, by `measure_one`."""
    gpu = find_gpu(point.card) if point.card else here
    planned = point.planned(gpu)
    if not point.card and planned.peak_gib > TOO_LARGE * gpu.memory_gib:
        outcome = {"outcome": "skipped"}
    else:
        outcome = measure_one(point)
    return {
        **asdict(point),
        "planned_gib": planned.allocated_gib,
        "planned_with_overhead_gib": planned.peak_gib,
        "capacity_gib": gpu.memory_gib,
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
    point = point_of(record)
    return {**record, "dry_run_gib": dry_run(point.run, point.batch).peak_gib}


def kept_records(path: Path = POINTS_PATH) -> list[dict[str, Any]]:
    """The records of the file at `path`; none where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def known_points(records: Sequence[dict[str, Any]], gpu: str) -> list[Point]:
    """The points that the records have of the GPU of that name."""
    return [point_of(record) for record in records if record["gpu"] == gpu]


def point_of(record: dict[str, Any]) -> Point:
    """The point of a record; early ones lack fields that have their default."""
    return Point(**{name: record[name] for name in Point.__dataclass_fields__ if name in record})


def across_strata(points: Sequence[Point]) -> list[Point]:
    """The points in an order in which any first few are of different kinds: one of each technique, model and card."""
    strata: dict[tuple[str, str, str], list[Point]] = {}
    for point in points:
        strata.setdefault((point.technique, point.model, point.card), []).append(point)
    turned = [of[turn % len(of) :] + of[: turn % len(of)] for turn, of in enumerate(strata.values())]  # other shapes
    return [point for turn in zip_longest(*turned) for point in turn if point]


def gpu_here() -> Gpu:
    """This machine's first GPU.

    Raises:
        BadInputError: there is none, or the catalogue lacks it.
    """
    names = gpus()[1]  # asking PyTorch would start CUDA here, and take memory from the points
    if not names or not torch.cuda.is_available():
        raise BadInputError("PyTorch sees no GPU here: run this where one is; --rehearse tries all of it on a CPU.")
    gpu = gpu_of_device(names[0])
    if gpu is None:
        raise BadInputError(f"The GPU {names[0]} is not in the catalogue: add it to common/hardware/catalogue.toml.")
    return gpu
