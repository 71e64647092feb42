"""What pictures of a run show: the figures of its record."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.axes import Axes

from common.base.paths import REPOSITORY
from common.reporting.plots import plot_memory


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    yield
    plt.close("all")


def bars_of(axes: Axes) -> dict[str, list[float]]:
    """Return the bars' lengths by what the legend calls them."""
    return {bars.get_label(): list(bars.datavalues) for bars in axes.containers}


def device(rank: int, planned: dict[str, float], measured: dict[str, float]) -> dict[str, object]:
    by_phase = {"planned_gib_by_phase": planned, "peak_gib_by_phase": measured}
    return {"rank": rank, "device": f"cuda:{rank}", "total_gib": 47.4, **by_phase}


def test_each_devices_peaks_stand_beside_their_plan() -> None:
    first = device(0, {"loading": 10.0, "training": 20.0}, {"training": 21.0, "merging": 12.0})
    second = device(1, {"loading": 11.0, "training": 22.0}, {"training": 23.0})
    panels = plot_memory({"memory": [first, second]}).axes
    assert [axes.get_title() for axes in panels] == ["rank 0: cuda:0, 47.4 GiB", "rank 1: cuda:1, 47.4 GiB"]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["loading", "training", "merging"]
    assert bars_of(panels[0]) == {"planned": [10.0, 20.0, 0.0], "measured": [0.0, 21.0, 12.0]}
    assert bars_of(panels[1]) == {"planned": [11.0, 22.0, 0.0], "measured": [0.0, 23.0, 0.0]}
    assert [text.get_text().strip() for text in panels[1].texts] == ["11", "22", "", "", "23", ""]


def test_small_peaks_are_in_mib_and_a_plan_may_be_missing() -> None:
    (axes,) = plot_memory({"memory": [device(0, {}, {"training": 0.25})]}).axes
    assert bars_of(axes) == {"planned": [0.0], "measured": [256.0]}
    assert axes.get_xlabel().endswith("(MiB)")


def test_each_device_map_has_a_bar_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "2.5_full_finetuning_with_mp" / "run_0_cpu_x1")
    plot_placement = importlib.import_module("my_utils_full_finetuning_with_mp").plot_placement
    table = pd.DataFrame({"Device map": ["auto", "even"], "Peak per device (GiB)": ["9.5 / 18.0", "14.5 / 14.0"]})
    figure = plot_placement(table)
    assert bars_of(figure.axes[0]) == {"auto": [9.5, 18.0], "even": [14.5, 14.0]}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["auto", "even"]


def test_given_answers_are_counted_by_how_likely_they_were_and_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "3.4_preference_tuning" / "run_0_cpu_x1")
    draw_log_probs = importlib.import_module("my_utils_preference_tuning").draw_log_probs
    log = SimpleNamespace(rank=SimpleNamespace(is_main=True), folder=tmp_path)
    before, after = (SimpleNamespace(log_probs=pairs) for pairs in ([(-1, -5), (-1, -6)], [(-0.1, -15), (-0.2, -20)]))
    chosen, rejected = draw_log_probs(log, before, after).axes
    heights = [[list(bars.datavalues) for bars in axes.containers] for axes in (chosen, rejected)]  # before, after
    assert [[sum(counts) for counts in of_answer] for of_answer in heights] == [[2, 2], [2, 2]]
    assert heights[0][0][0] == 2  # equally likely before, and the least likely of the chosen ones
    assert [heights[1][0][-1], heights[1][1][0]] == [1, 1]  # a rejected one was the likeliest, one is the least likely
    assert (tmp_path / "log_probs.png").exists()
