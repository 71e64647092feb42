"""The summands of a memory plan, and what one device holds of them at once."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from common.hardware.devices import GIB, Gpu


class Kind(StrEnum):
    """What a summand is for; the overhead comes on top of what PyTorch allocates."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    BUFFERS = "buffers"
    OVERHEAD = "overhead"


PARTS = tuple(part.value for part in Kind if part != Kind.OVERHEAD)  # of allocated memory


@dataclass(frozen=True)
class Term:
    """One summand of a device's memory: `count` bytes; 0 where a condition does not hold, and then it is not shown."""

    part: Kind
    what: str
    formula: str
    count: float

    @property
    def gib(self) -> float:
        """In GiB."""
        return self.count / GIB


def size_of(terms: Iterable[Term]) -> float:
    """Return the bytes of all terms together."""
    return sum(term.count for term in terms)


def activations(what: str, formula: str, count: float) -> Term:
    """Return a summand of the activations."""
    return Term(Kind.ACTIVATIONS, what, formula, count)


def numbers(part: Kind, what: str, count: int, bytes_each: float, ranks: int = 1) -> Term:
    """Return the summand of `count` numbers of so many bytes each, divided among `ranks`."""
    shared = f" / {ranks} ranks" if ranks > 1 else ""
    return Term(part, what, f"{count:,} x {bytes_each:g} bytes{shared}", count * bytes_each / ranks)


def times_each(terms: list[Term], times: int, prefix: str) -> list[Term]:
    """Return the terms so many times as large, with a prefix that says so."""
    return [Term(term.part, prefix + term.what, term.formula, term.count * times) for term in terms]


@dataclass(frozen=True)
class DeviceMemory:
    """What one device holds at its highest moment."""

    moment: str  # of a step a `memory_plan.Moment`; other phases have names of their own
    terms: tuple[Term, ...] = field(repr=False)
    blocks: float = 0.0  # bytes that PyTorch's allocator comes to hold in a step, without gaps; 0: those of `terms`
    spread: float = 0.0  # bytes beyond the likely ones with which a GPU has enough

    @cached_property
    def parts_gib(self) -> dict[str, float]:
        """GiB by part."""
        return {part.value: sum((term.gib for term in self.terms if term.part == part), 0.0) for part in Kind}

    @property
    def allocated_gib(self) -> float:
        """What PyTorch would call peak allocated."""
        return self.peak_gib - self.parts_gib[Kind.OVERHEAD]

    @property
    def peak_gib(self) -> float:
        """With the overhead: what `nvidia-smi` is likely to show."""
        return sum(self.parts_gib.values())

    @property
    def safe_gib(self) -> float:
        """With the spread, too: what is enough even where PyTorch's allocator wastes more than is likely."""
        return self.peak_gib + self.spread / GIB

    @property
    def largest_parts(self) -> str:
        """The two parts that take most, in GiB: `weights 3.5 and activations 1.2`."""
        parts = sorted(self.parts_gib.items(), key=lambda part: -part[1])[:2]
        return " and ".join(f"{name} {gib:.1f}" for name, gib in parts)

    def verdict_on(self, gpu: Gpu) -> str:
        """Return `yes` where the GPU is safe to hold it, `tight` where it is likely to, else `no`."""
        return "yes" if self.safe_gib <= gpu.memory_gib else "tight" if self.peak_gib <= gpu.memory_gib else "no"
