"""Records to tables. No figure of a table is typed by hand.

    python -m common.report               the tables, from the committed records
    python -m common.report --check       exit 1 where a README disagrees with the records
    python -m common.report --write       write the tables into the READMEs, between their markers
    python -m common.report --results     what the last runs on this machine wrote, side by side

Every row is `measured` (from a committed record), `published` (with its source), `projected` or `not run`.
"""

import argparse
import json
import sys

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.specs import TASKS
from common.records.store import kept_records
from common.reporting import classification, loops
from common.reporting.rows import (
    results_of_this_machine,
    task_of,
)
from common.reporting.tables import (
    LEGEND,
    TABLES,
    readmes,
    rendered,
    side_by_side,
    with_tables,
)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Tables of the records.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="exit 1 where a README disagrees with the records")
    mode.add_argument("--write", action="store_true", help="write the tables into the READMEs")
    mode.add_argument("--results", action="store_true", help="the last runs of this machine, side by side")
    parser.add_argument("--json", action="store_true", help="print tables as JSON")
    options = parser.parse_args()
    try:
        sys.exit(_run(options))
    except BadInputError as mistake:
        parser.exit(2, f"error: {mistake}\n")


def _run(options: argparse.Namespace) -> int:
    if options.results:
        found = results_of_this_machine()
        table = side_by_side([record for record in found if TASKS[task_of(record)].chats])
        if not found:
            raise BadInputError("There is no result on this machine yet: `make demo` makes some.")
        text = table.to_markdown(tablefmt="simple", disable_numparse=True) + "\n\n" + LEGEND
        print(table.to_json(indent=2) if options.json else text)
        if classification.by_setting(found) and not options.json:
            print(f"\nText classification (3.1)\n\n{classification.results_text(found)}")
        if loops.of_no_link(found) and not options.json:
            print(f"\nSummarization (3.2)\n\n{loops.results_text(found)}")
        return 0
    records = kept_records()
    if not options.check and not options.write:
        tables = {name: TABLES[name](records) for name in TABLES}
        if options.json:
            print(json.dumps({name: table.to_dict("records") for name, table in tables.items()}, indent=2))
        else:
            print("\n".join(f"{name}\n\n{rendered(name, records)}" for name in tables))
        return 0
    stale = [
        path for path in readmes() if with_tables(path.read_text(encoding="utf-8"), records) != path.read_text("utf-8")
    ]
    for path in stale:
        if options.write:
            path.write_text(with_tables(path.read_text(encoding="utf-8"), records), encoding="utf-8")
        print(
            f"{'wrote' if options.write else 'out of date (`make tables` renders it)'}: {path.relative_to(REPOSITORY)}"
        )
    return int(options.check and bool(stale))


if __name__ == "__main__":
    main()
