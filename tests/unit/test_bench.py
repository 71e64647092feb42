"""The benchmark's bars judge, its clock interpolates, and a little of it runs."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from bench import pipeline, training
from bench.__main__ import TOOL_NAMES
from bench.clock import Check, reached, tokens_per_s
from bench.entries import measured, save, update
from bench.tools import TOOLS
from bench.training import Outcome
from common.base.paths import REPOSITORY
from tests.forked import run_forked

KEYS = {"name", "value", "unit", "bar", "holds", "command", "bar_is"}


def run_quickly(folder: Path, *words: str) -> tuple[list[dict], str]:
    """The entries that a part of the benchmark prints, and all that it says."""
    command, log = [sys.executable, "-m", "bench", *words, "--quick"], folder / "log"
    code, said = run_forked(command, REPOSITORY, os.environ, log, timeout=300), log.read_text()
    assert code == 0, said
    return json.JSONDecoder().raw_decode(said, said.index("[\n"))[0], said


def test_a_bar_is_the_most_or_least_that_a_value_has_to_be() -> None:
    assert measured("score", 0.11, "distance", "x", at_most=0.12).holds is True
    assert measured("score", 0.13, "distance", "x", at_most=0.12).holds is False
    assert measured("score", None, "distance", "x", at_most=0.12).holds is False
    assert measured("speed", 1.31, "ratio", "x", at_least=1.3).holds is True
    assert measured("speed", 1.29, "ratio", "x", at_least=1.3).holds is False
    assert measured("speed", None, "ratio", "x", at_least=1.3).holds is False
    assert measured("speed", 5.0, "s", "x").holds is None


def test_what_is_saved_has_the_promised_shape(tmp_path: Path) -> None:
    save([measured("speed", 1.31, "ratio", "x", at_least=1.3)], tmp_path)
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert kept == [
        {
            "name": "speed",
            "value": 1.31,
            "unit": "ratio",
            "bar": 1.3,
            "holds": True,
            "command": "x",
            "bar_is": "at least",
        }
    ]
    assert {"packages", "devices", "threads_per_rank", "commit", "dirty", "date"} <= json.loads(
        (tmp_path / "environment.json").read_text()
    ).keys()


def test_the_target_is_met_between_two_checks() -> None:
    checks = [Check(10, 1.0, 1.0), Check(20, 2.0, 0.01), Check(30, 3.0, 0.5)]
    found = reached(checks, 0.1)
    assert (found.step, found.seconds) == pytest.approx((15, 1.5))
    assert reached(checks, 2.0) == checks[0]
    assert reached(checks, 0.001) is None


def test_tokens_per_second_count_whole_epochs_only() -> None:
    assert tokens_per_s([Check(5, 1.0, 1), Check(10, 2.0, 1), Check(15, 9.0, 1)], 100, 10) == 50
    assert tokens_per_s([Check(5, 1.0, 1)], 100, 10) is None


def outcomes(seconds: dict[str, float | None], bare_tokens: float = 100) -> dict[str, list[Outcome]]:
    tokens = {"bare": bare_tokens}
    return {
        tool: [Outcome(value, None if value is None else 1.0, tokens.get(tool, 100.0))] * 3
        for tool, value in seconds.items()
    }


@pytest.mark.parametrize(
    ("seconds", "bare_tokens", "holds"),
    [
        ({"ours": 10, "bare": 5, "sft-best": 14, "trainer": 11}, 105, [True, True, True]),
        ({"ours": 10, "bare": 5, "sft-best": 14, "trainer": 9}, 105, [False, True, True]),
        ({"ours": 10, "bare": 5, "sft-best": 12, "trainer": 11}, 105, [True, False, True]),
        ({"ours": 10, "bare": 5, "sft-best": 14, "trainer": 11}, 106, [True, True, False]),
        ({"ours": None, "bare": 5, "sft-best": 14, "trainer": 11}, 105, [False, False, True]),
        ({"ours": 10, "bare": 5, "sft-best": None, "trainer": 11}, 105, [True, False, True]),
    ],
    ids=["all hold", "another tool is sooner", "too near to SFTTrainer", "too few tokens", "never there", "SFT never"],
)
def test_each_bar_can_fail(seconds: dict[str, float | None], bare_tokens: float, holds: list[bool]) -> None:
    found = training.ratio_entries("lora", outcomes(seconds, bare_tokens), "x")
    assert [entry.holds for entry in found] == holds


def test_a_tool_that_is_not_there_or_never_gets_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(training.LLAMA_FACTORY_PYTHON, raising=False)
    assert training.python_of("llama-factory") is None
    (absent,) = training.tool_entries("lora", "llama-factory", None, "x")
    assert (absent.value, absent.holds) == (None, None)
    assert "not run" in absent.name
    late = training.tool_entries("lora", "ours", outcomes({"ours": None})["ours"], "x")[0]
    assert late.value is None
    assert "not reached" in late.name


FIGURES = {
    "speedup": 1.6,
    "speedup_gpipe": 1.5,
    "ideal_speedup": 16 / 9,
    "machine_ceiling": 1.8,
    "share_of_allowed": 0.86,
    "naive_factor": 1.01,
    "small_micro_batches_factor": 1.02,
    "unequal_stages_factor": 1.03,
    "sending_and_waiting_factor": 1.12,
    "ideal_idle_share": 1 / 9,
    "idle_share": {"naive": [0.5, 0.5], "gpipe": [0.2, 0.15], "1f1b": [0.2, 0.1]},
    "peak_activations_mib": {"naive": [300.0, 300.0], "gpipe": [280.0, 290.0], "1f1b": [80.0, 40.0]},
}


@pytest.mark.parametrize(("share", "holds"), [(0.86, True), (0.84, False)])
def test_the_large_model_s_pipeline_has_a_bar_and_the_small_one_none(
    monkeypatch: pytest.MonkeyPatch, share: float, holds: bool
) -> None:
    monkeypatch.setattr(pipeline, "figures_of", lambda trial: {**FIGURES, "share_of_allowed": share})
    found = pipeline.entries(quick=False)
    assert len({entry.name for entry in found}) == len(found)
    assert all(entry.name.startswith("pipeline, ") for entry in found)  # so that --update finds them
    (judged,) = [entry for entry in found if entry.bar is not None]
    assert (judged.value, judged.holds) == (share, holds)
    assert "llama-27m" in judged.name
    values = {entry.name: entry.value for entry in found}
    assert values["pipeline, llama-27m, 64 rows, 1F1B: peak activations of stage 1"] == 40
    assert values["pipeline, llama-27m, 64 rows: GPipe's highest peak of activations over 1F1B's"] == 290 / 80
    for rows in (64, 16):
        assert values[f"pipeline, embedded_base, {rows} rows, 1F1B: speed-up over naive model parallel"] == 1.6


@pytest.mark.slow
def test_two_ranks_step_by_step_through_a_pipeline(tmp_path: Path) -> None:
    found, said = run_quickly(tmp_path, "pipeline")
    assert all(entry["value"] > 0 for entry in found)
    assert re.findall("^(.*): .*a step", said, re.MULTILINE) == [
        "assets/embedded_base, 64 rows, warm-up",
        "assets/embedded_base, 64 rows, round 1 of 1",
    ]


def test_the_command_line_knows_every_tool() -> None:
    assert tuple(TOOLS) == TOOL_NAMES


@pytest.mark.slow
def test_ours_and_a_bare_loop_run_a_few_steps(tmp_path: Path) -> None:
    found, _ = run_quickly(tmp_path, "training", "--technique", "lora")
    assert all(entry.keys() == KEYS for entry in found)
    tokens = [entry["value"] for entry in found if entry["unit"] == "tokens per s"]
    assert len(tokens) == 2
    assert all(value > 0 for value in tokens)


def test_one_part_s_figures_take_the_place_of_its_older_ones(tmp_path: Path) -> None:
    save([measured("planner, a", 1.0, "s", "x"), measured("quality, b", 2.0, "s", "x")], tmp_path)
    update("planner", [measured("planner, c", 3.0, "s", "x")], tmp_path)
    entries = json.loads((tmp_path / "bench.json").read_text())
    assert [entry["name"] for entry in entries] == ["quality, b", "planner, c"]
    around = json.loads((tmp_path / "environment.json").read_text())
    assert around["measured_later"]["planner"]["date"] >= around["date"]
