"""Classification's tables say what its records say, call what nobody ran `not run`, and leave the chat tables alone."""

import copy
from dataclasses import replace

import pandas as pd
import pytest

from common.base.paths import REPOSITORY
from common.base.run_folders import literal_of
from common.base.specs import TASKS
from common.records.store import Record, kept_records
from common.reporting.classification import (
    details_table,
    results_text,
    setting_name,
    settings_of,
    settings_table,
)
from common.reporting.rows import LORA, completed, task_of
from common.reporting.tables import TABLES

FOLDER = "3.1_text_classification/run_0_cpu_x2"
FOUND = {
    "accuracy": 0.9,
    "accuracy_interval": [0.85, 0.95],
    "macro_f1": 0.8,
    "macro_f1_interval": [0.75, 0.84],
    "rows": 3,
    "labels": ["events", "tickets"],
    "confusion": [[1, 1], [0, 1]],
}
PIPELINE = {"allowed_speedup": 1.5, "share_of_allowed": 0.6}


@pytest.fixture
def lora() -> Record:
    return next(each for each in completed(kept_records(), LORA) if each["launcher"] == "python")


def classification(
    lora: Record, parallel: str, train_time_s: float, micro_batches: int = 1, seed: int = 42, **figures: object
) -> Record:
    """A record of 3.1 made of a LoRA one; the steps have 32 rows in all."""
    record = copy.deepcopy(lora)
    run = literal_of(REPOSITORY / FOLDER)
    single = parallel == "single"
    rows = run.per_device_train_batch_size if parallel == "ddp" else run.effective_batch_size
    changed = {
        "parallel": parallel,
        "devices": 1 if single else 2,
        "per_device_train_batch_size": rows,
        "micro_batches": micro_batches,
    }
    config = run.changed_to(
        **changed, **({"schedule": "gpipe"} if parallel == "pp" and micro_batches == 1 else {}), seed=seed
    )
    record |= {
        "technique": "full",
        "parallel": parallel,
        "run_folder": FOLDER,
        "run_name": f"full-{parallel}-{micro_batches}-{seed}",
        "launcher": "python" if single else "torchrun",
        "command": f"run {parallel}",
        "config": config.to_dict(),
        "effective_batch_size": config.effective_batch_size,
        "train_time_s": train_time_s,
        "best_accuracy": 0.9 + seed / 1000,
        "quality": {"before": FOUND, "after": FOUND},
        "machine_ceiling": None,
    }
    return record | figures


@pytest.fixture
def records(lora: Record) -> list[Record]:
    """One device, DDP with two seeds, and pipelines with one and eight micro-batches."""
    stages = [{"stage": 0, "idle_share": 0.25}, {"stage": 1, "idle_share": 0.5}]
    return [
        classification(lora, "pp", 100.0, 8, pipeline=PIPELINE, stages=stages),
        classification(lora, "pp", 125.0, 1, pipeline=PIPELINE, stages=stages),
        classification(lora, "ddp", 80.0, seed=42, machine_ceiling={"strong": 1.6, "reached": 0.75}),
        classification(lora, "ddp", 70.0, seed=12, machine_ceiling={"strong": 1.6, "reached": 0.75}),
        classification(lora, "single", 84.0, seed=12),
        classification(lora, "single", 120.0),
    ]


def measured_rows(records: list[Record]) -> dict[str, dict[str, str]]:
    """Of both tables, by setting."""
    table = settings_table(records)
    compared = {row["Setting"]: row for row in table[table["Figures"] == "measured"].to_dict("records")}
    details = {row["Setting"]: row for row in details_table(records).to_dict("records")}
    assert list(compared) == list(details)
    return {setting: row | details[setting] for setting, row in compared.items()}


def test_settings_are_named_and_one_micro_batch_is_naive_model_parallel(records: list[Record]) -> None:
    assert list(measured_rows(records)) == [
        "Full fine-tuning",
        "Full fine-tuning with DDP",
        "Full fine-tuning with PP, 1 micro-batch (naive MP)",
        "Full fine-tuning with PP, 8 micro-batches",
    ]
    assert setting_name("lora", "tp", 1) == "LoRA with TP"


