"""The benchmark's bars judge, its clock interpolates, and a little of it runs."""

import json
import os
import re
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import gpu, gpu_trial, pipeline, rates, training, vocabulary
from bench.__main__ import DATA_SETS, PARTS, TOOL_NAMES
from bench.clock import Check, Clock, reached, tokens_per_s
from bench.entries import measured, save, update
from bench.gpu_profile import kind_of
from bench.long_rows import LEAST, MOST, joined, long_rows
from bench.recipe import MOST_STEPS, Material, Trial, load_material
from bench.tools import TOOLS
from bench.trial_process import LLAMA_FACTORY_PYTHON, Outcome, python_of
from bench.vocabulary_trial import StepMeter
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.data.rows import IGNORED_LABEL
from common.data.splits import load_splits, tokens_of
from common.hardware.devices import find_gpu
from common.planning.published_rates import published_rates
from common.planning.step_speed import COUNTED
from common.reporting.publications import OWN_MFU, mfu_of
from tests.forked import run_forked

KEYS = {"name", "value", "unit", "bar", "holds", "command", "bar_is"}
TIME, LONG_TIME = "training, lora, ours: time to 0.1", "training, lora, long rows, ours: time to 0.5"


def run_quickly(folder: Path, *words: str) -> tuple[list[dict], str]:
    """The entries that a part of the benchmark prints, and all that it says."""
    command, log = [sys.executable, "-m", "bench", *words, "--quick"], folder / "log"
    code, said = run_forked(command, REPOSITORY, os.environ, log, timeout=300), log.read_text()
    assert code == 0, said
    return json.JSONDecoder().raw_decode(said, said.index("[\n"))[0], said


@pytest.mark.parametrize(
    ("value", "bar", "holds"),
    [
        (0.11, {"at_most": 0.12}, True),
        (0.13, {"at_most": 0.12}, False),
        (None, {"at_most": 0.12}, False),
        (1.31, {"at_least": 1.3}, True),
        (1.29, {"at_least": 1.3}, False),
        (None, {"at_least": 1.3}, False),
        (5.0, {}, None),
    ],
)
def test_a_bar_is_the_most_or_least_that_a_value_has_to_be(
    value: float | None, bar: dict[str, float], holds: bool | None
) -> None:
    assert measured("score", value, "ratio", "x", **bar).holds is holds


def kept_in(folder: Path) -> list[dict]:
    return json.loads((folder / "bench.json").read_text())


def test_what_is_saved_has_the_promised_shape(tmp_path: Path) -> None:
    save([measured("speed", 1.31, "ratio", "x", at_least=1.3)], tmp_path)
    assert kept_in(tmp_path) == [
        {"name": "speed", "value": 1.31, "unit": "ratio", "bar": 1.3, "holds": True, "command": "x",
         "bar_is": "at least"}
    ]  # fmt: skip
    around = json.loads((tmp_path / "environment.json").read_text())
    assert {"packages", "devices", "threads_per_rank", "commit", "dirty", "date"} <= around.keys()


@pytest.mark.parametrize(
    ("part", "new", "is_whole", "expected"),
    [
        ("planner", "planner, c", True, [TIME, LONG_TIME, "quality, b", "planner, c"]),
        ("training", f"{LONG_TIME} not reached", False, [TIME, "planner, a", "quality, b", f"{LONG_TIME} not reached"]),
    ],
    ids=["a part", "some of a part"],
)
def test_new_figures_take_the_place_of_the_older_ones(
    tmp_path: Path, part: str, new: str, is_whole: bool, expected: list[str]
) -> None:
    save([measured(name, 1.0, "s", "x") for name in (TIME, LONG_TIME, "planner, a", "quality, b")], tmp_path)
    update(part, [measured(new, 3.0, "s", "x")], tmp_path, is_whole)
    assert [entry["name"] for entry in kept_in(tmp_path)] == expected
    around = json.loads((tmp_path / "environment.json").read_text())
    assert around["measured_later"][part]["date"] >= around["date"]


