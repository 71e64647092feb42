"""The planner's errors are told as they are: each bar can fail, what was not run says so, points are what they say."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import planner, planner_points
from bench.planner import Compared, Entry, error_entries
from bench.planner_points import Point
from common.base.run_config import RunConfig
from common.hardware.devices import find_gpu
from common.models.placement import place_stages
from common.planning.job import BatchShape

OVER, UNDER = Compared("over", 11, 10), Compared("under", 7, 10)


def test_errors_are_shares_of_what_was_found_and_the_worst_point_is_named() -> None:
    found = [
        (entry.name, entry.value, entry.holds) for entry in error_entries("x", [OVER, UNDER, Compared("right", 5, 5)])
    ]
    assert found == [
        ("x, 3 points: mean error", pytest.approx(0.4 / 3), None),
        ("x: worst error (under: 7.00 of 10.00 GiB)", pytest.approx(0.3), None),
    ]


@pytest.mark.parametrize(
    ("bars", "holds"), [((0.21, 0.31), [True, True]), ((0.19, 0.31), [False, True]), ((0.21, 0.29), [True, False])]
)
def test_each_bar_can_fail(bars: tuple[float, float], holds: list[bool]) -> None:
    assert [entry.holds for entry in error_entries("x", [OVER, UNDER], bars=bars)] == holds


def test_what_was_not_run_says_so(tmp_path: Path) -> None:
    found = planner.gpu_entries(tmp_path / "none.json")
    assert [entry.value for entry in found] == [0, *[None] * 4]
    assert all(entry.name.endswith("not run") for entry in found[1:])
    assert [entry.bar for entry in found[:3]] == [20, 0.03, 0.08]


def measured_entries(path: Path, *records: dict[str, object]) -> list[Entry]:
    """What is said of measured points; those of `records` are changes to the usual one."""
    usual = {
        **vars(Point("full", "llama-3.2-1b", 4, 512, False)),
        "outcome": "ran",
    }
    path.write_text(json.dumps([usual | record for record in records]))
    return planner.gpu_entries(path)


def planned(planned_gib: float, **changes: object) -> dict[str, object]:
    gib = {"planned_gib": planned_gib, "planned_with_overhead_gib": planned_gib + 1, "dry_run_gib": planned_gib}
    return gib | changes


def test_measured_points_that_ran_are_compared(tmp_path: Path) -> None:
    steps, mean, worst, *_ = measured_entries(
        tmp_path / "points.json",
        planned(10, allocated_gib=10.2),
        planned(20, allocated_gib=None, outcome="oom"),
        planned(14.9, allocated_gib=15.1),
    )
    assert mean.value == pytest.approx((0.2 / 10.2 + 0.2 / 15.1) / 2)
    assert "full llama-3.2-1b bf16 4x512" in worst.name
    assert (steps.value, steps.holds, mean.holds, worst.holds) == (2, False, True, True)


def test_points_in_4_bits_are_enough_planned_and_without_a_dry_run(tmp_path: Path) -> None:
    points, gpu = planner_points.qlora_points(), find_gpu("H200 141GB")
    assert len(set(points)) == len(points) >= 12
    assert {point.model for point in points} >= {"llama-3.1-8b", "llama-3.1-70b"}
    assert {point.step.run.quantization for point in points} == {"nf4", "nf4-double"}
    assert sum(point.planned(gpu).peak_gib < gpu.memory_gib for point in points) >= 12
    assert set(points) <= set(planner_points.all_points())
    record = planned(10, **vars(points[-1])) | {"allocated_gib": 10.5, "dry_run_gib": None}
    _, closed, worst, dry, *_ = measured_entries(tmp_path / "points.json", record)
    assert (closed.value, dry.value) == (pytest.approx(0.5 / 10.5), None)
    assert "nf4-double" in worst.name


def test_the_grid_is_large_and_each_of_its_points_is_a_job() -> None:
    points = planner.dry_run_grid()
    names = {point.name for point in points}
    assert len(names) == len(points) >= 100
    assert all(planner.closed_form_gib(point) > 0 for point in points)
    specials = ("checkpointed", "eager", "padded", "ddp x4", "64 labelled", "no dropout", "fp32", "bart-large-cnn",
                "mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b-0924", "gpt-oss-20b",
                "linear layers", "mp x2", "pp x4 1f1b of 4", "gpipe of 4", "17 tiles", "trained tower")  # fmt: skip
    assert [special for special in specials if not any(special in name for name in names)] == []
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
    point = planner.Step(run, BatchShape(4, 512, 511))
    assert planner.closed_form_gib(point) == pytest.approx(planner.dry_run_gib(point), rel=0.05)


WIDE_NORMS = ("olmo-2-0425-1b", "olmo-3-7b", "gemma-3-1b")  # whose normalized numbers full fine-tuning keeps


def longest_of_each_family() -> list:
    """Long rows without checkpointing, where what the families keep differs most; one of each for `make test`."""
    return [
        pytest.param(
            point,
            id=point.name,
            marks=[] if (point.run.technique == "full") == (point.run.model in WIDE_NORMS) else [pytest.mark.slow],
        )
        for point in planner.family_points()
        if (point.run.precision, point.run.gradient_checkpointing) == ("bf16", False)
        if point.batch.length == max(length for _, length in planner.FAMILY_SHAPES[point.run.model])
        and (point.run.technique, point.run.target_modules) != ("full", "all-linear")
    ]


@pytest.mark.parametrize("point", longest_of_each_family())
def test_closed_form_and_dry_run_say_the_same_of_each_family(point: planner_points.Step) -> None:
    assert planner.closed_form_gib(point) == pytest.approx(planner.dry_run_gib(point), rel=0.02)


def test_of_divided_layers_the_fullest_device_counts() -> None:
    point = next(point for point in planner.divided_points() if point.run.parallel == "mp")
    peaks = [device.allocated_gib for device in place_stages(point.run, point.batch).plan.devices]
    assert planner.closed_form_gib(point) == max(peaks) > min(peaks)


def test_full_fine_tuning_is_of_every_weight_but_where_a_point_says_otherwise() -> None:
    l4, points = find_gpu("l4"), planner_points.all_points()
    assert len(set(points)) == len(points)
    full = [point for point in points if point.technique == "full"]
    assert sum(point.linear_only for point in points) == sum(point.linear_only for point in full) == 6
    assert all(point.step.run.target_modules == ("all-linear" if point.linear_only else "all") for point in full)
    assert {point.step.run.target_modules for point in points if point.technique == "lora"} == {"all-linear"}
    every, linear = (Point("full", "llama-3.2-1b", 4, 512, False, linear_only=only) for only in (False, True))
    assert linear.planned(l4).peak_gib < every.planned(l4).peak_gib


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("technique", ["lora", "full"])
def test_the_peak_is_of_the_steps_that_the_run_folder_takes(
    technique: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(planner_points, "forget_peak", told.append)
    run = RunConfig(technique=technique, gradient_checkpointing=checkpointing, report_to="none")
    assert planner_points.watched_steps(run, BatchShape(2, 16, 15), "cpu").peak_gib > 0
    assert told == ["cpu"]  # once, before the first step


def test_what_is_far_too_large_is_not_tried_but_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_points, "dry_run", lambda run, batch: SimpleNamespace(peak_gib=1.0))
    asked: list[Point] = []

    def out_of_memory(point: Point) -> dict[str, str]:
        asked.append(point)
        return {"outcome": "oom"}

    a4000, fits = find_gpu("a4000"), Point("lora", "llama-3.2-1b", 4, 512, False)
    large, small = (
        planner_points.measured_point(point, a4000, out_of_memory)
        for point in (Point("full", "llama-3.1-8b", 1, 2048, False), fits)
    )
    assert (large["outcome"], large["allocated_gib"], small["outcome"], asked) == ("skipped", None, "oom", [fits])
    assert small["planned_gib"] < small["planned_with_overhead_gib"] < small["capacity_gib"] == a4000.memory_gib
