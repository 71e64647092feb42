"""The summands of a memory plan."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from common.hardware.devices import GIB


class Part(StrEnum):
    """What a summand is for; the overhead comes on top of what PyTorch allocates."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    BUFFERS = "buffers"
    OVERHEAD = "overhead"


PARTS = tuple(part for part in Part if part != Part.OVERHEAD)
"""Those of allocated memory."""


@dataclass(frozen=True)
class Term:
    """One summand of a device's memory: `count` bytes. Those without bytes are never printed."""

    part: Part
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
    return Term(Part.ACTIVATIONS, what, formula, count)


def numbers(part: Part, what: str, count: int, bytes_each: float, ranks: int = 1) -> Term:
    """Return the summand of `count` numbers of so many bytes each, divided among `ranks`."""
    shared = f" / {ranks} ranks" if ranks > 1 else ""
    return Term(part, what, f"{count:,} x {bytes_each:g} bytes{shared}", count * bytes_each / ranks)


def times_each(terms: list[Term], times: int, prefix: str) -> list[Term]:
    """Return the terms so many times as large, with a prefix that says so."""
    return [Term(term.part, prefix + term.what, term.formula, term.count * times) for term in terms]


def where(*rows: tuple[object, Term | list[Term]]) -> list[Term]:
    """Return the terms of a table whose condition, in the first column, holds; a row has one term or several."""
    return [term for holds, terms in rows if holds for term in (terms if isinstance(terms, list) else [terms])]
