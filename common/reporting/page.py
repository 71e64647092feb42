"""The results page: one HTML file of all runs, which needs no network and no server."""

import json
import os
import sys
import webbrowser
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import vl_convert

from common.base.paths import REPOSITORY
from common.records.store import Record, kept_records
from common.reporting.page_charts import charts
from common.reporting.page_runs import COLUMNS, label_of, losses_of, planned_and_measured, values_of
from common.reporting.rows import results_of_this_machine

PAGE = REPOSITORY / "docs" / "results.html"
"""The page of the kept records."""
OWN_PAGE = REPOSITORY / "results.html"
"""The page of the kept records and of this machine's runs."""
CHOSEN_AT_FIRST = ("2.1 python-batch16-seed42", "2.4 python-batch16-seed42")
HERE = Path(__file__).parent


def page_of(kept: Iterable[Record], own: Iterable[Record] = ()) -> str:
    """Return the page of all completed runs; one of this machine stands for the kept record of the same run."""
    own_runs = {label_of(record): record for record in own if record["status"] == "completed"}
    by_label = {label_of(record): record for record in kept if record["status"] == "completed"} | own_runs
    records = [by_label[label] for label in sorted(by_label)]
    runs = [values_of(record) for record in records]
    newest = sorted(own_runs, key=lambda label: own_runs[label]["started_at"])
    chosen = newest[-2:] or [label for label in CHOSEN_AT_FIRST if label in by_label]
    losses = [loss for record in records for loss in losses_of(record)]
    memory = list(planned_and_measured(records))
    data = {
        "columns": [asdict(column) for column in COLUMNS],
        "runs": runs,
        "charts": charts(runs, losses, memory, chosen),
        "chosen": chosen,
    }
    parts = {
        "@@WHERE@@": ", or is the newest of its name on this machine" if own_runs else "",
        "@@LIBRARY@@": vl_convert.javascript_bundle(),
        "@@SCRIPT@@": (HERE / "page.js").read_text(encoding="utf-8"),
        "@@DATA@@": json.dumps(data, allow_nan=False).replace("</", "<\\/"),  # else a text could end the element
    }
    page = (HERE / "page.html").read_text(encoding="utf-8")
    for place, content in parts.items():
        page = page.replace(place, content)
    return page


def write_page() -> Path:
    """Write the page of the kept records, and return its path."""
    PAGE.write_text(page_of(kept_records()), encoding="utf-8")
    return PAGE.relative_to(REPOSITORY)


def open_page() -> str:
    """Write the page of the kept records and this machine's runs, open it where there is a screen, and say where it is.

    Without a screen a browser for terminals would open, which shows none of it.
    """
    OWN_PAGE.write_text(page_of(kept_records(), results_of_this_machine()), encoding="utf-8")
    has_screen = sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
    is_open = has_screen and webbrowser.open(OWN_PAGE.as_uri())
    return f"{'Opened' if is_open else 'Open it in a browser:'} {OWN_PAGE}"
