"""Tables say what the records say, and speed-ups are stated against the right run."""

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from bench import report
from bench.page.runs import values_of
from bench.tables import outcomes, pages
from bench.tables.pages import MODULES, TABLES, rendered, with_tables
from bench.tables.table import approach
from common.base.run_config import RunConfig
from common.base.run_folders import run_folders
from common.base.specs import PARALLELISMS, TASKS, TECHNIQUES
from common.records.store import Record, default_run_name, kept_records
from common.reporting.columns import column
from common.reporting.rows import (
    Metric,
    baseline_of,
    clock,
    clock_seconds,
    completed,
    own_table,
)
from common.reporting.tables import side_by_side
from common.reporting.tasks import OwnTable


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
    columns = ["Training speedup factor", "Upper bound"]
    strong, weak = TABLES["ddp-strong"](records), TABLES["ddp-weak"](records).query("Figures == 'measured'")
    ceilings = [
        f"{run['machine_ceiling'][kind]:.2f}x" for run, kind in zip(records[1:], ("strong", "weak"), strict=True)
    ]
    assert strong[columns].values.tolist() == [["1.00x", "1x"], ["1.67x", ceilings[0]]]
    assert weak[columns].values.tolist() == [["1.00x", "1x"], ["2.00x", ceilings[1]]]
    front = TABLES["front"](records)[["What", "Batch size", "Speed-up"]]
    assert front.values.tolist() == [
        ["LoRA", "16 x1", "1.00x"],
        ["LoRA with DDP", "8 x2", "1.67x"],
        ["LoRA with DDP, same batch each", "16 x2", "2.00x"],
    ]
    del records[1]["machine_ceiling"]
    assert TABLES["ddp-strong"](records)["Upper bound"].tolist() == ["1x", "not run"]


def test_scaling_stands_beside_what_was_published_and_one_device_stands_once(records: list[Record]) -> None:
    shown = TABLES["ddp-scaling"](records)[["Batch size", "VRAM scaling", "Time", "Speed-up"]].values.tolist()
    assert shown[:3] == [
        ["14 x1", "1x (48G x1)", "23:51", "1.00x"],
        ["14 x2", "2x (48G x2)", "12:29", "1.91x"],
        ["14 x4", "4x (48G x4)", "6:39", "3.59x"],
    ]
    assert shown[3:] == [
        ["16 x1", "no GPU", "1:40", "1.00x"],
        ["8 x2", "no GPU", "1:00", "1.67x"],
        ["16 x2", "no GPU", "0:50", "2.00x"],
    ]


def test_a_learning_rates_table_leaves_out_what_learns_nothing(records: list[Record]) -> None:
    columns = ["Figures", "Effective batch"]
    measured = [["measured", "16 x1"], ["measured", "8 x2"], ["measured", "16 x2"]]
    assert TABLES["ddp-rates"](records)[columns].values.tolist()[3:] == measured
    records[0]["config"]["weights"] = "random"
    assert TABLES["ddp-rates"](records)[columns].values.tolist()[3:] == measured[1:]


@pytest.mark.parametrize(
    ("part", "setting", "value"),
    [
        ("config", "num_train_epochs", 1),
        ("config", "seed", 7),
        ("config", "train_rows", 65),
        ("config", "model", "other"),
        ("config", "max_length", 99),
        ("config", "eval_steps", 0.5),
        ("environment", "devices", ["another processor"]),
    ],
)
def test_runs_of_other_work_or_machines_are_not_compared(
    records: list[Record], part: str, setting: str, value: object
) -> None:
    single, strong, _ = records
    assert baseline_of(strong, records, "effective_batch_size") is single
    single[part][setting] = value
    assert baseline_of(strong, records, "effective_batch_size") is None
    assert TABLES["ddp-strong"](records).empty


def test_a_record_older_than_a_setting_ran_with_its_default(records: list[Record]) -> None:
    single, strong, _ = records
    del single["config"]["max_length"]
    assert baseline_of(strong, records, "effective_batch_size") is single
    strong["config"]["max_length"] = 99
    assert baseline_of(strong, records, "effective_batch_size") is None


def test_hybrid_sharding_is_named(records: list[Record]) -> None:
    single, strong, _ = records
    strong["config"]["dp_replicate_size"] = 2
    assert baseline_of(strong, [single], "effective_batch_size") is single
    assert "(2 copies)" in approach(strong)


