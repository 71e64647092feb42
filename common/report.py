"""Render records as tables. No value in a table is typed by hand.

    python -m common.report               the tables, from the committed records
    python -m common.report --check       exit 1 where a README disagrees with the records
    python -m common.report --write       write the tables into the READMEs, between their markers
    python -m common.report --results     what the last runs on this machine wrote, side by side

Every row is `measured` (from a committed record), `published` (with its source), `projected` or `not run`.
"""

import json
import sys

from common.base.command_line import refused_in_one_sentence
from common.base.errors import BadInputError
from common.base.parsing import OneSentenceParser
from common.base.paths import REPOSITORY
from common.base.specs import TASKS
from common.records.store import kept_records
from common.reporting import classification, summarization
from common.reporting.rows import results_of_this_machine, task_of
from common.reporting.tables import LEGEND, TABLES, readmes, rendered, side_by_side, with_tables


@refused_in_one_sentence()
def main() -> None:
    """Run the command line."""
    parser = OneSentenceParser(description="Render the records as tables.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="exit 1 where a README disagrees with the records")
    mode.add_argument("--write", action="store_true", help="write the tables into the READMEs")
    mode.add_argument("--results", action="store_true", help="the last runs of this machine, side by side")
    parser.add_argument("--json", action="store_true", help="print tables as JSON")
    options = parser.parse_args()
    if options.check or options.write:
        sys.exit(_render_readmes(options.write))
    print(_results(options.json) if options.results else _all_tables(options.json))


def _render_readmes(write: bool) -> int:
    """Name the READMEs that disagree with the records, or write them; return the exit code."""
    records = kept_records()
    stale = [
        path for path in readmes() if with_tables(path.read_text(encoding="utf-8"), records) != path.read_text("utf-8")
    ]
    for path in stale:
        if write:
            path.write_text(with_tables(path.read_text(encoding="utf-8"), records), encoding="utf-8")
        print(f"{'wrote' if write else 'out of date (`make tables` renders it)'}: {path.relative_to(REPOSITORY)}")
    return int(bool(stale) and not write)


def _results(as_json: bool) -> str:
    found = results_of_this_machine()
    if not found:
        raise BadInputError("There is no result on this machine yet: `make demo` makes some.")
    table = side_by_side([record for record in found if TASKS[task_of(record)].chats])
    if as_json:
        return table.to_json(indent=2)
    parts = [table.to_markdown(tablefmt="simple", disable_numparse=True), LEGEND]
    if classification.settings_of(found):
        parts += ["Text classification (3.1)", classification.results_text(found)]
    if summarization.summarized(found):
        parts += ["Summarization (3.2)", summarization.results_text(found)]
    return "\n\n".join(parts)


def _all_tables(as_json: bool) -> str:
    records = kept_records()
    if as_json:
        return json.dumps({name: table(records).to_dict("records") for name, table in TABLES.items()}, indent=2)
    return "\n".join(f"{name}\n\n{rendered(name, records)}" for name in TABLES)


if __name__ == "__main__":
    main()
