"""The summands of a memory plan."""

from dataclasses import dataclass, replace

from common.hardware.devices import GIB

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
"""Of allocated memory; `overhead` comes on top."""


@dataclass(frozen=True)
class Term:
    """One summand of a device's memory."""

    part: str
    """One of `PARTS`, or `overhead`."""
    what: str
    formula: str
    count: float
    """Bytes."""

    @property
    def gib(self) -> float:
        """In GiB."""
        return self.count / GIB


def activations(what: str, formula: str, count: float) -> Term:
    """Return a summand of the activations."""
    return Term("activations", what, formula, count)


def times_each(terms: list[Term], times: int, prefix: str) -> list[Term]:
    """Return the terms so many times as large, with a prefix that says so."""
    return [replace(term, what=prefix + term.what, count=term.count * times) for term in terms]