def test_a_failed_run_is_a_column_not_a_gap(records: list[Record]) -> None:
    failed = {key: records[0][key] for key in ("technique", "parallel", "run_folder", "config")}
    failed |= {"status": "oom", "error": "OutOfMemoryError: no", "run_name": "big"}
    assert "oom: OutOfMemoryError: no" in side_by_side([records[0], failed]).loc["status"].tolist()
    assert TABLES["master"]([failed]).empty
    assert len(TABLES["results-not-run"]([failed])) == sum(run.task == "chat" for run in run_folders().values())


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
    metric = Metric("preferred_share", "the preferred answers are likelier", "higher", "{:.0%}")
    pairs = OwnTable("run on pairs", (metric,), lambda records: completed(records, task="pairs"), ("seed", "steps"))
    monkeypatch.setitem(sys.modules, "pairs", SimpleNamespace(PAIRS=pairs))
    task = replace(TASKS["chat"], name="pairs", folder_for_one="3.9_pairs", reporting="pairs:PAIRS", named_by=("rows",))
    monkeypatch.setitem(TASKS, "pairs", task)
    single, strong, _ = records
    strong["config"]["task"], strong["quality"]["after"]["preferred_share"] = "pairs", 0.9
    strong["quality"]["before"]["preferred_share"] = 0.5
    assert (completed([single, strong]), completed([single, strong], task="pairs")) == ([single], [strong])
    metrics = [values_of(run)["metric"] for run in (single, strong)]
    assert metrics == ["fact recall", "the preferred answers are likelier"]
    monkeypatch.setattr(report, "results_of_this_machine", lambda: [single, strong])
    monkeypatch.setattr(sys, "argv", ["report", "--results"])
    report.main()
    of_pairs = [word for word in capsys.readouterr().out.split()[-8:] if "-" not in word]
    assert of_pairs == ["Pairs", "(3.9)", "Seed", "Steps", "42", str(strong["steps"])]
    run = RunConfig().changed_to(task="pairs", train_rows=5)
    assert default_run_name(run, "python") == "python-5rows-seed42"


def test_tables_have_names_of_their_own_and_tasks_what_is_shown_of_them() -> None:
    assert len(TABLES) == sum(len(module.TABLES) for module in MODULES)
    for table in (own_table(task) for task in TASKS.values() if task.reporting):
        assert (len(table.metrics) > 1, table.text([])) == (True, f"no {table.runs} is completed yet")


def test_data_without_facts_have_no_share_of_them(records: list[Record]) -> None:
    for when in ("before", "after"):
        records[0]["quality"][when]["facts_said_share"] = None
    assert "no facts in the data" in rendered("lora-quality", records)
    assert "no facts in the data" in side_by_side(records).to_string()


def test_a_peak_that_was_not_planned_or_not_measured_is_not_run() -> None:
    for memory in ([], [{"planned_gib": None, "peak_training_gib": 1.0}], [{"planned_gib": 1.0}]):
        assert column("planned").cell({"status": "completed", "memory": memory}) == "not run"


def test_scaling_factors_are_multiples_of_the_baselines_gpus(records: list[Record]) -> None:
    columns = ["CUDA scaling factor", "VRAM scaling factor"]
    one_device, two = TABLES["ddp-weak"](records)[columns].values.tolist()[:2]
    assert one_device == two == ["no GPU", "no GPU"]
    for record in records:
        record["environment"]["devices"] = ["NVIDIA RTX A6000"]
    assert TABLES["ddp-weak"](records)[columns].values.tolist()[:2] == [
        ["1x (10,752 x1)", "1x (47 GiB x1)"], ["2x (10,752 x2)", "2x (47 GiB x2)"]
    ]  # fmt: skip


@pytest.fixture
def measured_by_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Write entries into the benchmark's file: name, value, unit, bar, what the bar is, whether it holds, command."""
    path = tmp_path / "bench.json"
    monkeypatch.setattr(outcomes, "BENCH_FILE", path)
    columns = ("name", "value", "unit", "bar", "bar_is", "holds", "command")
    return lambda *entries: path.write_text(json.dumps([dict(zip(columns, each, strict=True)) for each in entries]))


