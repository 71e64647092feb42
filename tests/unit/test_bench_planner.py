"""The planner's errors are told as they are: each bar can fail, what was not run says so, points are what they say."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import planner, planner_points
from bench.planner import Compared, error_entries
from bench.planner_points import FULLNESS, SMALL_CARDS, PeakWatch, Point
from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.hardware.devices import GIB, find_gpu
from common.planning.job import BatchShape
from common.planning.published_memory import architectures_of, t4_job
from common.training.placement import place_stages

PEAKS = json.loads(planner.PEAKS_PATH.read_text())
OVER, UNDER = Compared("over", 11, 10), Compared("under", 7, 10)


def test_errors_are_shares_of_what_was_found_and_the_worst_point_is_named() -> None:
    mean, worst = error_entries("x", [OVER, UNDER, Compared("right", 5, 5)])
    assert (mean.name, mean.value) == ("x, 3 points: mean error", pytest.approx(0.4 / 3))
    assert (worst.name, worst.value) == ("x: worst error (under: 7.00 of 10.00 GiB)", pytest.approx(0.3))
    assert (mean.holds, worst.holds) == (None, None)


@pytest.mark.parametrize(
    ("bars", "holds"), [((0.21, 0.31), [True, True]), ((0.19, 0.31), [False, True]), ((0.21, 0.29), [True, False])]
)
def test_each_bar_can_fail(bars: tuple[float, float], holds: list[bool]) -> None:
    assert [entry.holds for entry in error_entries("x", [OVER, UNDER], bars=bars)] == holds


def test_what_was_not_run_says_so(tmp_path: Path) -> None:
    found = planner.gpu_entries(tmp_path / "none.json")
    assert len(found) == 5
    assert all(entry.value is None and entry.name.endswith("not run") for entry in found)
    assert [entry.bar for entry in found[:2]] == [0.03, 0.08]


def measured_record(planned_gib: float, found_gib: float | None, card: str = "a4000") -> dict[str, object]:
    return {
        **vars(Point("full", "llama-3.2-1b", 4, 512, False, card)),
        "planned_gib": planned_gib,
        "planned_with_overhead_gib": planned_gib + 1,
        "capacity_gib": 15.59,
        "dry_run_gib": planned_gib,
        "outcome": "oom" if found_gib is None else "ran",
        "allocated_gib": found_gib,
    }


def test_measured_points_are_compared_and_their_verdicts_judged(tmp_path: Path) -> None:
    path = tmp_path / "points.json"
    path.write_text(json.dumps([measured_record(10, 10.2), measured_record(20, None), measured_record(14.9, 15.1)]))
    mean, worst, *_, verdicts = planner.gpu_entries(path)
    assert mean.value == pytest.approx((0.2 / 10.2 + 0.2 / 15.1) / 2)
    assert "full llama-3.2-1b 4x512 a4000" in worst.name
    assert (mean.holds, worst.holds) == (True, True)
    assert verdicts.value == pytest.approx(2 / 3)  # the last one was said to need 15.9 of 15.59 GiB, and ran
    assert "2 ran, 1 ran out" in verdicts.name


def test_points_in_4_bits_are_enough_planned_and_without_a_dry_run(tmp_path: Path) -> None:
    points = planner_points.qlora_points()
    assert len(set(points)) == len(points) >= 12
    assert {point.model for point in points} >= {"llama-3.1-8b", "llama-3.1-70b"}
    assert {point.run.quantization for point in points} == {"nf4", "nf4-double"}
    gpu = find_gpu("H200 141GB")
    assert sum(point.planned(gpu).peak_gib < gpu.memory_gib for point in points) >= 12
    assert set(points) <= set(planner_points.all_points(gpu))
    path = tmp_path / "points.json"
    measured = {**measured_record(10, 10.5), **vars(points[-1]), "dry_run_gib": None}
    path.write_text(json.dumps([measured]))
    closed, worst, dry, *_ = planner.gpu_entries(path)
    assert closed.value == pytest.approx(0.5 / 10.5)
    assert "nf4-double" in worst.name
    assert dry.value is None


def test_published_peaks_are_whole() -> None:
    assert sum(row["times_measured"] for row in PEAKS["peaks"]) == 69
    assert sum(row["held_out"] for row in PEAKS["peaks"]) == 12
    assert "MIT" in PEAKS["licence"]
    for row in PEAKS["peaks"]:
        assert row["session"] in PEAKS["sessions"]
        assert 0 < row["peak_allocated_gib"] <= row["peak_reserved_gib"] < 14.6  # a T4's
    for model, architecture in architectures_of(PEAKS["models"]).items():
        assert architecture.parameters == PEAKS["models"][model]["parameters"], model


def test_sdpa_peaks_of_a_t4_are_met_and_both_tools_are_shown() -> None:
    found = planner.published_entries(planner.fitcheck_module())
    assert len(found) == 20
    bars = [entry for entry in found if entry.bar is not None]
    assert len(bars) == 4
    assert all("closed form" in entry.name and "sdpa" in entry.name and entry.holds for entry in bars)


def test_without_fitcheck_the_command_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fitcheck", None)
    with pytest.raises(BadInputError, match="pip install fitcheck-llm=="):
        planner.entries(quick=True)


def test_fitcheck_is_asked_for_the_same_step() -> None:
    row = next(row for row in PEAKS["peaks"] if row["held_out"] and "Qwen2.5-7B" in row["model"])
    architecture = architectures_of(PEAKS["models"])[row["model"]]
    # what its authors had it predict for this row: 10,581 MiB
    answer_gib = planner.fitcheck_gib(planner.fitcheck_module(), architecture, t4_job(row))
    assert answer_gib * 1024 == pytest.approx(10_581, abs=1)


def test_the_grid_is_large_and_each_of_its_points_is_a_job() -> None:
    points = planner.dry_run_grid()
    assert len({point.name for point in points}) == len(points) >= 100
    for point in points:
        assert planner.closed_form_gib(point) > 0
    known = [point for point in points if planner.fitcheck_accepts(point)]
    assert len(known) == 24
    assert {point.run.lora_dropout for point in known} == {0.0}
    specials = ("checkpointed", "eager", "padded", "ddp x4", "64 labelled", "fp32", "bart-large-cnn", "linear layers")
    for special in (*specials, "mp x2", "pp x4 1f1b of 4", "gpipe of 4", "17 tiles", "trained tower"):
        assert any(special in point.name for point in points), special
    full = [point for point in points if point.run.technique == "full"]
    every_weight = [point for point in full if point.run.target_modules == "all"]
    assert len(every_weight) > len(full) - len(every_weight) >= 10
    assert not any("linear layers" in point.name for point in every_weight)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"technique": "full", "target_modules": "all"},
        {"technique": "full"},
        {"technique": "full", "parallel": "pp", "devices": 2, "micro_batches": 2, "device": "cuda", "gpu": "a6000"},
    ],
    ids=["lora", "every weight", "linear layers", "pipeline"],
)
def test_closed_form_and_dry_run_are_two_ways_to_one_figure(settings: dict[str, object]) -> None:
    run = RunConfig(model="llama-3.2-1b", precision="bf16", weights="random", **settings)
    point = planner.GridPoint(run, BatchShape(4, 512, 511))
    assert planner.closed_form_gib(point) == pytest.approx(planner.dry_run_gib(point), rel=0.05)


def test_of_divided_layers_the_fullest_device_counts() -> None:
    point = next(point for point in planner.divided_points() if point.run.parallel == "mp")
    peaks = [device.allocated_gib for device in place_stages(point.run, point.batch).plan.devices]
    assert planner.closed_form_gib(point) == max(peaks) > min(peaks)


def test_small_cards_get_points_on_either_side_of_full() -> None:
    for card in SMALL_CARDS:
        gpu, points = find_gpu(card), planner_points.small_card_points(card)
        full = [point.planned(gpu).peak_gib / gpu.memory_gib for point in points]
        assert len(set(points)) == len(FULLNESS)
        assert sum(share <= 1 for share in full) >= 6
        assert sum(share > 1 for share in full) >= 6
        assert full == pytest.approx(FULLNESS, abs=0.06)
    beside_an_l4 = {point.card for point in planner_points.all_points(find_gpu("l4"))}
    assert beside_an_l4 == {"", "a4000"}


def test_full_fine_tuning_is_of_every_weight_but_where_a_point_says_otherwise() -> None:
    points = planner_points.all_points(find_gpu("l4"))
    assert len(set(points)) == len(points)
    full = [point for point in points if point.technique == "full"]
    assert sum(point.linear_only for point in points) == sum(point.linear_only for point in full) == 6
    assert all(point.run.target_modules == ("all-linear" if point.linear_only else "all") for point in full)
    assert {point.run.target_modules for point in points if point.technique == "lora"} == {"all-linear"}
    every, linear = (Point("full", "llama-3.2-1b", 4, 512, False, linear_only=only) for only in (False, True))
    assert linear.planned(find_gpu("l4")).peak_gib < every.planned(find_gpu("l4")).peak_gib


def test_without_a_gpu_one_sentence_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(planner_points, "gpus", lambda: ("", []))
    with pytest.raises(SystemExit) as left:
        planner_points.main([])
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: PyTorch sees no GPU")


@pytest.fixture
def counted_memory(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stands in for CUDA's counters: each peak is half a GiB above the one before."""
    peaks = [1.0]

    def next_peak() -> float:
        peaks.append(peaks[-1] + 0.5)
        return peaks[-1] * GIB

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", next_peak)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 99 * GIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    return peaks


