"""Tables say what the records say, and speed-ups are stated against the right run."""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import report
from common.base.run_config import RunConfig
from common.base.run_folders import run_folders
from common.base.specs import PARALLELISMS, TASKS, TECHNIQUES
from common.records.store import Record, default_run_name, kept_records
from common.reporting import benchmark
from common.reporting.page_runs import values_of
from common.reporting.rows import (
    Metric,
    all_own_tables,
    approach,
    baseline_of,
    clock,
    clock_seconds,
    completed,
    hardware_factors,
    measured_quality,
    published_results,
)
from common.reporting.tables import TABLES, rendered, side_by_side, with_tables


@pytest.fixture
def records() -> list[Record]:
    """One device at batch 16 in 100 s; two ranks at 8 rows each in 60 s, and at 16 rows each in 50 s."""
    kept = [record for record in kept_records() if record["config"]["learning_rate_scaling"] == "none"]
    single = copy.deepcopy(next(record for record in kept if record["launcher"] == "python"))
    strong, weak = (
        copy.deepcopy(
            next(r for r in kept if r["launcher"] == "torchrun" and r["config"]["per_device_train_batch_size"] == batch)
        )
        for batch in (8, 16)
    )
    single["train_time_s"], strong["train_time_s"], weak["train_time_s"] = 100.0, 60.0, 50.0
    return [single, strong, weak]


def test_speedups_are_times_against_the_one_device_run_with_the_same_batch(records: list[Record]) -> None:
    strong, weak = TABLES["ddp-strong"](records), TABLES["ddp-weak"](records)
    measured = weak[weak["Figures"] == "measured"]
    assert strong["Training speedup factor"].tolist() == ["1.00x", "1.67x"]
    assert measured["Training speedup factor"].tolist() == ["1.00x", "2.00x"]
    assert strong["Machine's ceiling"].tolist()[1] == f"{records[1]['machine_ceiling']['strong']:.2f}x"
    assert measured["Machine's ceiling"].tolist()[1] == f"{records[2]['machine_ceiling']['weak']:.2f}x"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_train_epochs", 1),
        ("seed", 7),
        ("train_rows", 65),
        ("model", "other"),
        ("max_length", 99),
        ("eval_steps", 0.5),
    ],
)
def test_runs_of_other_work_are_not_compared(records: list[Record], setting: str, value: object) -> None:
    single, strong, _ = records
    assert baseline_of(strong, records, "effective_batch_size") is single
    single["config"][setting] = value
    assert baseline_of(strong, records, "effective_batch_size") is None
    assert TABLES["ddp-strong"](records).empty


def test_runs_on_other_machines_are_not_compared(records: list[Record]) -> None:
    single, strong, _ = records
    single["environment"]["devices"] = ["another processor"]
    assert baseline_of(strong, records, "effective_batch_size") is None


def test_a_record_older_than_a_setting_ran_with_its_default(records: list[Record]) -> None:
    single, strong, _ = records
    del single["config"]["max_length"]
    assert baseline_of(strong, records, "effective_batch_size") is single
    strong["config"]["max_length"] = 99
    assert baseline_of(strong, records, "effective_batch_size") is None


def test_records_of_a_parallelism_or_a_task_from_outside_are_passed_over(records: list[Record]) -> None:
    single, strong, _ = records
    foreign = {**single, "parallel": "averaging"}
    other_task = {**single, "config": {**single["config"], "task": "counting"}}
    assert baseline_of(strong, [foreign, single], "effective_batch_size") is single
    assert completed([other_task, single]) == [single]


def test_hybrid_sharding_is_compared_with_one_device_and_named(records: list[Record]) -> None:
    single, strong, _ = records
    strong["config"]["dp_replicate_size"] = 2
    assert baseline_of(strong, records, "effective_batch_size") is single
    assert "(2 copies)" in approach(strong)


def test_a_run_without_a_ceiling_says_so(records: list[Record]) -> None:
    del records[1]["machine_ceiling"]
    assert TABLES["ddp-strong"](records)["Machine's ceiling"].tolist() == ["1x", "not run"]


