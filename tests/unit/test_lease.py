"""A lease of a GPU: what is begun, what is kept when it is cut off, and that a second call goes on."""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import lease, lease_parts, planner_points
from bench.gpu import LEVER_TRIALS, TRIALS
from bench.lease_schedule import RESULTS, Part, Results, read_results, spend
from bench.processes import END_S
from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.hardware.devices import find_gpu
from tests.forked import run_forked
from tests.gpu.test_shared_gpu import PAIRS
from tests.pace import patient

STUBS = "tests.unit.lease_stubs"
CARD = "H200 141GB SXM"


def stub(name: str, call: str = "work", expected_s: float = 0.1, limit_s: float = 30.0, **about: Any) -> Part:
    own = {key: about.pop(key) for key in ("beside", "left_out") if key in about}
    return Part(name, f"{STUBS}:{call}", about, expected_s, limit_s, **own)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / RESULTS, CARD)


def statuses(results: Results) -> dict[str, str]:
    return {line["part"]: line["status"] for line in results.of_this_card()}


def times(results: Results) -> dict[str, dict[str, float]]:
    return {line["part"]: line["result"] for line in results.of_this_card() if line["status"] == "done"}


def test_each_part_has_its_line_whatever_became_of_the_others(results: Results) -> None:
    parts = [
        stub("crashes", "crash"),
        stub("fails", "fail"),
        stub("hangs", seconds=99, limit_s=0.3),
        stub("too long", expected_s=999),
        stub("not here", left_out="needs a wheel"),
        stub("works", wheel=3),
    ]
    spend(parts, results, END_S + patient(20))
    found = {line["part"]: (line["status"], line["why"]) for line in results.of_this_card()}
    assert found.pop("crashes")[0] == "failed"
    assert found.pop("hangs")[1].startswith("took longer than 0.3 s")
    expected = ("failed", "ValueError: the seventh row"), ("left out", "needs a wheel"), ("done", "")
    assert found == dict(zip(("fails", "not here", "works"), expected, strict=True))
    assert times(results)["works"]["wheel"] == 3