def test_the_target_is_met_between_two_checks() -> None:
    checks = [Check(10, 1.0, 1.0), Check(20, 2.0, 0.01), Check(30, 3.0, 0.5)]
    found = reached(checks, 0.1)
    assert (found.step, found.seconds) == pytest.approx((15, 1.5))
    assert (reached(checks, 2.0), reached(checks, 0.001)) == (checks[0], None)


def test_tokens_per_second_count_whole_epochs_only() -> None:
    assert tokens_per_s([Check(5, 1.0, 1), Check(10, 2.0, 1), Check(15, 9.0, 1)], 100, 10) == 50
    assert tokens_per_s([Check(5, 1.0, 1)], 100, 10) is None


def outcomes(seconds: dict[str, float | None], bare_tokens: float = 100) -> dict[str, list[Outcome]]:
    return {
        tool: [Outcome(value, None if value is None else 1.0, bare_tokens if tool == "bare" else 100.0)] * 3
        for tool, value in seconds.items()
    }


ALL_HOLD = {"ours": 10, "bare": 5, "sft-best": 14, "sft-grouped": 12.1, "sft-packed": 15, "trainer": 11}


@pytest.mark.parametrize(
    ("changed", "bare_tokens", "holds"),
    [
        ({}, 105, [True, True, True, True]),
        ({"trainer": 9}, 105, [False, True, True, True]),
        ({"sft-packed": 11.9}, 105, [True, False, True, True]),
        ({"sft-best": 12.5}, 105, [True, True, False, True]),
        ({}, 106, [True, True, True, False]),
        ({"ours": None}, 105, [False, False, False, True]),
        ({"sft-best": None}, 105, [True, True, False, True]),
        ({"sft-best": None, "sft-grouped": None, "sft-packed": None}, 105, [True, False, False, True]),
    ],
    ids=["all", "another tool", "packed", "SFTTrainer's best", "too few tokens", "never there", "SFT never", "no SFT"],
)
def test_each_bar_can_fail(changed: dict[str, float | None], bare_tokens: float, holds: list[bool]) -> None:
    found = training.ratio_entries("short", "lora", outcomes({**ALL_HOLD, **changed}, bare_tokens), "x")
    assert [entry.holds for entry in found] == holds
    assert all(entry.name.startswith("training, lora, ours") for entry in found)


def test_long_rows_have_bars_of_their_own() -> None:
    of_tools = outcomes({**ALL_HOLD, "sft-best": 12.2}, 105)
    found = training.ratio_entries("long", "lora", of_tools, "x")
    assert [(entry.bar, entry.holds) for entry in found] == [(1.0, True), (1.2, True), (0.95, True)]
    assert all(entry.name.startswith("training, lora, long rows, ours") for entry in found)
    del of_tools["sft-packed"]
    assert training.ratio_entries("long", "lora", of_tools, "x") == []


def test_a_tool_that_is_not_there_or_never_gets_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LLAMA_FACTORY_PYTHON, raising=False)
    assert python_of("llama-factory") is None
    (absent,) = training.tool_entries("short", "lora", "llama-factory", None, "x")
    late, _ = training.tool_entries("short", "lora", "ours", outcomes({"ours": None})["ours"], "x")
    assert [(entry.value, entry.holds) for entry in (absent, late)] == [(None, None)] * 2
    assert ("not run" in absent.name, "not reached" in late.name) == (True, True)


def test_slow_tools_run_with_the_first_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Trial] = []
    monkeypatch.setattr(training, "run_trial_process", ran.append)
    training.repeats("long", "full", {"ours": 1e-3, "sft-default": 2e-3}, training.FULL_SCALE)
    first, second = training.SEEDS["long"]
    assert [(trial.tool, trial.seed) for trial in ran] == [("ours", first), ("sft-default", first), ("ours", second)]
    assert {(trial.data, trial.technique, trial.target_loss) for trial in ran} == {("long", "full", 0.4)}


