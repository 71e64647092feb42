"""Render records as tables. No value in a table is typed by hand.

    python -m common.report               the tables, from the committed records
    python -m common.report --check       exit 1 where a page disagrees with the records
    python -m common.report --write       write the tables into the pages, between their markers
    python -m common.report --page        write the results page of the records, docs/results.html
    python -m common.report --open        open a page of the records and of this machine's runs
    python -m common.report --results     what the last runs on this machine wrote, side by side
    python -m common.report --results 2.1 'torchrun-*'    of runs, run folders or techniques with these names

Every row is `measured` (from a committed record), `published` (with its source), `projected` or `not run`.
"""

import argparse
import json
import sys

from bench.page.page import PAGE, kept_on_page, open_page, page_of, write_page
from bench.tables import pages
from common.base.command_line import refused_in_one_sentence
from common.base.errors import BadInputError
from common.base.inert import printable
from common.base.parsing import OneSentenceParser
from common.base.paths import REPOSITORY
from common.base.specs import TASKS
from common.records.store import STUDY, kept_files, kept_records
from common.reporting.rows import called, own_table, results_of_this_machine, task_of
from common.reporting.tables import side_by_side

LEGEND = """\
similarity score: a distance between answer and reference, lower is better; judged by the base model
by MiniLM: the same by a sentence encoder that had no part in the training
shuffled: the score of the right answers to other questions: a score near it says nothing of the content
fact recall: share of the facts asked for that stand in the answers
speed-up: training time of the one-device run (2.1, 2.4) over this run's
upper bound: the speed-up of the same ranks without gradient synchronization, measured for seconds: a run may exceed it
memory: on CPU the resident memory of the process, most of it Python and PyTorch
weights that a step changes: the other updates are too small for the precision, and round away
More words: docs/glossary.md; details: the folders' readmes."""


@refused_in_one_sentence()
def main() -> None:
    """Run the command line."""
    parser = OneSentenceParser(description="Render the records as tables.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="exit 1 where a page disagrees with the records")
    mode.add_argument("--write", action="store_true", help="write the tables into the pages")
    mode.add_argument("--page", action="store_true", help="write docs/results.html, the page of all kept records")
    mode.add_argument("--open", action="store_true", help="open a page of these and of this machine's last runs")
    mode.add_argument(
        "--results", nargs="*", metavar="NAME",
        help="the last runs of this machine, side by side: all that completed, or those of runs, run folders or "
        "techniques with these names (also patterns)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print tables as JSON")
    options = parser.parse_args()
    if options.page:
        write_page(PAGE, kept_on_page())
        print(f"wrote {PAGE.relative_to(REPOSITORY)}")
    elif options.open:
        print(open_page())
    elif options.check or options.write:
        sys.exit(_render_pages(options.write))
    else:
        print(printable(_all_tables(options.json) if options.results is None else _results(options)))


def _render_pages(write: bool) -> int:
    """Name the pages that disagree with the records, or write them; return the exit code: 1 if one cannot be read."""
    records = kept_records()
    all_are_read = [len(records), len(kept_records(STUDY))] == [len(kept_files()), len(kept_files(STUDY))]
    made = {path: pages.with_tables(path.read_text(encoding="utf-8"), records) for path in pages.readmes()}
    made[PAGE] = page_of(kept_on_page())
    stale = [path for path, text in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if write and path == PAGE:
            write_page(PAGE, kept_on_page())
        elif write:
            path.write_text(made[path], encoding="utf-8")
        print(f"{'wrote' if write else 'out of date (`make tables` renders it)'}: {path.relative_to(REPOSITORY)}")
    return int(not write and (bool(stale) or not all_are_read))


def _results(options: argparse.Namespace) -> str:
    found = results_of_this_machine()
    if not found:
        raise BadInputError("There is no result on this machine yet: `make demo` makes some.")
    if options.results:
        found = called(found, options.results)
    shown = [run for run in found if run["status"] == "completed" or options.results]
    in_common = [run for run in shown if not TASKS[task_of(run)].reporting]
    if options.json:
        return json.dumps(side_by_side(in_common).to_dict(), indent=2)
    hidden = len(found) - len(shown)
    parts = [f"{hidden} runs that did not complete are hidden: name them, or '*' for all"] if hidden else []
    if in_common:
        parts += [pages.on_screen(side_by_side(in_common)), LEGEND]
    done = {task_of(run) for run in shown if run["status"] == "completed"}
    for name, task in TASKS.items():
        if task.reporting and name in done:
            parts += [task.title, own_table(task).text(shown)]
    parts += [f"{run['run_name']}: {run['status']} ({run.get('error', '')[:60]})" for run in shown
              if run["status"] != "completed" and run not in in_common]  # fmt: skip
    return "\n\n".join(parts)


def _all_tables(as_json: bool) -> str:
    records = kept_records()
    if as_json:
        return json.dumps({name: table(records).to_dict("records") for name, table in pages.TABLES.items()}, indent=2)
    return "\n".join(f"{name}\n\n{pages.rendered(name, records)}" for name in pages.TABLES)