def test_a_second_call_goes_on_and_tries_last_what_has_failed(
    results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first is over within its second part, whose line says so; of another card's lines nothing is taken."""
    parts = [stub("fails", "fail"), stub("first"), stub("second", seconds=99, limit_s=999), stub("third")]
    replace(results, card="another").add(stub("third"), "done")
    spend(parts, results, END_S + patient(1.2))
    assert statuses(results) == {"fails": "failed", "first": "done", "second": "cut off"}
    capsys.readouterr()
    spend([*parts[:2], stub("second"), parts[3]], results, END_S + patient(20))
    begun = [line.partition(" ...")[0] for line in capsys.readouterr().out.splitlines() if " ... " in line]
    assert begun == ["second", "third", "fails"]
    assert statuses(results) == {"fails": "failed", "first": "done", "second": "done", "third": "done"}


def test_the_next_part_is_imported_while_one_measures_and_begins_after_it(results: Results) -> None:
    spend([stub("one", seconds=patient(0.5)), stub("next")], results, END_S + patient(20))
    one, following = (times(results)[name] for name in ("one", "next"))
    assert following["imported_at"] < one["ended_at"] <= following["began_at"]


def test_parts_that_measure_no_speed_run_beside_each_other_and_others_alone(results: Results) -> None:
    long_s = patient(0.6)
    parts = [stub(name, seconds=long_s, beside=2) for name in ("a", "b", "c")] + [stub("alone")]
    spend(parts, results, END_S + patient(30))
    a, b, c, alone = (times(results)[part.name] for part in parts)
    assert b["began_at"] < a["ended_at"] <= c["began_at"]
    assert alone["began_at"] >= max(each["ended_at"] for each in (a, b, c))


def test_a_lease_that_is_told_to_end_says_what_was_at_work(results: Results) -> None:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    timer = threading.Timer(patient(0.7), os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            spend([stub("one"), stub("two", seconds=99)], results, 99)
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)
    assert statuses(results) == {"one": "done", "two": "cut off"}


def test_a_line_that_was_cut_off_in_the_middle_is_none(results: Results) -> None:
    results.add(stub("whole"), "done")
    with results.path.open("a") as file:
        file.write('\n{"part": "torn", "card": "H2')
    results.add(stub("next"), "done")
    assert [line["part"] for line in read_results(results.path)] == ["whole", "next"]


def test_a_result_that_is_there_is_kept_though_its_process_crashes_at_its_end(results: Results) -> None:
    spend([stub("crashes late", "work_and_crash")], results, END_S + patient(20))
    assert statuses(results) == {"crashes late": "done"}


def test_two_leases_are_not_at_work_at_once(tmp_path: Path) -> None:
    with (
        lease.alone(tmp_path / RESULTS),
        pytest.raises(BadInputError, match="Another lease"),
        lease.alone(tmp_path / RESULTS),
    ):
        pass
    with lease.alone(tmp_path / RESULTS):
        pass


# -- what is measured


@pytest.mark.parametrize("memory_gib", [78.0, 80.0, 94.0, 139.8])
def test_every_card_has_parts_that_it_has_room_for(memory_gib: float) -> None:
    card = replace(find_gpu(CARD), memory_gib=memory_gib)
    parts = {part.name: part for part in lease_parts.parts_for(card)}
    points = [part for name, part in parts.items() if name.startswith("point: ")]
    assert len(points) > lease_parts.POINTS
    assert len({part.arguments["point"]["technique"] for part in points[:9]}) == 3
    trials = {name: part for name, part in parts.items() if name.startswith("steps: ")}
    without_room = [name for name, part in trials.items() if "by the plan" in part.left_out]
    assert (len(trials), without_room == []) == (len(TRIALS) + len(LEVER_TRIALS), memory_gib > 90)
    json.dumps([part.arguments for part in parts.values()])
    assert all(part.expected_s < part.limit_s for part in parts.values())


def test_two_ranks_on_one_gpu_are_among_the_first_parts_of_a_card_that_nobody_has_measured() -> None:
    names = [part.name for part in lease_parts.parts_for(find_gpu("H100 80GB SXM"))]
    assert {f"shared GPU: {name}" for name in (*PAIRS, "restart")} <= set(names[:12])


def test_what_an_earlier_lease_found_waits_for_what_nobody_has_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    card, kept = find_gpu(CARD), tmp_path / "kept.json"
    names = [part.name for part in lease_parts.wanted_parts(card)]
    machine, done, failed, *_ = names
    found = {name: {"status": "failed" if name == failed else "done"} for name in (machine, done, failed)}
    kept.write_text(json.dumps({card.name: found}))
    monkeypatch.setattr(lease_parts, "LEASES_PATH", kept)
    monkeypatch.setattr(lease_parts, "TRIALS_PATH", tmp_path / "none.json")
    assert [part.name for part in lease_parts.parts_for(card)] == [machine, failed, *names[3:], done]


def test_parts_are_refused_without_a_gpu_and_on_another_card(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as left:
            lease.main(["--folder", str(tmp_path), *arguments])
        assert left.value.code == 2
        return capsys.readouterr().err

    assert "no GPU" in refused()
    assert "not in the catalogue" in refused("--card", "h300")
    assert "no results of a GPU" in refused("--merge")
    assert "--minutes is 0" in refused("--minutes", "0")
    monkeypatch.setattr(planner_points, "gpu_here", lambda: find_gpu("H100 80GB SXM"))
    monkeypatch.setattr(lease_parts, "free_gib", lambda: 78.0)
    assert "the GPU here is H100" in refused("--card", "h200")
    assert 77.0 < lease_parts.card_here().memory_gib < 78.0  # less what the next part's process takes


# -- what is kept


def test_results_are_merged_in_place_of_older_ones(
    tmp_path: Path, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Points with their dry runs, which the lease has no time for; of a rehearsal nothing."""
    monkeypatch.setattr(planner_points, "dry_run", lambda run, batch: SimpleNamespace(peak_gib=3.0))
    step = {"technique": "lora", "name": "compiled", "gpu": CARD, "mfu": 0.5}
    point = {"technique": "lora", "model": "llama-3.2-1b", "rows": 4, "length": 512, "gradient_checkpointing": True,
             "gpu": CARD, "allocated_gib": 2.9, "dry_run_gib": None}  # fmt: skip
    kept = {name: tmp_path / f"{name}.json" for name in ("trials", "points", "others")}
    kept["points"].write_text(json.dumps([{**point, "allocated_gib": 2.5}, {**point, "gpu": "another"}]))
    results.add(stub("steps: lora, compiled"), "done", result=step)
    results.add(stub("point: one"), "done", result=point)
    results.add(stub("point: two"), "cut off", "the lease was over")
    results.add(stub("optimizers"), "done", result={"step_s": 0.2})
    results.add(stub("shared GPU: 2.7 PP"), "failed", "losses differ")
    replace(results, card=lease_parts.REHEARSED).add(stub("optimizers"), "done", result={})
    lease.merge(results.path, **kept)
    trials, points, others = (json.loads(path.read_text()) for path in kept.values())
    assert trials == [step]
    assert [(each["gpu"], each["allocated_gib"], each["dry_run_gib"]) for each in points] == [
        (CARD, 2.9, 3.0), ("another", 2.9, None)
    ]  # fmt: skip
    of_card = {part: (line["status"], line["result"]) for part, line in others.pop(CARD).items()}
    assert of_card == {"optimizers": ("done", {"step_s": 0.2}), "shared GPU: 2.7 PP": ("failed", None)}
    assert others == {}


KINDS = ("machine", "shared GPU", "steps", "tests", "point", "preflight")
MAY_BE_LEFT_OUT = {"steps: full, Liger's kernels", "steps: lora, Liger's kernels"}
"""Kernels for GPUs alone, and packages that need not be installed."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_part_is_rehearsed_on_the_cpu(kind: str, tmp_path: Path) -> None:
    """All that a GPU runs runs here, with tiny models."""
    log, folder = tmp_path / "log", tmp_path / "lease"
    command = [sys.executable, "-m", "bench.lease", "--rehearse", "--only", kind, "--folder", str(folder)]
    if kind in ("tests", "shared GPU"):  # which start forks of their own
        with log.open("w") as file:
            code = subprocess.run(command, cwd=REPOSITORY, stdout=file, stderr=file, check=False).returncode
    else:
        code = run_forked(command, REPOSITORY, os.environ, log, timeout=300)
    assert code == 0, log.read_text()
    found = {line["part"]: line["status"] for line in read_results(folder / RESULTS)}
    parts = [part for part in lease_parts.parts_for(None) if kind in part.name]
    assert found == {part.name: "left out" if part.left_out else "done" for part in parts}
    assert {part.name for part in parts if part.left_out} <= MAY_BE_LEFT_OUT
