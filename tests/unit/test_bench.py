"""The benchmark's bars judge, its clock interpolates, and a little of it runs."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from operator import itemgetter
from pathlib import Path

import pytest
import torch

from bench import gpu, real, scaling, training, variants, vocabulary
from bench.apart import measured_apart
from bench.clock import Check, Clock
from bench.entries import keep, measured, read_kept, save
from bench.recipe import LEAST, MOST, Material, Trial, joined, load_material, long_rows, material_of
from bench.tables.publications import OWN_MFU
from bench.tools import TOOLS
from bench.vocabulary import StepMeter
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.data.rows import IGNORED_LABEL
from common.data.splits import load_splits, tokens_of
from common.hardware.devices import find_gpu
from common.planning.published_rates import published_rates
from common.planning.step_speed import COUNTED
from common.records.store import VARIANTS, kept_records, words_of_command
from tests.forked import run_forked
from tests.unit import lease_stubs

KEYS = {"name", "value", "unit", "bar", "holds", "command", "bar_is"}


def run_quickly(folder: Path, part: str) -> list[dict]:
    """The entries that a part of the benchmark prints."""
    command, log = [sys.executable, "-m", "bench", part, "--quick"], folder / "log"
    code, said = run_forked(command, REPOSITORY, os.environ, log, timeout=300), log.read_text()
    assert code == 0, said
    return json.JSONDecoder().raw_decode(said, said.index("[\n"))[0]


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


def test_new_figures_of_a_part_take_the_place_of_its_older_ones(tmp_path: Path) -> None:
    for part, value in (("training", 1.0), ("planner", 2.0), ("training", 1.31)):
        save(part, [measured(f"{part}, speed", value, "ratio", "x", at_least=1.3)], tmp_path)
    other, new = json.loads((tmp_path / "bench.json").read_text())
    assert (other["name"], new) == ("planner, speed", {
        "name": "training, speed", "value": 1.31, "unit": "ratio", "bar": 1.3, "holds": True, "command": "x",
        "bar_is": "at least",
    })  # fmt: skip
    around = json.loads((tmp_path / "environment.json").read_text())
    assert around.keys() == {"training", "planner"}
    assert {"packages", "devices", "threads_per_rank", "commit", "dirty", "date"} <= around["training"].keys()


def clock_of(*checks: Check, rows: int = 160) -> Clock:
    row = {"input_ids": [0]}
    return Clock(Trial("ours", "lora", "short"), Material(None, [row] * rows, []), list(checks))


def test_the_target_is_met_between_two_checks() -> None:
    first, *later = Check(10, 1.0, 1.0), Check(20, 2.0, 0.01), Check(30, 3.0, 0.5)
    assert clock_of(first, *later).seconds_to_loss == pytest.approx(1.5)
    assert (clock_of(*later).seconds_to_loss, clock_of(first).seconds_to_loss) == (2.0, None)


def test_tokens_per_second_count_whole_epochs_only() -> None:
    assert clock_of(Check(5, 1.0, 1), Check(10, 2.0, 1), Check(15, 9.0, 1)).tokens_per_s == 80
    assert clock_of(Check(5, 1.0, 1)).tokens_per_s is None


def outcomes(seconds: dict[str, float | None], bare_tokens: float = 100) -> dict[str, list[training.Outcome]]:
    tokens = {tool: bare_tokens if tool == "bare" else 100.0 for tool in seconds}
    return {tool: [{"seconds_to_loss": value, "tokens_per_s": tokens[tool]}] * 3 for tool, value in seconds.items()}


ALL_HOLD = {"ours": 10, "bare": 5, "sft-best": 14, "sft-grouped": 12.1, "sft-packed": 15, "trainer": 11}


@pytest.mark.parametrize(
    ("changed", "bare_tokens", "holds"),
    [
        ({}, 105, [True, True, True]),
        ({"trainer": 9}, 105, [False, True, True]),
        ({"sft-packed": 11.9}, 105, [True, False, True]),
        ({}, 106, [True, True, False]),
        ({"ours": None}, 105, [False, False, True]),
        ({"sft-best": None}, 105, [True, True, True]),
        ({"sft-best": None, "sft-grouped": None, "sft-packed": None}, 105, [True, False, True]),
    ],
    ids=["all", "another tool", "packed", "too few tokens", "never there", "SFT never", "no SFT"],
)
def test_each_bar_can_fail(changed: dict[str, float | None], bare_tokens: float, holds: list[bool]) -> None:
    of_tools = outcomes({**ALL_HOLD, **changed}, bare_tokens)
    found = training.ratio_entries("short", "lora", of_tools)
    assert [entry.holds for entry in found] == holds
    assert all(entry.name.startswith("training, lora, ") for entry in found)
    del of_tools["sft-packed"]
    assert training.ratio_entries("short", "lora", of_tools) == []


def test_a_tool_that_never_gets_there_says_so() -> None:
    late, _ = training.tool_entries("short", "lora", outcomes({"ours": None}))
    assert (late.value, late.holds, "not reached" in late.name) == (None, None, True)


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
    clock = clock_of(rows=50 * 16)
    clock.start()
    assert not any(clock.step_done(None) for _ in range(30))
    assert [check.step for check in clock.checks] == [13, 25]
    clock.steps_per_epoch, clock.step, clock.checks = 7, 0, []
    for _ in range(14):
        clock.step_done(None)
    assert [check.step for check in clock.checks] == [2, 4, 6, 7, 9, 11, 13, 14]


def test_a_step_s_peak_counts_what_is_alive_at_once() -> None:
    meter = StepMeter(Trial("ours", "full", "random"), Material(None, [], []))
    layer = torch.nn.Linear(100, 100, bias=False)  # 40,000 bytes
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)  # makes nothing but its states, 80,000 bytes

    def step() -> bool:
        meter.on_step_begin(None, None, None, layer, optimizer)
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


@pytest.mark.parametrize(("tool", "peak", "holds"), [
    ("trainer", 201, [True, True]), ("trainer", 199, [False, True]), ("sft-best", 95, [True, False]),
])  # fmt: skip
def test_each_bar_of_the_large_vocabulary_can_fail(tool: str, peak: int, holds: list[bool]) -> None:
    peaks = {"ours": 100, "sft-best": 96, "trainer": 201, tool: peak}
    found = vocabulary.entries_of("full", peaks)
    assert [entry.holds for entry in found if entry.bar] == holds
    assert all(entry.name.startswith("vocabulary, full") for entry in found)


def test_what_fails_in_a_process_of_its_own_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        measured_apart(lease_stubs.fail)
    assert "the seventh row" in capfd.readouterr().err


@pytest.mark.slow
def test_a_tool_s_peak_is_measured(tmp_path: Path) -> None:
    found = run_quickly(tmp_path, "vocabulary")
    assert [(entry["unit"], entry["value"] > 0) for entry in found] == [("MiB", True)]


@pytest.mark.slow
def test_two_ranks_are_compared_with_one() -> None:
    found = measured_apart(scaling.measure, ranks=2, technique="full", global_batch_rows=64, rounds=1)
    assert found["speedup"] == pytest.approx(found["strong"] * found["reached"])


@pytest.mark.slow
def test_ours_and_a_bare_loop_run_a_few_steps(tmp_path: Path) -> None:
    found = run_quickly(tmp_path, "training")
    assert all(entry.keys() == KEYS for entry in found)
    assert [entry["value"] > 0 for entry in found if entry["unit"] == "tokens per s"] == [True] * 4


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_trains(tool: str) -> None:
    trial = Trial(tool, "lora", "short", train_rows=16)
    clock = Clock(trial, material_of(trial))
    TOOLS[tool](clock)
    assert clock.checks[-1].loss < clock.checks[0].loss


def test_without_a_gpu_its_bars_are_not_run() -> None:
    found = gpu.judged([])
    assert [(entry.value, entry.bar, entry.holds) for entry in found] == [
        (None, bar, False) for bar in (0.58, 0.51, 1.25)
    ]
    assert all(entry.name.endswith("not run") for entry in found)


def test_the_fastest_way_is_judged_and_lora_against_full_in_the_same_way() -> None:
    ways = [("full", "plain", 0.50, 5000), ("full", "fast", 0.59, 5600), ("lora", "plain", 0.45, 7000),
            ("lora", "fast", 0.49, 6720)]  # fmt: skip
    full, lora, ratio = gpu.judged([
        {"technique": technique, "name": name, "mfu": mfu + (card != gpu.GPU), "tokens_per_s": speed, "gpu": card}
        for card in ("H100 80GB SXM", gpu.GPU)
        for technique, name, mfu, speed in ways
    ])  # fmt: skip
    assert [(entry.value, entry.holds) for entry in (full, lora, ratio)] == [
        (0.59, True), (0.49, False), (1.2, False)
    ]  # fmt: skip
    assert "fast" in full.name


def test_a_trial_on_a_gpu_takes_its_place_in_the_file(tmp_path: Path) -> None:
    path, record = tmp_path / "trials.json", {"technique": "lora", "name": "plain", "gpu": gpu.GPU, "mfu": 0.4}
    for records in ([record, {**record, "gpu": "another"}], [{**record, "mfu": 0.5}, {**record, "name": "fast"}]):
        keep(records, path, itemgetter("technique", "name", "gpu"))
    assert [(each["name"], each["gpu"], each["mfu"]) for each in read_kept(path)] == [
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
    (kept,) = (each for each in read_kept(gpu.TRIALS_PATH) if (each["technique"], each["name"]) == (technique, name))
    layers, head, adapters = 32 * 218_103_808, 128_256 * 4096, 20_971_520 * (technique == "lora")
    per_token = products * layers + 6 * adapters + 4 * head * (1 - 1 / 4096) + 6 * 32 * 4096 * 4096
    assert kept["flops_per_token"] == pytest.approx(per_token, rel=1e-9)
    peak = find_gpu(gpu.GPU).tflops_dense["bf16"] * 1e12
    assert kept["mfu"] == pytest.approx(kept["tokens_per_s"] * per_token / peak, rel=1e-9)
    assert kept["flops_formula"] == COUNTED


def test_published_runs_have_an_mfu_of_the_same_count() -> None:
    """KempnerForge trains the head, too; NeMo's adapters have rank 16."""
    kempner, nemo, _ = (next(rate for rate in published_rates() if rate["label"] == label) for label in OWN_MFU)
    layers, head, scores = 32 * 218_103_808, 128_256 * 4096, 6 * 32 * 4096 * 4096
    peak = find_gpu(gpu.GPU).tflops_dense["bf16"] * 1e12
    assert kempner["mfu"] == pytest.approx(10_471 * (6 * (layers + head) + scores) / peak)
    adapters = 2 * 20_971_520
    assert nemo["mfu"] == pytest.approx(12_472.9 * (4 * (layers + head) + 6 * adapters + scores) / peak)