def test_a_failed_run_is_a_column_not_a_gap(records: list[Record]) -> None:
    failed = {key: records[0][key] for key in ("technique", "parallel", "run_folder", "config")}
    failed |= {"status": "oom", "error": "OutOfMemoryError: no", "run_name": "big"}
    assert "oom: OutOfMemoryError: no" in side_by_side([records[0], failed]).loc["status"].tolist()
    assert TABLES["master"]([failed]).empty
    answering = [run for run in run_folders().values() if run.task == "chat"]
    assert len(TABLES["results-not-run"]([failed])) == len(answering)


def test_what_is_registered_at_run_time_stands_in_the_tables(
    records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TECHNIQUES, "dora", replace(TECHNIQUES["lora"], name="dora", label="DoRA"))
    monkeypatch.setitem(PARALLELISMS, "hsdp", replace(PARALLELISMS["fsdp"], name="hsdp", label="HSDP"))
    chat = replace(TASKS["chat"], parallelisms=(*TASKS["chat"].parallelisms, "hsdp"))
    monkeypatch.setitem(TASKS, "chat", chat)
    monkeypatch.setitem(TASKS, "dialogue", replace(chat, name="dialogue"))
    records[0] |= {"technique": "dora", "parallel": "hsdp", "config": {**records[0]["config"], "task": "dialogue"}}
    first = TABLES["master"](records).iloc[0]
    assert (first["Technique"], first["Devices"], first["Launcher"]) == ("DoRA", "1, HSDP", "python")
    assert side_by_side(records[:1]).loc["approach"].tolist() == ["DoRA with HSDP"]
    assert "Full fine-tuning with HSDP" in TABLES["sharding-memory"]([])["Approach"].tolist()