def test_a_rate_is_searched_once_for_tools_that_take_the_same_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    searched: list[str] = []
    steps = {4e-3: 50.0, 2e-3: 60.0, 8e-3: None}

    def run(trial: Trial) -> Outcome:
        searched.append(trial.tool)
        return Outcome(1.0, steps[trial.learning_rate], 1.0)

    def found_for(*tools: str) -> set[float]:
        return set(rates.rates_of("long", "full", list(tools)).values())

    monkeypatch.setattr(rates, "run_trial_process", run)
    monkeypatch.setattr(rates, "RATES_PATH", tmp_path / "rates.json")
    assert found_for("sft-default", "sft-best", "ours") == {4e-3}
    assert sorted(searched) == ["ours"] * 3 + ["trainer"] * 3
    steps[2e-3] = 40.0
    assert (found_for("ours", "trainer"), found_for("bare")) == ({4e-3}, {2e-3})
    assert len(searched) == 9


def test_long_rows_are_conversations_of_uneven_lengths() -> None:
    run = RunConfig(max_length=MOST, train_rows=40)
    turns = load_material(run)
    rows = long_rows(turns.train, 200)
    assert rows == long_rows(turns.train, 200)
    lengths = sorted(len(row["input_ids"]) for row in rows)
    assert LEAST <= lengths[0] <= lengths[-1] <= MOST
    assert lengths[-1] > 8 * lengths[100]
    assert all(set(row["labels"]) - {IGNORED_LABEL} for row in rows)
    first = load_splits(run).train[:3]
    chat = {"messages": [message for row in first for message in row["messages"]]}
    assert joined(turns.train[:3]) == tokens_of([chat], turns.tokenizer, run)[0]


def test_the_loss_is_looked_at_each_quarter_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.clock.validation_loss", lambda model, material: 1.0)
    clock = Clock(Trial("ours", "lora", 1e-3, 42, 0.1, 30), Material(None, [{}] * 50 * 16, []))
    clock.start()
    assert [clock.step_done(None) for _ in range(30)] == [False] * 29 + [True]
    assert [check.step for check in clock.checks] == [13, 25]
    clock.steps_per_epoch, clock.step, clock.checks = 7, 0, []
    for _ in range(14):
        clock.step_done(None)
    assert [check.step for check in clock.checks] == [2, 4, 6, 7, 9, 11, 13, 14]


def test_a_step_s_peak_counts_what_is_alive_at_once() -> None:
    trial = Trial("ours", "full", 1e-3, 42, 0.0, 2, data="random")
    meter = StepMeter(trial, Material(None, [], []))
    layer = torch.nn.Linear(100, 100, bias=False)  # 40,000 bytes
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)  # makes nothing but its states, 80,000 bytes

    def step() -> bool:
        meter.step_begins(layer, optimizer)
        hidden = layer(torch.ones(200, 100))  # input and output, 80,000 bytes each
        for _ in range(3):
            hidden = hidden + 1  # one is freed with each that comes
        hidden.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return meter.step_done(layer)

    assert [step(), step()] == [False, True]
    held, passes = 40_000 + 80_000, 3 * 80_000  # weight and states; the input and two of the others
    assert held + passes <= meter.peak_bytes < held + passes + 40_000
    assert meter.seconds == []


@pytest.mark.parametrize(
    ("peaks", "seconds", "holds"),
    [
        ({}, {}, [True, True, True]),
        ({"trainer": 199}, {}, [False, True, True]),
        ({"sft-default": 95}, {}, [True, False, True]),
        ({}, {"sft-best": 0.9}, [True, True, False]),
    ],
    ids=["all", "the Trainer's peak", "SFTTrainer's peak", "SFTTrainer's speed"],
)
def test_each_bar_of_the_large_vocabulary_can_fail(
    peaks: dict[str, int], seconds: dict[str, float], holds: list[bool]
) -> None:
    of_tools = {"ours": 100, "sft-default": 96, "sft-best": 150, "trainer": 201} | peaks
    found = vocabulary.ratio_entries(
        "full",
        {tool: vocabulary.Outcome(peak, [seconds.get(tool, 1.0)] * 3) for tool, peak in of_tools.items()},
        "x",
    )
    assert [entry.holds for entry in found] == holds
    assert all(entry.name.startswith("vocabulary, full") for entry in found)


@pytest.mark.slow
def test_a_tool_takes_a_step_in_its_turn(tmp_path: Path) -> None:
    found, said = run_quickly(tmp_path, "vocabulary", "--technique", "full")
    assert [(entry["unit"], entry["value"] > 0) for entry in found] == [("MiB", True), ("s", True)]
    assert re.findall("^ours: step .*", said, re.MULTILINE) == ["ours: step 1 of 1"]


