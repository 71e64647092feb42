"""Puts a lease's results into the files that tables are made from."""

import json
from pathlib import Path
from typing import Any

from bench import gpu_trial, planner_points
from bench.lease_parts import LEASES_PATH, REHEARSED
from bench.lease_schedule import read_results
from common.base.errors import BadInputError

NEXT = "now `python -m bench gpu planner` judges them, and `make tables` shows them"
KEPT = ("at", "seconds", "status", "why", "result")


def merge(
    results: Path,
    trials: Path = gpu_trial.TRIALS_PATH,
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
    steps = [line["result"] for line in done if line["part"].startswith("steps: ")]
    gpu_trial.keep(steps, trials)
    measured = [line["result"] for line in done if line["part"].startswith("point: ")]
    keep_points(measured, points)
    rest = [line for line in lines if not line["part"].startswith(("steps: ", "point: ")) or line["status"] == "failed"]
    keep_others([line for line in rest if line["status"] in ("done", "failed")], others)
    print(f"{len(steps)} trials, {len(measured)} points and {len(rest)} other parts merged; {NEXT}")


def keep_points(records: list[dict[str, Any]], path: Path) -> None:
    """Put points into the file at `path`, with their dry runs, in place of older ones of the same point and GPU."""
    records = [planner_points.with_dry_run(record) for record in records]
    by = {(planner_points.point_of(each), each["gpu"]): each for each in [*planner_points.kept_records(path), *records]}
    path.write_text(json.dumps(list(by.values()), indent=2) + "\n", encoding="utf-8")


def keep_others(lines: list[dict[str, Any]], path: Path) -> None:
    """Put parts' lines into the file at `path`, by card and part, in place of older ones."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for line in lines:
        kept.setdefault(line["card"], {})[line["part"]] = {name: line.get(name) for name in KEPT}
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