@pytest.mark.usefixtures("counted_memory")
def test_the_watch_keeps_each_segments_peak_and_forgets_the_first_step() -> None:
    watch = PeakWatch()
    watch.enter("backward")
    watch.restart()
    watch.enter("forward")
    watch.enter("backward")
    watch.enter("forward")
    watch.remember()
    assert watch.segments_gib == {"load": 2.5, "forward": 4.0, "backward": 3.5}
    assert watch.reserved_gib == 99


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("technique", ["lora", "full"])
@pytest.mark.usefixtures("counted_memory")
def test_the_real_trainer_takes_the_watched_steps(technique: str, checkpointing: str) -> None:
    run = RunConfig(technique=technique, gradient_checkpointing=checkpointing, report_to="none")
    found = planner_points.watched_steps(run, BatchShape(2, 16, 15), "cpu").segments_gib
    segments = {segment.partition(":")[0] for segment in found}
    assert segments == {"load", "forward", "backward", "optimizer"}
    assert any(segment.startswith("backward") and segment.endswith("first layer") for segment in found)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Point]:
    """The points that would have been measured: no GPU is asked, each runs out of memory."""
    points: list[Point] = []

    def out_of_memory(point: Point) -> dict[str, str]:
        points.append(point)
        return {"outcome": "oom"}

    monkeypatch.setattr(planner_points, "_in_own_process", out_of_memory)
    monkeypatch.setattr(planner_points, "dry_run", lambda run, batch: SimpleNamespace(peak_gib=1.0))
    return points


def test_a_stopped_measurement_goes_on_where_it_stopped(tmp_path: Path, asked: list[Point]) -> None:
    points, here, path = planner_points.small_card_points("a4000")[:3], find_gpu("h200"), tmp_path / "points.json"
    planner_points.measure(points[:1], here, path)
    planner_points.measure(points, here, path)
    assert asked == points
    kept = json.loads(path.read_text())
    assert [record["outcome"] for record in kept] == ["oom"] * 3
    assert kept[0]["capacity_gib"] == find_gpu("a4000").memory_gib
    assert kept[0]["planned_gib"] < kept[0]["planned_with_overhead_gib"]


def test_what_is_far_too_large_is_not_tried_but_told(asked: list[Point]) -> None:
    record = planner_points.measured_point(Point("full", "llama-3.1-8b", 1, 2048, False), find_gpu("a4000"))
    assert (record["outcome"], record["allocated_gib"], asked) == ("skipped", None, [])