def of_random_rows(tool: str) -> Trial:
    return Trial(tool, "lora", 1e-3, 42, 0.0, 4, data="random")


def script_instead_of_python(monkeypatch: pytest.MonkeyPatch, folder: Path, lines: str) -> None:
    script = folder / "python"
    script.write_text(f"#!/bin/sh\n{lines}\n")
    script.chmod(0o755)
    monkeypatch.setattr(vocabulary, "python_of", lambda tool: str(script))


def test_tools_take_their_steps_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order, tools = tmp_path / "order", ("ours", "trainer")
    a_step = f'echo some words; echo turn; read byte; echo "$3" >> {order}'
    result = """echo '{"peak_bytes": 7, "seconds": [1, 2]}'"""
    script_instead_of_python(monkeypatch, tmp_path, f"{a_step}\n{a_step}\n{result}")
    found = vocabulary.steps_in_turn([of_random_rows(tool) for tool in tools], 2)
    assert found == dict.fromkeys(tools, vocabulary.Outcome(7, [1, 2]))
    assert [json.loads(line)["tool"] for line in order.read_text().splitlines()] == [*tools, *tools]


def test_a_tool_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script_instead_of_python(monkeypatch, tmp_path, "echo no memory is left >&2; exit 3")
    with pytest.raises(RuntimeError, match="no memory is left"):
        vocabulary.steps_in_turn([of_random_rows("ours")], 1)


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
    values = {entry.name: entry.value for entry in found}
    assert len(values) == len(found)
    assert all(name.startswith("pipeline, ") for name in values)  # so that --update finds them
    (judged,) = [entry for entry in found if entry.bar is not None]
    assert (judged.value, judged.holds, "llama-27m" in judged.name) == (share, holds, True)
    speedups = {
        f"pipeline, embedded_base, {rows} rows, 1F1B: speed-up over naive model parallel": 1.6 for rows in (64, 16)
    }
    assert (
        values.items()
        >= {
            "pipeline, llama-27m, 64 rows, 1F1B: peak activations of stage 1": 40,
            "pipeline, llama-27m, 64 rows: GPipe's highest peak of activations over 1F1B's": 290 / 80,
            **speedups,
        }.items()
    )


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
    assert tuple(MOST_STEPS) == DATA_SETS


def test_without_options_every_tool_trains_on_every_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(training, "entries", lambda data, technique, tools, _: asked.append((data, *tools)) or [])
    PARTS["training"](Namespace(tool=None, quick=False, data=DATA_SETS, technique=("lora",)))
    assert asked == [(data, *TOOLS) for data in DATA_SETS]


@pytest.mark.slow
@pytest.mark.parametrize("data", DATA_SETS)
def test_ours_and_a_bare_loop_run_a_few_steps(tmp_path: Path, data: str) -> None:
    found, _ = run_quickly(tmp_path, "training", "--technique", "lora", "--data", data)
    assert all(entry.keys() == KEYS for entry in found)
    assert [entry["value"] > 0 for entry in found if entry["unit"] == "tokens per s"] == [True, True]


def test_without_a_gpu_its_bars_are_not_run() -> None:
    found = gpu.entries([])
    assert [(entry.value, entry.bar, entry.holds) for entry in found] == [
        (None, bar, False) for bar in (0.58, 0.51, 1.25)
    ]
    assert all(entry.name.endswith("not run") for entry in found)


def test_the_fastest_way_is_judged_and_lora_against_full_in_the_same_way() -> None:
    ways = [("full", "plain", 0.50, 5000), ("full", "fast", 0.59, 5600), ("lora", "plain", 0.45, 7000),
            ("lora", "fast", 0.49, 6720)]  # fmt: skip
    plan = {"planned_step_time_s": 1.1, "step_time_s": 1.0, "planned_gib": 70, "peak_gib": 80}
    found = gpu.entries([
        {"technique": technique, "name": name, "mfu": mfu, "tokens_per_s": speed, "gpu": card,
         "settings": [name] if name == "fast" else [], **plan}
        for card in ("H100 80GB SXM", gpu.GPU)
        for technique, name, mfu, speed in ways
    ])  # fmt: skip
    (*of_ways, ratio, time_of_one, time_of_other, memory), others = found[:8], found[8:]
    assert {entry.holds for entry in others} == {None}
    assert [entry.value for entry in (time_of_one, time_of_other, memory)] == pytest.approx([0.1, 0.1, 0.125])
    assert [entry.holds for entry in of_ways] == [None, True, None, False]
    assert [entry.value for entry in of_ways[:2]] + [of_ways[3].value] == [0.50, 0.59, 0.49]
    assert (ratio.value, ratio.holds) == (1.2, False)


