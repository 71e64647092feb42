"""Runs side by side: in which settings they differ, how good, fast and large they are, and their losses by step."""

import json
import os
from collections.abc import Iterable, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from common.base.command_line import refused_in_one_sentence
from common.base.errors import BadInputError
from common.base.inert import printable
from common.base.parsing import OneSentenceParser
from common.base.paths import REPOSITORY, command_here
from common.base.run_config import DEFAULTS
from common.records.store import RECORD_NAME, Record, kept_files, records_in
from common.reporting.columns import NO_BASELINE, OFF, Column, column
from common.reporting.layout import fitted, screen_width
from common.reporting.rows import (
    NAMING,
    Metric,
    Row,
    called,
    clock,
    first_device,
    metrics_of,
    result_files,
    settings_of,
    step_s,
    task_of,
)

PICTURE_NAME = "compare.png"


def _most(run: Record, name: str) -> float | None:
    return max((entry[name] for entry in run["memory"] if entry.get(name) is not None), default=None)


QUALITY = (
    Column("best validation accuracy (higher is better)", "best_accuracy", "{:.4f}"),
    "loss as lowest validation loss (lower is better)",
)
TIME = (
    Column("status", "status"),
    "steps as optimizer steps",
    Column("rows per step", "effective_batch_size"),
    "whole_time as training time",
    "reporting as of that, validation and checkpoints",
    Column("step (s)", step_s, "{:.3f}"),
    "tokens_per_s as tokens per second",
    Column("whole run", lambda run: sum(run["phases_s"].values()), clock),
    Column("bill (USD)", "cost.usd", "{:.2f}"),
)
MEMORY = (
    Column("training's peak, planned (GiB)", partial(_most, name="planned_gib"), "{:.2f}"),
    Column("training's peak, measured (GiB)", partial(_most, name="peak_training_gib"), "{:.2f}"),
    Column(
        "whole run's peak (GiB)", lambda run: _most(run, "peak_allocated_gib") or _most(run, "peak_rss_gib"), "{:.2f}"
    ),
    Column("trained parameters", "trained_parameters", "{:,}"),
)
# Where runs differ in one of these, quality or time cannot be put down to the settings
WHAT_COMPARES = (
    Column("task", task_of),
    Column("data", "config.data"),
    Column(
        "number of test questions",
        lambda run: run["quality"]["after"].get("questions", run["quality"]["after"].get("rows")),
    ),
    "model as model",
    Column("machine", first_device),
    Column("threads of a device", "environment.threads_per_rank"),
    "seed as seed",
)


class Line(NamedTuple):
    """A line of a table: a value for each run (None: it has none), and the cells as they are printed."""

    name: str
    values: list[Any]
    cells: list[str]

    @property
    def differs(self) -> bool:
        """Whether the values of the runs that have one are not all the same."""
        return len({str(value) for value in self.values if value is not None}) > 1


def parts_of(runs: Sequence[Record]) -> dict[str, list[Line]]:
    """Return the lines of each part: the settings in which runs differ, quality, time and memory."""
    metrics = dict.fromkeys(chain.from_iterable(map(metrics_of, runs)))
    packages = {name for run in runs for name in run["environment"]["packages"]}
    settings = [
        Column("run folder", "run_folder"),
        Column("started by", "launcher"),
        *(Column(name, f"meant.{name}") for name in DEFAULTS if name not in NAMING),
        Column("code (commit)", lambda run: run["environment"]["commit"][:8]),
        *(Column(name, f"environment.packages.{name}") for name in sorted(packages)),
    ]
    with_settings = [{**run, "meant": settings_of(run)} for run in runs]
    return {
        "settings": [line for line in lines_of(settings, with_settings) if line.differs],
        "quality": lines_of([*map(_before_and_after, metrics), *QUALITY], runs),
        "time": [line for line in lines_of(TIME, runs) if set(line.values) != {"completed"}],
        "memory": lines_of(MEMORY, runs),
    }


def warning_of(runs: Sequence[Record]) -> str:
    """Return one sentence where quality or time cannot be put down to the settings; empty where they can."""
    lines = lines_of(WHAT_COMPARES, runs)
    other = [f"{line.name} ({' / '.join(dict.fromkeys(line.cells[1:]))})" for line in lines if line.differs]
    return f"These runs do not compare as they are, as they differ in {', in '.join(other)}." if other else ""


def lines_of(columns: Iterable[str | Column], runs: Sequence[Row]) -> list[Line]:
    """Return a line with the runs' values for each column; those that no run has are left out."""
    lines = []
    for each in map(column, columns):
        values = [each.value_in(run) for run in runs]
        if any(value not in (None, [None, None]) for value in values):
            cells = ["-" if value is None else each.written(value) for value in values]
            lines.append(Line(each.title, values, [each.title, *cells]))
    return lines


def _before_and_after(metric: Metric) -> Column:
    """Return a metric's column: `0.91 -> 0.35`, without a judge `off -> off`, without a baseline `- -> 0.35`."""

    def value(run: Record) -> list[float | None]:
        before = run["quality"].get("before")
        return [before[metric.name] if before else None, run["quality"]["after"][metric.name]]

    def written(values: list[float | None]) -> str:
        none = OFF if values[-1] is None else NO_BASELINE
        return " -> ".join(none if value is None else metric.shown.format(value) for value in values)

    return Column(f"{metric.label} ({metric.direction} is better)", value, written)


