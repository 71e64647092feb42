"""Memory that others measured and published, planned as it was measured: how far plans are from it.

`assets/published_memory.json` holds the points (assets/README.md says where they are from). A point has one or several
figures: allocated by PyTorch, reserved by its allocator, or shown by `nvidia-smi`, in GiB.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

from common.base.paths import REPOSITORY
from common.hardware.devices import Gpu, find_gpu
from common.planning.architectures import FAMILIES, Architecture
from common.planning.gpu_overhead import CONTEXT, RANKS, memory_with_overhead
from common.planning.job import BatchShape, Job, Loop
from common.planning.model_configs import LARGEST_SIZE
from common.planning.shares import whole_model
from common.planning.terms import DeviceMemory

MEMORY_PATH = REPOSITORY / "assets" / "published_memory.json"
CALIBRATION = "ibm"
"""The source that the constants of `gpu_overhead` are fitted to."""
AS_PEFT = {"short_ends": False, "casts_adapter_inputs": True}
"""PEFT's defaults, which published loops use unless their row says otherwise. This repository changes both."""

Kind = Literal["allocated", "reserved", "nvidia_smi"]
KINDS: tuple[Kind, ...] = ("allocated", "reserved", "nvidia_smi")
LIKELY: tuple[Kind, ...] = ("reserved", "nvidia_smi")
"""What users see: allocated memory and what PyTorch's allocator, and the GPU, need beside it."""


@dataclass(frozen=True)
class Point:
    """A run whose memory was published.

    Attributes:
        source: By its name in `sources()`.
        at: Where in the source, or as it is stated there.
        figures: GiB by kind; none where the run ran out of memory.
    """

    source: str
    at: str
    architecture: Architecture
    job: Job
    gpu: Gpu
    figures: dict[Kind, float]

    @property
    def ran_out(self) -> bool:
        """Whether the run ran out of its GPU's memory."""
        return not self.figures

    @cached_property
    def planned(self) -> DeviceMemory:
        """The plan of one device."""
        return memory_with_overhead(self.architecture, self.job, whole_model(self.architecture), self.gpu)

    def planned_gib(self, kind: Kind) -> float:
        """Return what a kind of figure is likely to be, in GiB."""
        if kind == "allocated":
            return self.planned.allocated_gib
        outside = (CONTEXT, RANKS) if kind == "reserved" else ()  # `nvidia-smi` shows it beside what is reserved
        return self.planned.peak_gib - sum(term.gib for term in self.planned.terms if term.what in outside)

    def error(self, kind: Kind) -> float:
        """Return planned over published memory, less one: above zero too much was planned."""
        return self.planned_gib(kind) / self.figures[kind] - 1

    def is_safe(self, kind: Kind) -> bool:
        """Return whether the published figure, of what was reserved or shown, is at most the safe one."""
        beyond_likely = self.planned.safe_gib - self.planned.peak_gib
        return self.figures[kind] <= self.planned_gib(kind) + beyond_likely

    @property
    def fits(self) -> bool:
        """Whether the plan says that the run fits: by its safe figure."""
        return self.planned.safe_gib <= self.gpu.memory_gib


def sources() -> dict[str, dict[str, Any]]:
    """Return who published points, by name: title, place, and whether no constant of the plan is fitted to it."""
    return _file()["sources"]


@cache
def points() -> tuple[Point, ...]:
    """Return all points that can be planned, those of runs that ran out of memory included."""
    architectures = {model: architecture_of(model, shape) for model, shape in _file()["models"].items()}
    return tuple(_point(row, architectures[row["model"]]) for row in _file()["points"])


def excluded() -> list[dict[str, Any]]:
    """Return the published points that are not planned: reason, number of points, and two examples of each."""
    return _file()["excluded"]


def architecture_of(model: str, shape: dict[str, Any]) -> Architecture:
    """Return a model's architecture, from its shape as published with the points."""
    # how long its rows may be was not published, and takes no memory
    config = {**shape, "max_position_embeddings": LARGEST_SIZE}
    return FAMILIES[shape["model_type"]].read(model.rpartition("/")[2], config)


def _point(row: dict[str, Any], architecture: Architecture) -> Point:
    figures: dict[Kind, float] = {kind: row[f"{kind}_gib"] for kind in KINDS if f"{kind}_gib" in row}
    job = Job(
        technique=row["technique"],
        parallel=row["parallel"],
        batch=BatchShape(row["rows"], row["length"], row["length"], padded=row.get("padded", False)),
        devices=row["devices"],
        precision=row["precision"],
        quantization=row.get("quantization", "nf4"),
        optimizer="adamw_torch",
        attention=row["attention"],
        gradient_checkpointing=row["gradient_checkpointing"],
        lora_rank=row.get("lora_rank", 8),
        target_modules=tuple(row.get("target_modules", ())),
        lora_dropout=row.get("lora_dropout", 0.0),
        offload=row.get("offload", False),
        loop=Loop(**AS_PEFT | row["loop"]),
    )
    return Point(row["source"], row["at"], architecture, job, find_gpu(row["gpu"]), figures)


@cache
def _file() -> dict[str, Any]:
    return json.loads(MEMORY_PATH.read_text(encoding="utf-8"))


# -- how far plans are from what was published


@dataclass(frozen=True)
class Errors:
    """The errors of some figures.

    Attributes:
        figures: How many.
        mean: Of their sizes, as a share.
        bias: Of them with their signs: above zero plans are too high.
        within_15: The share whose size is at most 15 %.
        worst: The largest size.
    """

    figures: int
    mean: float
    bias: float
    within_15: float
    worst: float


def errors_of(chosen: Iterable[Point], kinds: Sequence[Kind] = KINDS) -> Errors:
    """Return the errors of all figures of some kinds; at least one point must have such a figure."""
    found = [point.error(kind) for point in chosen for kind in kinds if kind in point.figures]
    sizes = [abs(error) for error in found]
    within = sum(size <= 0.15 for size in sizes) / len(sizes)
    return Errors(len(found), statistics.fmean(sizes), statistics.fmean(found), within, max(sizes))


def safe_share(chosen: Iterable[Point]) -> float:
    """Return the share of the figures of what was reserved or shown that are at most the safe one."""
    are_safe = [point.is_safe(kind) for point in chosen for kind in LIKELY if kind in point.figures]
    return sum(are_safe) / len(are_safe)


def points_of(source: str) -> list[Point]:
    """Return a source's points."""
    return [point for point in points() if point.source == source]


def held_out_points() -> list[Point]:
    """Return the points of sources that no constant is fitted to."""
    return [point for name, source in sources().items() if source["held_out"] for point in points_of(name)]


@dataclass(frozen=True)
class Verdicts:
    """What plans say of runs of which it is published whether they fitted.

    Attributes:
        ran: Runs that fitted.
        refused: Of these, those that are likely not to fit by the plan ("no").
        tight: Of these, those that are likely to fit, but not safe ("tight").
        ran_out: Runs that ran out of memory.
        false_fits: Of these, those that fit by the plan ("yes").
    """

    ran: int
    refused: int
    tight: int
    ran_out: int
    false_fits: int


def verdicts_on(chosen: Iterable[Point]) -> Verdicts:
    """Return the verdicts on some points."""
    ran, ran_out = [], []
    for point in chosen:
        (ran_out if point.ran_out else ran).append(point)
    refused = sum(point.planned.peak_gib > point.gpu.memory_gib for point in ran)
    unsafe = sum(not point.fits for point in ran)
    return Verdicts(len(ran), refused, unsafe - refused, len(ran_out), sum(point.fits for point in ran_out))