def test_a_trial_on_a_gpu_takes_its_place_in_the_file(tmp_path: Path) -> None:
    path, record = tmp_path / "trials.json", {"technique": "lora", "name": "plain", "gpu": gpu.GPU, "mfu": 0.4}
    gpu_trial.keep([record, {**record, "gpu": "another"}], path)
    gpu_trial.keep([{**record, "mfu": 0.5}, {**record, "name": "fast"}], path)
    assert [(each["name"], each["gpu"], each["mfu"]) for each in gpu.kept_trials(path)] == [
        ("plain", gpu.GPU, 0.5),
        ("plain", "another", 0.4),
        ("fast", gpu.GPU, 0.4),
    ]


@pytest.mark.parametrize(
    ("technique", "name", "products"),
    [("full", "compiled, 4 micro-batches a step", 6), ("lora", "compiled", 4)],
)
def test_kept_trials_have_the_mfu_of_the_one_count(technique: str, name: str, products: int) -> None:
    """Layers of Llama-3.1-8B by hand; its head is frozen, and rank 8 of LoRA has 21 million weights."""
    (kept,) = (each for each in gpu.kept_trials() if (each["technique"], each["name"]) == (technique, name))
    layers, head, adapters = 32 * 218_103_808, 128_256 * 4096, 20_971_520 * (technique == "lora")
    per_token = products * layers + 6 * adapters + 4 * head * (1 - 1 / 4096) + 6 * 32 * 4096 * 4096
    assert kept["flops_per_token"] == pytest.approx(per_token, rel=1e-9)
    peak = find_gpu(gpu.GPU).tflops_dense["bf16"] * 1e12
    assert kept["mfu"] == pytest.approx(kept["tokens_per_s"] * per_token / peak, rel=1e-9)
    assert kept["flops_formula"] == COUNTED


def test_published_runs_have_an_mfu_of_the_same_count() -> None:
    """KempnerForge trains the head, too; NeMo's adapters have rank 16."""
    kempner, nemo, _ = (next(rate for rate in published_rates() if rate.label == label) for label in OWN_MFU)
    layers, head, scores = 32 * 218_103_808, 128_256 * 4096, 6 * 32 * 4096 * 4096
    peak = find_gpu(gpu.GPU).tflops_dense["bf16"] * 1e12
    assert mfu_of(kempner) == pytest.approx(10_471 * (6 * (layers + head) + scores) / peak)
    adapters = 2 * 20_971_520
    assert mfu_of(nemo) == pytest.approx(12_472.9 * (4 * (layers + head) + 6 * adapters + scores) / peak)


def test_kernels_are_told_apart_by_their_names() -> None:
    kinds = {
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<128>>": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": "attention",
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTN": "products",
        "triton_poi_fused__to_copy_add_mul_silu_3": "compiled",
        "Memcpy DtoD (Device -> Device)": "copies",
        "kOptimizerStatic8bit2StateBlockwise<__nv_bfloat16, 0>": "optimizer",
        "void at::native::vectorized_elementwise_kernel<4>": "others",
    }
    assert {name: kind_of(name) for name in kinds} == kinds


@pytest.mark.parametrize("trial", gpu_trial.TRIALS)
def test_each_trial_on_a_gpu_has_the_most_rows_that_are_planned_to_fit(trial: gpu_trial.Trial) -> None:
    h200 = trial.planned(find_gpu(gpu.GPU))
    assert (h200.fits, h200.job.batch.rows) == (True, gpu_trial.ROWS)
    assert trial.planned(replace(find_gpu(gpu.GPU), memory_gib=78.0)).job.batch.rows in (1, 2)
