"""Puts a lease's results into the files that tables are made from."""

from operator import itemgetter
from pathlib import Path

from bench import planner_points
from bench.entries import keep, read_kept
from bench.gpu_trial import TRIALS_PATH
from bench.lease_parts import LEASES_PATH, REHEARSED
from bench.lease_schedule import read_results
from common.base.errors import BadInputError
from common.records.store import write_json

NEXT = "now `python -m bench gpu planner` judges them, and `make tables` shows them"
KEPT_ALONE = ("steps: ", "point: ")
"""How the names of parts begin that have a file of their own."""
KEPT = ("at", "seconds", "status", "why", "result")


def merge(
    results: Path,
    trials: Path = TRIALS_PATH,
    points: Path = planner_points.POINTS_PATH,
    others: Path = LEASES_PATH,
) -> None:
    """Merge the lines of `results`: steps into `trials`, points into `points`, all else into `others`.

    What was left out or cut off measured nothing, and changes nothing. A part that failed is among the others.

    Raises:
        BadInputError: there are no results but a rehearsal's, whose figures mean nothing.
    """
    lines = [line for line in read_results(results) if line["card"] != REHEARSED]
    if not lines:
        raise BadInputError(f"{results.name} has no results of a GPU: run `python -m bench.lease` on one first.")
    done = [line for line in lines if line["status"] == "done"]
    steps, measured = ([line["result"] for line in done if line["part"].startswith(kind)] for kind in KEPT_ALONE)
    keep(steps, trials, itemgetter("technique", "name", "gpu"))
    with_dry_runs = list(map(planner_points.with_dry_run, measured))
    keep(with_dry_runs, points, lambda point: (planner_points.point_of(point), point["gpu"]))
    rest = [line for line in done if not line["part"].startswith(KEPT_ALONE)]
    rest += [line for line in lines if line["status"] == "failed"]
    kept = read_kept(others, {})
    for line in rest:
        kept.setdefault(line["card"], {})[line["part"]] = {name: line.get(name) for name in KEPT}
    write_json(kept, others)
    print(f"{len(steps)} trials, {len(measured)} points and {len(rest)} other parts merged; {NEXT}")
