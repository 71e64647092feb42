"""The table of 1.1: planned memory against what others published, by source and kind of figure."""

from collections.abc import Iterator, Sequence

from common.planning.published_memory import (
    KINDS,
    LIKELY,
    Kind,
    Point,
    errors_of,
    excluded,
    held_out_points,
    points,
    points_of,
    sources,
    verdicts_on,
)
from common.records.store import Record
from common.reporting.rows import Row, as_table

KIND_NAMES = {"allocated": "allocated", "reserved": "reserved", "nvidia_smi": "`nvidia-smi`"}


@as_table
def published_memory(_: list[Record]) -> Iterator[Row]:
    """Return one line for each source and kind of figure, and one for all likely ones that were held out."""
    for name, source in sources().items():
        for kind in KINDS:
            if found := [point for point in points_of(name) if kind in point.figures]:
                use = "held out" if source.held_out else "calibration"
                yield _line(source.title, found, KIND_NAMES[kind], use, (kind,))
    yield _line("held out, together", held_out_points(), "reserved", "bars: 8 %, 90 %", LIKELY)


def _line(title: str, found: list[Point], kind: str, use: str, kinds: Sequence[Kind]) -> Row:
    errors = errors_of(found, kinds)
    return {
        "Source": title,
        "Figure": kind,
        "Points": str(errors.figures),
        "Mean error": f"{errors.mean:.1%}",
        "Bias": f"{errors.bias:+.1%}",
        "Within 15 %": f"{errors.within_15:.0%}",
        "Use": use,
    }


@as_table
def published_verdicts(_: list[Record]) -> Iterator[Row]:
    """Return what the planner says of runs of which it is published whether they fitted."""
    for what, found in (("all sources", points()), ("held out", held_out_points())):
        verdicts = verdicts_on(found)
        yes = verdicts.ran - verdicts.tight - verdicts.refused
        yield {
            "Runs": what,
            "fitted": str(verdicts.ran),
            "of these yes": str(yes),
            "tight": str(verdicts.tight),
            "no": str(verdicts.refused),
            "ran out of memory": str(verdicts.ran_out),
            "of these said to fit": str(verdicts.false_fits),
        }


@as_table
def excluded_memory(_: list[Record]) -> Iterator[Row]:
    """Return one line for each reason for which published points are not planned."""
    for entry in excluded():
        yield {"Not planned": entry["reason"], "Points": str(entry["points"])}
