"""The charts of the results page, as Vega-Lite specifications that Altair writes; the page gives them their data."""

from collections import Counter
from typing import Any

import altair as alt

from common.planning.phases import PHASES
from common.reporting.page_runs import Values, comparable, pareto_front

POINT_SIZE, HEIGHT = 90, 300
COSTS = {"minutes": "Training (minutes)", "peak_gib": "Tensors in training (GiB)"}
RUNS, LOSSES, MEMORY = (alt.NamedData(name=name) for name in ("runs", "losses", "memory"))
"""What the page calls its data: a row for each run, each loss of a chosen run, each planned and measured peak."""


def charts(runs: list[Values], memory: list[Values]) -> dict[str, Any]:
    """Return each chart's specification by the place where it stands on the page.

    `memory` has the points of `memory_points`.
    """
    by_place = {
        "quality-time": quality_against(runs, "minutes"),
        "quality-memory": quality_against(runs, "peak_gib"),
        "losses": loss_curves(),
        "memory": planned_against_measured(memory),
    }
    return {place: _sized(chart).to_dict() for place, chart in by_place.items()}


def _sized(chart: alt.TopLevelMixin) -> alt.TopLevelMixin:
    return chart.properties(
        width="container", height=HEIGHT, autosize=alt.AutoSizeParams(type="fit", contains="padding")
    )


def quality_against(runs: list[Values], cost: str) -> alt.LayerChart:
    """Return the runs of the chosen group by cost and quality, with the front that no other run beats."""
    groups = [group for group, _ in sorted(Counter(run["group"] for run in comparable(runs, cost)).items(),
                                           key=lambda counted: (-counted[1], counted[0]))]  # fmt: skip
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
            tooltip=[
                alt.Tooltip(f"{name}:N") for name in ("run", "metric", "quality", "minutes", "peak_gib", "device")
            ],
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


def loss_curves() -> alt.Chart:
    """Return the losses of the chosen runs, laid over each other."""
    return (
        alt.Chart(LOSSES)
        .mark_line(point=alt.OverlayMarkDef(size=20))
        .encode(
            x=alt.X("step:Q", title="Optimizer step"),
            y=alt.Y("loss:Q", title="Loss", scale=alt.Scale(type="log")),
            color=alt.Color("run:N", title=None, legend=alt.Legend(orient="top", columns=1, labelLimit=400)),
            strokeDash=alt.StrokeDash(
                "loss of:N", title=None, legend=alt.Legend(orient="top", symbolType="stroke", symbolStrokeColor="#333")
            ),
            tooltip=["run:N", "loss of:N", "step:Q", "loss:Q"],
        )
    )


def planned_against_measured(points: list[Values]) -> alt.LayerChart:
    """Return each phase of each device by its planned and measured peak, with the line where both are the same."""
    every_gib = [point[name] for point in points for name in ("planned", "measured")] or [1.0]
    domain = [min(every_gib), max(every_gib)]
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
        x=alt.X("planned:Q", title="Planned (GiB)", scale=scale),
        y=alt.Y("measured:Q", title="Measured (GiB)", scale=scale),
    )