def test_seeds_are_one_row_with_their_mean_and_range(records: list[Record]) -> None:
    rows = measured_rows(records)
    assert rows["Full fine-tuning with DDP"]["Best accuracy"] == "0.9270 (0.9120 to 0.9420)"
    assert rows["Full fine-tuning with DDP"]["Seeds"] == "2"
    piped = rows["Full fine-tuning with PP, 8 micro-batches"]
    assert (piped["Best accuracy"], piped["Seeds"]) == ("0.9420", "1")
    assert piped["Test accuracy (95 % interval)"] == "0.9000 (0.850 to 0.950)"
    assert piped["Test macro-F1 (95 % interval)"] == "0.8000 (0.750 to 0.840)"


def test_speedups_are_against_one_device_with_the_same_seed_and_rows(records: list[Record]) -> None:
    rows = measured_rows(records)
    ddp = rows["Full fine-tuning with DDP"]  # of the first seed, 12: 84 s over 70 s
    assert (ddp["Speed-up"], ddp["Allowed by machine and bubble"], ddp["Share of allowed, steps alone"]) == (
        "1.20x",
        "1.60x",
        "0.75",
    )
    piped = rows["Full fine-tuning with PP, 8 micro-batches"]  # 120 s over 100 s; the rest is of its passes
    assert (piped["Speed-up"], piped["Allowed by machine and bubble"]) == ("1.20x", "1.50x")
    assert (piped["Share of allowed, steps alone"], piped["Idle share per stage"]) == ("0.60", "25% / 50%")
    one = rows["Full fine-tuning"]
    assert (one["Speed-up"], one["Share of allowed, steps alone"], one["Idle share per stage"]) == ("1.00x", "-", "-")
    alone = measured_rows([record for record in records if record["parallel"] != "single"])
    assert {row["Speed-up"] for row in alone.values()} == {"no run on one device"}
    assert alone["Full fine-tuning with DDP"]["Share of allowed, steps alone"] == "0.75"  # measured in the run itself


def test_the_gpu_folders_settings_are_not_run(records: list[Record]) -> None:
    table = settings_table(records)
    waiting = table[table["Figures"] == "not run"]
    assert len(waiting) == 8
    assert set(waiting["Devices"]) == {"A100 80GB SXM x1", "A100 80GB SXM x2"}
    assert set(waiting["Best accuracy"]) == {"not run"}
    assert len(settings_table([]).query("Figures == 'not run'")) == 16


def test_published_pipelines_are_naive_model_parallel() -> None:
    table = settings_table([])
    published = table[table["Figures"].str.startswith("published")]
    assert published["Setting"].tolist() == [
        "Full fine-tuning",
        "Full fine-tuning with DDP",
        "Full fine-tuning with PP, 1 micro-batch (naive MP)",
        "LoRA",
        "LoRA with DDP",
        "LoRA with PP, 1 micro-batch (naive MP)",
    ]
    assert published["Speed-up"].tolist() == ["1.00x", "1.96x", "0.96x", "1.00x", "2.08x", "0.95x"]
    assert published["Best accuracy"].tolist()[0] == "0.9775"
    assert not published.isin(["not run"]).any(axis=None)


@pytest.mark.parametrize("name", ["master", "full-speed", "full-quality"])
def test_records_of_classification_stand_in_no_chat_table(records: list[Record], name: str) -> None:
    kept = kept_records()
    pd.testing.assert_frame_equal(TABLES[name]([*kept, *records]), TABLES[name](kept))
    assert "roberta" not in str(TABLES[name](kept).to_dict())  # nor does its folder that nobody has run
    assert settings_of([record for record in kept if task_of(record) == "chat"]) == []


def test_runs_of_a_notebook_and_failed_ones_are_left_out(records: list[Record]) -> None:
    records[0]["launcher"], records[1]["status"] = "notebook", "failed"
    assert list(measured_rows(records)) == ["Full fine-tuning", "Full fine-tuning with DDP"]


def test_a_task_that_classifies_needs_no_line_here(records: list[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "topics", replace(TASKS["classification"], name="topics"))
    for record in records:
        record["config"]["task"] = "topics"
    assert len(measured_rows(records)) == 4


def test_the_terminals_table_has_a_line_for_each_setting(
    records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert results_text([]) == "no classification run is completed yet"
    lines = results_text(records).splitlines()
    assert any(line.startswith("Full fine-tuning with PP, 1 micro-batch") for line in lines)
    assert any(line.startswith("Full fine-tuning ") and "0.9270 (0.9120 to 0.9420)" in line for line in lines)
    assert max(map(len, lines)) <= 120
