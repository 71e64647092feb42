"""The results page: one HTML file of all runs, which needs no network and no server."""

import base64
import hashlib
import json
import os
import re
import sys
import webbrowser
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from bench.page.runs import (
    COLUMNS,
    USUAL,
    Compared,
    Values,
    comparable,
    compared_phases,
    divided,
    label_of,
    memory_points,
    pareto_front,
)
from common.base.paths import REPOSITORY
from common.planning.phases import PHASES
from common.records.store import REAL, Record, kept_records, records_in
from common.reporting.rows import result_files

PAGE = REPOSITORY / "docs" / "results.html"  # the page of the kept records
OWN_PAGE = REPOSITORY / "results.html"  # the page of the kept records and of this machine's runs
CHOSEN_AT_FIRST = ("2.1 python-batch16-seed42", "2.4 python-batch16-seed42")
HERE = Path(__file__).parent
RUNS_TOGETHER = 100  # runs whose details are loaded at once
# Of details that stand in the page itself; where there are more, they stand in files beside it
MOST_BYTES_WITHIN = 2_000_000
DETAILS_FOLDER = "results_details"
PLACE = re.compile("@@([A-Z]+)@@")
POINT_SIZE, HEIGHT = 90, 300
COSTS = {"minutes": "Training (minutes)", "peak_mib": "Tensors in training (MiB)"}
# What the page calls its data: a row for each run, each loss of a chosen run, each planned and measured peak
RUNS, LOSSES, MEMORY = (alt.NamedData(name=name) for name in ("runs", "losses", "memory"))


@dataclass(frozen=True)
class _Run:
    """What is kept of a record while a page is made: of 10,000 the whole ones would take a gigabyte."""

    values: Values
    details: str
    peaks: list[Compared]
    started_at: str


def _by_label(records: Iterable[Record]) -> dict[str, _Run]:
    runs = {}
    for record in (each for each in records if each["status"] == "completed"):
        values, details = divided(record)
        peaks = list(compared_phases(record))
        runs[label_of(record)] = _Run(values, json_in_html(details), peaks, record["started_at"])
    return runs


def _as_lists(rows: list[Values], numbers: dict[str, int]) -> dict[str, Any]:
    """Return rows as lists of values; of a text, a list with its number in `numbers`, which gets those it lacks."""

    def number_of(value: object) -> object:
        return [numbers.setdefault(value, len(numbers))] if isinstance(value, str) else value

    keys = list(rows[0]) if rows else []
    return {"keys": keys, "rows": [[number_of(row[key]) for key in keys] for row in rows]}


def page_of(kept: Iterable[Record], own: Iterable[Record] = ()) -> str:
    """Return the page of all completed runs; one of this machine stands for the kept record of the same run."""
    return page_and_details(kept, own)[0]