def found_runs(names: Sequence[str], results_root: Path | None = None) -> dict[Path, Record]:
    """Return the runs that `names` name, in their order, each with the file of its record.

    A name is a results folder, a folder with several, the file of a record, the name of a run or of a run folder, or a
    pattern of these. A run's name means those of this machine, and kept records only where it has none.

    Raises:
        BadInputError: nothing has such a name, or there are fewer than two runs.
    """
    found: dict[Path, Record] = {}
    known = cache(partial(_known_records, results_root))  # read once, and only where a name is none of a place
    for name in names:
        if files := _files_at(Path(name).expanduser()):
            found |= dict(records_in(files))
        else:
            chosen = called(list(known().values()), [name])
            found |= {
                file: run for file, run in known().items() if file.name == RECORD_NAME and run["run_name"] == name
            } or {file: run for file, run in known().items() if run in chosen}
    if len(found) < 2:
        raise BadInputError(
            f"{len(found)} run is named ({', '.join(names)}), but two or more are compared: name another, or a pattern "
            f"such as 'python-*' (`{command_here('report')} --results` lists those of this machine)."
        )
    return found


def _files_at(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    own = path / RECORD_NAME
    return [own] if os.path.lexists(own) else result_files(path)


def _known_records(results_root: Path | None) -> dict[Path, Record]:
    """Return the last run of each name here (or in `results_root`), and the kept records of those not here any more."""
    folders = [results_root.expanduser() / "results"] if results_root else []
    here = dict(records_in(result_files(*folders)))
    names = {(run["run_folder"], run["run_name"]) for run in here.values()}
    return here | {
        file: run for file, run in records_in(kept_files()) if (run["run_folder"], run["run_name"]) not in names
    }


def labels_of(runs: Sequence[Record]) -> list[str]:
    """Return a short name for each run: its own, with its technique's number and its start where others share it."""
    labels = [run["run_name"] for run in runs]
    for more in (lambda run: run["run_folder"].partition("_")[0], lambda run: run["started_at"]):
        labels = [
            f"{more(run)} {label}" if labels.count(label) > 1 else label
            for run, label in zip(runs, labels, strict=True)
        ]
    return labels


def text_of(runs: Sequence[Record], picture: Path) -> str:
    """Return the comparison for a terminal: what does not compare first, then tables of at most its width."""
    labels = ["", *labels_of(runs)]
    titles = ("Settings that differ", "Quality, before -> after", "Time", "Memory of the fullest device")
    parts = [
        f"{title}\n{fitted(labels, [line.cells for line in lines])}" if lines else f"{title}: none"
        for title, lines in zip(titles, parts_of(runs).values(), strict=True)
    ]
    return "\n\n".join(filter(None, [fill(warning_of(runs), screen_width()), *parts, f"losses by step: {picture}"]))


def json_of(runs: Sequence[Record], picture: Path) -> str:
    """Return the same as JSON: by name a value for each run, null where it has none."""
    curves = ("training_losses", "validation_losses", "validation_accuracies")
    return json.dumps(
        {
            "warning": warning_of(runs),
            "runs": labels_of(runs),
            **{part: {line.name: line.values for line in found} for part, found in parts_of(runs).items()},
            "curves": {name: [run.get(name) for run in runs] for name in curves},
            "picture": str(picture),
        },
        indent=2,
    )


def default_picture(file: Path, run: Record) -> Path:
    """Return where the picture goes: beside a run's record, of a kept one into its run folder's results."""
    of_run = (REPOSITORY / run["run_folder"]).resolve()
    # a record alone decides about no place
    is_kept = file.name != RECORD_NAME and of_run.is_relative_to(REPOSITORY) and any(of_run.glob("my_workflow_*.py"))
    return (of_run / "results" if is_kept else file.parent) / PICTURE_NAME


@refused_in_one_sentence()
def main() -> None:
    """Run the command line."""
    parser = OneSentenceParser(prog="python -m common.compare", description=__doc__)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN",
        help="a results folder, a folder of several, the file of a record, or the name of a run or run folder (also a "
        "pattern): two runs or more",
    )  # fmt: skip
    parser.add_argument(
        "--results_root", "--results-root", type=Path, metavar="FOLDER",
        help="where runs of these names were told to write, in place of the run folders",
    )  # fmt: skip
    parser.add_argument(
        "--picture", type=Path, help=f"where the curves go; without it, {PICTURE_NAME} beside the first run"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with the curves' points")
    options = parser.parse_args()
    found = found_runs(options.runs, options.results_root)
    runs = list(found.values())
    if options.picture and os.path.lexists(options.picture):
        raise BadInputError(f"--picture is {options.picture}, which exists already: name a new file.")
    picture = options.picture or default_picture(*next(iter(found.items())))
    from bench.curves import plot_curves  # here: a wrong name is refused before matplotlib loads

    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        plot_curves(runs, labels_of(runs)).savefig(picture)
    except (OSError, ValueError) as error:  # the latter of a name that does not end as a picture's
        raise BadInputError(f"--picture is {picture}, which cannot be written ({error}): pass another file.") from None
    print(printable((json_of if options.json else text_of)(runs, picture)))


if __name__ == "__main__":
    main()
