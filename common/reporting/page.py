"""The results page: one HTML file of all runs, which needs no network and no server."""

import base64
import hashlib
import os
import re
import sys
import webbrowser
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import vl_convert

from common.base.inert import json_in_html
from common.base.paths import REPOSITORY
from common.records.store import Record, kept_files, records_in
from common.reporting.page_charts import charts
from common.reporting.page_runs import (
    COLUMNS,
    USUAL,
    Values,
    divided,
    label_of,
    memory_points,
    planned_and_measured,
)
from common.reporting.rows import is_comparable, result_files

PAGE = REPOSITORY / "docs" / "results.html"
"""The page of the kept records."""
OWN_PAGE = REPOSITORY / "results.html"
"""The page of the kept records and of this machine's runs."""
CHOSEN_AT_FIRST = ("2.1 python-batch16-seed42", "2.4 python-batch16-seed42")
HERE = Path(__file__).parent
RUNS_TOGETHER = 100
"""Runs whose details are loaded at once."""
MOST_BYTES_WITHIN = 2_000_000
"""Of details that stand in the page itself; where there are more, they stand in files beside it."""
DETAILS_FOLDER = "results_details"
PLACE = re.compile("@@([A-Z]+)@@")


@dataclass(frozen=True)
class _Run:
    """What is kept of a record while a page is made: of 10,000 the whole ones would take a gigabyte."""

    values: Values
    details: str
    peaks: list[tuple[str, str, float, float]]
    started_at: str


def _by_label(records: Iterable[Record]) -> dict[str, _Run]:
    runs = {}
    for record in filter(is_comparable, records):
        values, details = divided(record)
        peaks = list(planned_and_measured(record))
        runs[label_of(record)] = _Run(values, json_in_html(details), peaks, record["started_at"])
    return runs


def _as_lists(rows: list[Values], numbers: dict[str, int]) -> dict[str, Any]:
    """Return rows as lists of their values without the keys; of a text there is a list with its number.

    So each text stands in the page once; `numbers` gets those that it lacks.
    """

    def number_of(value: object) -> object:
        return [numbers.setdefault(value, len(numbers))] if isinstance(value, str) else value

    keys = list(rows[0]) if rows else []
    return {"keys": keys, "rows": [[number_of(row[key]) for key in keys] for row in rows]}


def page_of(kept: Iterable[Record], own: Iterable[Record] = ()) -> str:
    """Return the page of all completed runs; one of this machine stands for the kept record of the same run."""
    return page_and_details(kept, own)[0]


def page_and_details(kept: Iterable[Record], own: Iterable[Record] = ()) -> tuple[str, list[str]]:
    """Return the page, and the scripts with the runs' details that stand beside it; few runs need none.

    The records are read one by one.
    """
    own_runs = _by_label(own)
    by_label = _by_label(kept) | own_runs
    runs = [by_label[label] for label in sorted(by_label)]
    newest = sorted(own_runs, key=lambda label: own_runs[label].started_at)
    values = [run.values for run in runs]
    details = [
        f"[{','.join(run.details for run in runs[first : first + RUNS_TOGETHER])}]"
        for first in range(0, len(runs), RUNS_TOGETHER)
    ]
    is_within = sum(map(len, details)) <= MOST_BYTES_WITHIN
    memory = memory_points(chain.from_iterable(run.peaks for run in runs))
    texts: dict[str, int] = {}
    data = {
        "columns": COLUMNS,
        "runs": _as_lists(values, texts),
        "memory": _as_lists(memory, texts),
        "texts": list(texts),
        "charts": charts(values, memory),
        "chosen": newest[-2:] or [label for label in CHOSEN_AT_FIRST if label in by_label],
        "usual": USUAL,
        "together": RUNS_TOGETHER,
        "folder": DETAILS_FOLDER,
    }
    within = f',"details":[{",".join(details)}]' if is_within else ""
    text = _filled(json_in_html(data)[:-1] + within + "}", has_own=bool(own_runs))
    return text, [] if is_within else [f"details({number},{each});\n" for number, each in enumerate(details)]


def _filled(data: str, has_own: bool) -> str:
    """Return the template with everything in its place; only its two scripts run, and what these load."""
    library = _library()
    script = (HERE / "page.js").read_text(encoding="utf-8")
    parts = {
        "WHERE": ", or is the newest of its name on this machine" if has_own else "",
        "SCRIPTS": " ".join(f"'sha256-{_digest(each)}'" for each in (library, script)),
        "LIBRARY": library,
        "DATA": data,
        "SCRIPT": script,
    }
    # in one pass, so that no record's text is taken for a place
    return PLACE.sub(lambda place: parts[place[1]], (HERE / "page.html").read_text(encoding="utf-8"))


@cache
def _library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed, with the ends of lines of which a browser takes the digest."""
    return vl_convert.javascript_bundle().replace("\r\n", "\n")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _write(page: Path, kept: Iterable[Record], own: Iterable[Record] = ()) -> None:
    text, details = page_and_details(kept, own)
    page.write_text(text, encoding="utf-8")
    folder = page.with_name(DETAILS_FOLDER)
    for number, script in enumerate(details):
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.js").write_text(script, encoding="utf-8")


def write_page(kept: Iterable[Record]) -> Path:
    """Write the page of the kept records, and return its path."""
    _write(PAGE, kept)
    return PAGE.relative_to(REPOSITORY)


def open_page() -> str:
    """Write the page of the kept records and this machine's runs, open it where there is a screen, and say where it is.

    Without a screen a browser for terminals would open, which shows none of it.
    """
    kept, own = (map(itemgetter(1), records_in(files)) for files in (kept_files(), result_files()))
    _write(OWN_PAGE, kept, own)
    has_screen = sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
    is_open = has_screen and webbrowser.open(OWN_PAGE.as_uri())
    return f"{'Opened' if is_open else 'Open it in a browser:'} {OWN_PAGE}"