def page_and_details(kept: Iterable[Record], own: Iterable[Record] = ()) -> tuple[str, list[str]]:
    """Return the page, and the scripts with the runs' details beside it, which few runs do not need."""
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
    digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in (library, script))
    parts = {
        "WHERE": ", or is the newest of its name on this machine" if has_own else "",
        "SCRIPTS": " ".join(f"'sha256-{digest}'" for digest in digests),
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


def write_page(page: Path, kept: Iterable[Record], own: Iterable[Record] = ()) -> None:
    """Write the page of `page_and_details`, with its scripts."""
    text, details = page_and_details(kept, own)
    page.write_text(text, encoding="utf-8")
    folder = page.with_name(DETAILS_FOLDER)
    for number, script in enumerate(details):
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.js").write_text(script, encoding="utf-8")


def kept_on_page() -> list[Record]:
    """Return the kept records that the page shows: those of the run folders, and of the real model."""
    return kept_records() + kept_records(REAL)


def open_page() -> str:
    """Write the page of kept records and this machine's runs, open it where there is a screen, and say where it is."""
    write_page(OWN_PAGE, kept_on_page(), map(itemgetter(1), records_in(result_files())))
    has_screen = sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
    is_open = has_screen and webbrowser.open(OWN_PAGE.as_uri())
    return f"{'Opened' if is_open else 'Open it in a browser:'} {OWN_PAGE}"


def charts(runs: list[Values], memory: list[Values]) -> dict[str, Any]:
    """Return each chart's Vega-Lite specification by its place on the page; `memory`: of `memory_points`."""
    by_place = {
        "quality-time": quality_against(runs, "minutes"),
        "quality-memory": quality_against(runs, "peak_mib"),
        "losses": loss_curves(),
        "memory": planned_against_measured(memory),
    }
    fit = alt.AutoSizeParams(type="fit", contains="padding")
    return {
        place: chart.properties(width="container", height=HEIGHT, autosize=fit).to_dict()
        for place, chart in by_place.items()
    }


def quality_against(runs: list[Values], cost: str) -> alt.LayerChart:
    """Return the runs of the chosen group by cost and quality, with the front that no other run beats."""
    names = sorted(run["group"] for run in comparable(runs, cost))
    groups = [group for group, _ in Counter(names).most_common()]
    choice = alt.binding_select(options=groups, name="Runs of ")
    group = alt.param(name="group", value=groups[0] if groups else "", bind=choice)
    in_group = alt.datum.group == group
    dots = (
        alt.Chart(RUNS)
        .mark_point(filled=True, size=POINT_SIZE, opacity=0.8)
        .encode(
            x=alt.X(f"{cost}:Q", title=COSTS[cost], scale=alt.Scale(zero=False)),
            y=alt.Y("quality:Q", title="Quality after training", scale=alt.Scale(zero=False)),
            color=alt.Color("technique:N", title=None, legend=alt.Legend(orient="top")),
            shape=alt.Shape("parallel:N", title=None, legend=alt.Legend(orient="top", columns=4)),
            tooltip=[alt.Tooltip(f"{key}:N") for key in ("run", "metric", "quality", "minutes", "peak_mib", "device")],
        )
        .transform_filter(in_group)
        .transform_filter(f"datum.{cost} > 0 && datum.quality !== null && !datum.is_trial")  # as `comparable`
    )
    front = (
        alt.Chart(alt.Data(values=pareto_front(runs, cost)))
        .mark_line(interpolate="step-after", strokeDash=[4, 3], color="gray")
        .encode(x="cost:Q", y="quality:Q")
        .transform_filter(in_group)
    )
    return (front + dots).add_params(group)


def loss_curves() -> alt.LayerChart:
    """Return the losses of the chosen runs, laid over each other."""
    curves = alt.Chart(LOSSES).encode(
        x=alt.X("step:Q", title="Optimizer step"),
        y=alt.Y("loss:Q", title="Loss", scale=alt.Scale(type="log")),
        color=alt.Color("run:N", title=None, legend=alt.Legend(orient="top", columns=1, labelLimit=400)),
        tooltip=["run:N", "loss of:N", "step:Q", "loss:Q"],
    )
    legend = alt.Legend(orient="top", symbolType="stroke", symbolStrokeColor="#333", symbolSize=400)
    lines = curves.mark_line().encode(strokeDash=alt.StrokeDash("loss of:N", title=None, legend=legend))
    return lines + curves.mark_point(filled=True, size=20)  # a point of the line itself would hide the legend's strokes


def planned_against_measured(points: list[Values]) -> alt.LayerChart:
    """Return each phase of each device by its planned and measured peak, with the line where both are the same."""
    every_mib = [point[name] for point in points for name in ("planned", "measured")] or [1.0]
    domain = [min(every_mib), max(every_mib)]
    ends = [{"planned": end, "measured": end} for end in domain]
    scale = alt.Scale(type="log", domain=domain)
    line = alt.Chart(alt.Data(values=ends)).mark_line(color="gray", strokeDash=[4, 3])
    dots = (
        alt.Chart(MEMORY)
        .mark_point(size=POINT_SIZE / 2)
        .encode(
            color=alt.Color("phase:N", title=None, sort=list(PHASES), legend=alt.Legend(orient="top", columns=4)),
            tooltip=["run:N", "phase:N", "planned:Q", "measured:Q", "peaks:Q"],
        )
    )
    return (line + dots).encode(
        x=alt.X("planned:Q", title="Planned (MiB)", scale=scale),
        y=alt.Y("measured:Q", title="Measured (MiB)", scale=scale),
    )


def json_in_html(value: object) -> str:
    """Return a value, of finite numbers, as JSON for a `<script>` element: no text in it ends that element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