def test_the_bench_table_says_what_holds_without_the_worst_points(measured_by_bench: Callable) -> None:
    ours, plan = "training, lora, ours", "planner, a against b"
    measured_by_bench(
        (f"{ours}: non-padding tokens", 6163.4, "tokens per s", None, "at least", None, "training"),
        (f"{ours} against bare, tokens per second", 0.951, "ratio", 0.95, "at least", True, "training"),
        ("training, lora, time to the loss, the soonest other tool (trainer) over ours", 1.2, "ratio", 1.0, "at least",
         True, "training"),
        (f"{plan}: worst error (x 1x8: 3.90 of 5.55 GiB)", 0.298, "share", 0.05, "at most", False, "planner"),
        (f"{plan}: mean error", 0.0042, "share", 0.02, "at most", True, "planner"),
        (f"{plan}: other error not run", None, "share", 0.02, "at most", False, "planner"),
    )  # fmt: skip
    assert TABLES["bench"]([]).values.tolist() == [
        ["Training", "lora, ours against bare, tokens per second", "0.951 ratio", "≥ 0.95", "yes"],
        ["Training", "lora, time to the loss, the soonest other tool (trainer) over ours", "1.200 ratio", "≥ 1", "yes"],
        ["Planner", "a against b: worst error", "29.8%", "≤ 5%", "**no**"],
        ["Planner", "a against b: mean error", "0.4%", "≤ 2%", "yes"],
        ["Planner", "a against b: other error", "not run", "≤ 2%", "not run"],
    ]


def test_the_planners_table_has_its_entries_without_a_bar(measured_by_bench: Callable) -> None:
    measured_by_bench(
        ("planner, a against b, 7 points: mean error", 0.0042, "share", None, "at most", None, ""),
        ("training, lora, ours", 1.2, "ratio", 1.0, "at least", True, ""),
        ("planner, a against c: worst error not run", None, "share", 0.05, "at most", None, ""),
    )
    assert TABLES["bench-planner"]([]).values.tolist() == [
        ["a against b, 7 points: mean error", "0.4%", "", ""],
        ["a against c: worst error", "not run", "≤ 5%", "not run"],
    ]


def test_the_planners_errors_in_short_are_those_of_the_tables_that_show_all(measured_by_bench: Callable) -> None:
    measured_by_bench(
        ("planner, closed form against dry run, 7 points: mean error", 0.0042, "share", None, "at most", None, ""),
        ("planner, closed form against dry run: worst error (x: 1 of 2 GiB)", 0.05, "share", None, "at most", None, ""),
    )
    lines = TABLES["found 1.1"]([]).set_index("Compared with")
    assert lines.loc["the dry run", ["Points", "Error", "Spread"]].tolist() == ["7", "0.4%", "at most 5.0%"]
    assert lines.loc["our kept runs", ["Points", "Error"]].tolist() == [0, "not run"]
    memory, rates = TABLES["published-memory"]([]).set_index("Source"), TABLES["rates-by-source"]([]).iloc[-1]
    sources = {"held-out peaks": "held out, without GRPO", "those of GRPO": "AgileRL, GRPO with LoRA"}
    for line, source in sources.items():
        figures = memory.loc[source, ["Points", "Mean error"]].tolist()
        assert lines.loc[line, ["Points", "Error"]].tolist() == figures
    assert lines.loc["fitted rates", "Points"] == rates["Points"]


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
    readme, page = tmp_path / "README.md", tmp_path / "results.html"
    monkeypatch.setattr(pages, "readmes", lambda: [readme])
    for name, value in {"REPOSITORY": tmp_path, "PAGE": page, "page_of": lambda records: "the page"}.items():
        monkeypatch.setattr(report, name, value)
    monkeypatch.setattr(sys, "argv", ["report", "--check"])
    table = rendered("ddp-strong", kept_records())
    for shown, drawn, exit_code in (("1.99x\n", "the page", 1), (table, "an older page", 1), (table, "the page", 0)):
        readme.write_text(f"<!-- table: ddp-strong -->\n{shown}<!-- /table -->\n")
        page.write_text(drawn)
        with pytest.raises(SystemExit, match=str(exit_code)):
            report.main()
        assert ("out of date" in capsys.readouterr().out) == bool(exit_code)


@given(st.integers(0, 10**6))
def test_clock_and_back(seconds: int) -> None:
    assert clock_seconds(clock(seconds)) == seconds


def test_clock_reads_as_the_sources_do() -> None:
    assert (clock(59.6), clock(749), clock(4555)) == ("1:00", "12:29", "1:15:55")