def test_a_task_with_tables_of_its_own_needs_its_row_and_its_module_alone(
    records: list[Record], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It chats, too, but stands in no table of chats; with a metric that no other task has."""
    pairs = ModuleType("pairs")
    pairs.TABLES, pairs.SHARED = {}, {}
    pairs.METRICS = (Metric("preferred_share", "the preferred answers are likelier", "higher", "{:.0%}"),)
    pairs.results_text = lambda runs: f"{len(completed(runs, reporting='pairs'))} run of pairs"
    monkeypatch.setitem(sys.modules, "pairs", pairs)
    task = replace(TASKS["chat"], name="pairs", folder_for_one="3.9_pairs", reporting="pairs", named_by=("rows",))
    monkeypatch.setitem(TASKS, "pairs", task)
    single, strong, _ = records
    strong["config"]["task"], strong["quality"]["after"]["preferred_share"] = "pairs", 0.9
    strong["quality"]["before"]["preferred_share"] = 0.5
    assert completed([single, strong]) == [single]
    assert completed([single, strong], reporting="pairs") == [strong]
    assert values_of(strong)["metric"] == "the preferred answers are likelier"
    assert values_of(single)["metric"] == "facts said"
    monkeypatch.setattr(report, "results_of_this_machine", lambda: [single, strong])
    monkeypatch.setattr(sys, "argv", ["report", "--results"])
    report.main()
    assert capsys.readouterr().out.endswith("Pairs (3.9)\n\n1 run of pairs\n")
    run = RunConfig().changed_to(task="pairs", train_rows=5)
    assert default_run_name(run, "python") == "python-5rows-seed42"


def test_modules_of_tasks_have_tables_with_names_of_their_own() -> None:
    names = [name for module in all_own_tables() for name in module.TABLES]
    assert len(names) == len(set(names))
    assert all(TABLES[name] is table for module in all_own_tables() for name, table in module.TABLES.items())
    for module in all_own_tables():
        assert module.SHARED.keys() <= module.TABLES.keys()
        assert module.METRICS
        assert isinstance(module.results_text([]), str)


def test_data_without_facts_have_no_share_of_them(records: list[Record]) -> None:
    for when in ("before", "after"):
        records[0]["quality"][when]["facts_said_share"] = None
    assert "no facts in the data" in rendered("lora-quality", records)
    assert "no facts in the data" in side_by_side(records).to_string()


def test_a_run_folder_without_a_record_is_a_row_that_says_so(records: list[Record]) -> None:
    for table in ("lora-quality", "lora-speed", "ddp-weak"):
        shown = TABLES[table](records)
        waiting = shown[shown["Figures"] == "not run"]
        assert any("H200" in row or "A6000" in row for row in waiting.to_string().splitlines()) or "quality" in table
        assert len(waiting) >= 2
        assert "nan" not in rendered(table, records)
    waiting = TABLES["results-not-run"](records)
    assert set(waiting["Run folder"]) >= {"2.1, `run_1_a6000_48g_x1`", "2.6, `run_3_a100_80g_x2_zero`"}
    assert "nan" not in rendered("results-not-run", records)


def test_scaling_factors_are_multiples_of_the_baselines_gpus(records: list[Record]) -> None:
    one, two = records[0], records[1]
    assert hardware_factors(two, one)["CUDA scaling factor"] == "no GPU"
    for record in (one, two):
        record["environment"]["devices"] = ["NVIDIA RTX A6000"]
    assert hardware_factors(two, one) == {
        "CUDA scaling factor": "2x (10,752 x2)",
        "VRAM scaling factor": "2x (47 GiB x2)",
    }


def test_the_learning_rates_scaling_is_shown_with_the_rate(records: list[Record]) -> None:
    records[1]["peak_learning_rate"] = records[1]["config"]["learning_rate"] * 2**0.5
    assert measured_quality(records[0])["Learning rate scaling"] == "1x (0.001)"
    assert measured_quality(records[1])["Learning rate scaling"] == "1.41x (0.00141)"


def test_what_a_part_of_a_table_shares_stands_above_it(records: list[Record]) -> None:
    records[1]["quality"]["before"]["facts_said_share"] = 0.5
    lines = rendered("master", records).splitlines()
    assert [line for line in lines if "facts said 50%" in line]
    assert sum(line.startswith("**LoRA**") for line in lines) == 2
    assert sum(line.startswith("| Devices") for line in lines) == 2
    assert sum(line.startswith(("| 1 ", "| 2, DDP ")) for line in lines) == len(records)


def test_the_readme_s_table_has_both_ways_to_compare(records: list[Record]) -> None:
    shown = TABLES["front"](records)
    assert shown["What"].tolist() == ["LoRA", "LoRA with DDP", "LoRA with DDP, same rows each"]
    assert shown["Rows per step"].tolist() == ["16 x1", "8 x2", "16 x2"]
    assert shown["Speed-up"].tolist() == ["1.00x", "1.67x", "2.00x"]


def test_two_cards_are_planned_until_something_does_not_fit() -> None:
    fits = TABLES["two-cards"]([])["Fits"].tolist()
    assert fits[-1] == "no"
    assert set(fits[:-1]) <= {"yes", "tight"}
    assert "yes" in fits


def test_what_the_demo_prints_is_of_kept_records() -> None:
    shown = rendered("demo", kept_records())
    assert "2.1 python-batch16-seed42" in shown
    assert "2.2 torchrun-batch8-seed42" in shown
    assert "speed-up at the same effective batch" in shown


def test_the_bench_table_says_what_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {
        "name": "a",
        "value": 1.31,
        "unit": "ratio",
        "bar": 1.3,
        "bar_is": "at least",
        "holds": True,
        "command": "x",
    }
    entries = [
        entry,
        {**entry, "value": 1.2, "holds": False},
        {**entry, "name": "a: not run", "value": None, "holds": False},
        {**entry, "name": "b", "bar": None, "holds": None},
    ]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(entries))
    monkeypatch.setattr(benchmark, "BENCH_FILE", path)
    assert TABLES["bench"]([])["Measured"].tolist() == ["1.310 ratio", "1.200 ratio", "not run"]
    table = TABLES["bench-all"]([])
    assert table["Holds"].tolist() == ["yes", "**no**", "not run", ""]
    assert table["Bar"].tolist() == [*["≥ 1.3"] * 3, ""]


def test_the_bench_tables_divide_names_and_keep_worst_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_tools = [
        ("training, lora, ours: non-padding tokens", 6163.4, "tokens per s", None, "training --tool ours"),
        ("training, lora, ours against bare, tokens per second", 0.951, "ratio", 0.95, "training"),
        ("training, lora, ours against the soonest other tool (trainer), times as soon at the loss", 1.2, "ratio", 1.0,
         "training"),
        ("planner, a against b: worst error (x 1x8: 3.90 of 5.55 GiB)", 0.298, "share", 0.05, "planner"),
        ("planner, a against b: mean error", 0.0042, "share", 0.02, "planner"),
    ]  # fmt: skip
    entries = [
        {"name": name, "value": value, "unit": unit, "bar": bar, "bar_is": "at most", "holds": True, "command": command}
        for name, value, unit, bar, command in of_tools
    ]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(entries))
    monkeypatch.setattr(benchmark, "BENCH_FILE", path)
    table = TABLES["bench-all"]([])
    assert table["Part"].tolist() == ["training, lora"] * 3 + ["planner, a against b"] * 2
    assert table["Command"].tolist() == ["`training`"] * 3 + ["`planner`"] * 2
    assert table["What"].tolist()[0] == "ours: non-padding tokens"
    assert table["What"].tolist()[2:] == ["time to the loss, the soonest other tool (trainer) over ours",
                                          "worst error", "mean error"]  # fmt: skip
    assert table["Measured"].tolist()[3:] == ["29.8%", "0.4%"]
    assert TABLES["bench"]([])["Bar"].tolist() == ["≤ 0.95", "≤ 1", "≤ 5%", "≤ 2%"]
    assert rendered("bench-worst", []) == "- a against b: x 1x8: 3.90 of 5.55 GiB\n"


def test_the_planners_errors_have_a_line_for_each_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = [
        ("a against b, 7 points: mean error", 0.0042, 0.02, True),
        ("a against b: worst error (x 1x8: 3.90 of 5.55 GiB)", 0.298, 0.05, False),
        ("a against c: mean error not run", None, 0.02, None),
        ("a against c: worst error not run", None, 0.05, None),
    ]
    entries = [
        {"name": f"planner, {name}", "value": value, "unit": "share", "bar": bar, "bar_is": "at most", "holds": holds}
        for name, value, bar, holds in figures
    ]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(entries))
    monkeypatch.setattr(benchmark, "BENCH_FILE", path)
    assert TABLES["planner-errors"]([]).to_dict("records") == [
        {"Compared with": "b", "Planned by": "a", "Points": "7", "Mean, worst error": "0.4%, 29.8%",
         "Allowed": "2%, 5%", "Holds": "**no**"},
        {"Compared with": "c", "Planned by": "a", "Points": "", "Mean, worst error": "not run",
         "Allowed": "2%, 5%", "Holds": "not run"},
    ]  # fmt: skip
    assert TABLES["planner-others"]([]).empty


def test_published_speedups_are_those_of_the_source(records: list[Record]) -> None:
    weak = TABLES["ddp-weak"](records)
    published = weak[weak["Figures"].str.startswith("published")]
    assert published["Training speedup factor"].tolist() == ["1.00x", "1.91x", "3.59x"]
    assert published["Training time"].tolist() == ["23:51", "12:29", "6:39"]
    assert all(result["source"] for result in published_results())


def test_a_typed_figure_is_overwritten_by_the_records(records: list[Record]) -> None:
    text = f"before\n<!-- table: ddp-strong -->\n{rendered('ddp-strong', records)}<!-- /table -->\nafter\n"
    assert with_tables(text, records) == text
    assert with_tables(text.replace("1.67x", "1.99x"), records) == text
    assert with_tables("<!-- table: ddp-strong -->\n<!-- /table -->", []) == (
        "<!-- table: ddp-strong -->\nnot run\n<!-- /table -->"
    )


def test_tables_check_exits_with_1_when_a_readme_is_out_of_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    monkeypatch.setattr(report, "readmes", lambda: [readme])
    monkeypatch.setattr(report, "REPOSITORY", tmp_path)
    monkeypatch.setattr(report, "PAGE", tmp_path / "results.html")
    monkeypatch.setattr(report, "page_of", lambda records: "the page")
    monkeypatch.setattr(sys, "argv", ["report", "--check"])
    table = rendered("ddp-strong", kept_records())
    for shown, page, exit_code in (("1.99x\n", "the page", 1), (table, "an older page", 1), (table, "the page", 0)):
        readme.write_text(f"<!-- table: ddp-strong -->\n{shown}<!-- /table -->\n")
        report.PAGE.write_text(page)
        with pytest.raises(SystemExit) as left:
            report.main()
        assert left.value.code == exit_code
        assert ("out of date" in capsys.readouterr().out) == bool(exit_code)


@given(st.integers(0, 10**6))
def test_clock_and_back(seconds: int) -> None:
    assert clock_seconds(clock(seconds)) == seconds


def test_clock_reads_as_the_sources_do() -> None:
    assert (clock(59.6), clock(749), clock(4555)) == ("1:00", "12:29", "1:15:55")
