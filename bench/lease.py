"""Measures on a GPU for a given time, the most wanted first: `python -m bench.lease --minutes 11`.

Each part (`bench.lease_parts`) is a process of its own, with an expected duration and a limit. None is begun that
cannot end in the time left. While one measures, the next one's process imports its libraries. After each part a line is
added to `lease/results.jsonl`, so that a second call goes on where the first ended, also on another machine that is
given the folder. `--rehearse` runs every part on a CPU, with tiny models; its figures mean nothing. `--merge` puts the
results into the files of `bench` from which tables are made.

Exit code 0: no part failed; 1: one did; 2: the question is wrong.
"""

import fcntl
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path

import psutil

from bench import planner_points
from bench.entries import keep, read_kept
from bench.gpu import TRIALS_PATH
from bench.lease_parts import LEASES_PATH, REHEARSED, card_here, parts_for
from bench.lease_schedule import RESULTS, Part, Results, read_results, spend
from bench.processes import END_S
from common.base.command_line import INTERRUPTED_EXIT_CODE, refused_in_one_sentence
from common.base.errors import BadInputError
from common.base.parsing import OneSentenceParser
from common.base.paths import REPOSITORY
from common.hardware.devices import find_gpu
from common.records.store import write_json

FOLDER = REPOSITORY / "lease"


# -- what is kept

NEXT = "now `python -m bench gpu planner` judges them, and `make tables` shows them"
KEPT_ALONE = ("steps: ", "point: ")  # how the names of parts begin that have a file of their own
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


# -- the command line


def listed(parts: Sequence[Part]) -> str:
    """Return the parts for a reader, with how long they should take, and how long all of them."""
    lines = ["; ".join(filter(None, [f"{part.name}: {part.expected_s:.0f} s", part.left_out])) for part in parts]
    minutes = sum(part.expected_s / part.beside for part in parts if not part.left_out) / 60
    return "\n".join([*lines, f"about {minutes:.0f} minutes for all; what there is no time for waits for another call"])


@contextmanager
def alone(results: Path) -> Iterator[None]:
    """Measure while nobody else does: two leases would spoil each other's speeds.

    Raises:
        BadInputError: another lease writes these results.
    """
    with results.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInputError(f"Another lease is at work on {results}: wait for its end, or end it.") from None
        yield


@refused_in_one_sentence()
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the parts at work are ended, too
    parser = OneSentenceParser(prog="python -m bench.lease", description=__doc__)
    parser.add_argument("--minutes", type=float, default=11.0, help="for all, from the start of this command")
    parser.add_argument("--card", help="refuse to measure on another; with --list, plan for it")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the results; lease where it is left out")
    parser.add_argument("--only", metavar="WORDS", help="parts whose names have these words")
    parser.add_argument("--rehearse", action="store_true", help="every part on a CPU, with tiny models")
    parser.add_argument("--list", action="store_true", help="say the parts, and run none")
    parser.add_argument("--merge", action="store_true", help="put results into bench's files, and run nothing")
    options = parser.parse_args(arguments)
    if not options.minutes * 60 > END_S:
        raise BadInputError(f"--minutes is {options.minutes:g}, in which no part would end: pass more, such as 11.")
    if options.merge:
        merge(options.folder / RESULTS)
        return
    if options.rehearse:
        card = None
    elif options.list and options.card:
        card = find_gpu(options.card)
    else:
        card = card_here(options.card)
    parts = [part for part in parts_for(card) if (options.only or "") in part.name]
    if not parts:
        raise BadInputError(f"--only is {options.only!r}, but no part's name has it: --list says them.")
    if options.list:
        print(listed(parts))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    results = Results(options.folder / RESULTS, card.name if card else REHEARSED)
    try:
        with alone(results.path):
            since_start_s = time.time() - psutil.Process().create_time()  # importing libraries takes seconds
            spend(parts, results, 60 * options.minutes - since_start_s)
    except KeyboardInterrupt:
        print(f"error: interrupted; {results.path} has what was measured until then.", file=sys.stderr)
        sys.exit(INTERRUPTED_EXIT_CODE)
    counts = Counter(line["status"] for line in results.of_this_card())
    print(f"in all {', '.join(f'{count} {status}' for status, count in counts.items())}: {results.path}")
    sys.exit(int(counts["failed"] > 0))


if __name__ == "__main__":
    main()