@pytest.mark.parametrize("trial", gpu.TRIALS)
def test_each_trial_on_a_gpu_has_the_most_rows_that_are_planned_to_fit(trial: gpu.Trial) -> None:
    h200 = trial.planned(find_gpu(gpu.GPU))
    assert (h200.fits, h200.job.batch.rows) == (True, gpu.ROWS)
    assert trial.planned(replace(find_gpu(gpu.GPU), memory_gib=78.0)).job.batch.rows in (1, 2)


@pytest.mark.parametrize("variant", variants.VARIANTS)
def test_a_variant_s_settings_are_its_own_config_s(variant: str) -> None:
    run, config = variants.run_of(variant, 1e-3), variants.VARIANTS[variant]
    for name in ("lora_alpha", "lora_dropout", "use_rslora"):
        assert getattr(run, name) == getattr(config, name, getattr(variants.RUN, name))
    assert run.lora_r == (config.r or variants.RUN.lora_r)  # OFT has blocks instead


def test_the_kept_variants_are_those_of_the_script_and_are_made_again_by_their_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = {record["run_name"]: record for record in kept_records(VARIANTS)}
    runs = [variants.run_of(*each) for each in product(variants.VARIANTS, variants.RATES)]
    assert kept.keys() == {run.run_name for run in runs}
    asked = []
    monkeypatch.setattr(variants, "compare", lambda *each: asked.append(each))
    for record in kept.values():
        _, _, module, *options = words_of_command(record)
        monkeypatch.setattr(sys, "argv", [module, *options])
        variants.main()
        run = variants.run_of(*asked[-1])
        assert (run.run_name, asked[-1][0]) == (record["run_name"], record["variant"])
        for name in ("model", "data", "learning_rate", "max_steps", "seed", "lora_r", "lora_alpha", "use_rslora"):
            assert record["config"][name] == getattr(run, name)


def test_speed_on_the_real_model_is_judged_against_both_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "smollm2_folder", lambda: None)
    speeds = {"ours": 100.0, "sft-best": 80.0, "bare": 110.0}
    asked = {}

    def repeats(tools: tuple[str, ...], seeds: tuple[int, ...], **trial: object) -> dict[str, list[dict[str, float]]]:
        asked.update(trial, seeds=seeds)
        return {tool: [{"tokens_per_s": speeds[tool]}] * len(seeds) for tool in tools}

    monkeypatch.setattr(real, "repeats", repeats)
    found = {entry.name.removeprefix("real, lora, "): entry for entry in real.entries(quick=False)}
    assert found["ours: non-padding tokens"].value == 100
    against = [found[f"ours against {tool}, tokens per second"] for tool in ("sft-best", "bare")]
    assert [(entry.value, entry.holds) for entry in against] == [(1.25, True), (pytest.approx(0.909, abs=1e-3), False)]
    assert (asked["model"], len(asked["seeds"])) == ("smollm2-135m", 3)
