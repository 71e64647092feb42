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
    run, single = literal_of(REPOSITORY / FOLDER), parallel == "single"
    rows = run.per_device_train_batch_size if parallel == "ddp" else run.effective_batch_size
    config = run.changed_to(
        parallel=parallel,
        devices=1 if single else 2,
        per_device_train_batch_size=rows,
        micro_batches=micro_batches,
        seed=seed,
        **({"schedule": "gpipe"} if parallel == "pp" and micro_batches == 1 else {}),
    )
    made = {
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
    return copy.deepcopy(lora) | made | figures


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


def said_of(row: dict[str, str], *columns: str) -> list[str]:
    return [row[column] for column in columns]


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
    assert said_of(rows["Full fine-tuning with DDP"], "Best accuracy", "Seeds") == ["0.9270 (0.9120 to 0.9420)", "2"]
    intervals = [f"Test {score} (95 % interval)" for score in ("accuracy", "macro-F1")]
    piped = said_of(rows["Full fine-tuning with PP, 8 micro-batches"], "Best accuracy", "Seeds", *intervals)
    assert piped == ["0.9420", "1", "0.9000 (0.850 to 0.950)", "0.8000 (0.750 to 0.840)"]


def test_speedups_are_against_one_device_with_the_same_seed_and_rows(records: list[Record]) -> None:
    columns = ("Speed-up", "Allowed by machine and bubble", "Share of allowed, steps alone", "Idle share per stage")
    rows = {setting: said_of(row, *columns) for setting, row in measured_rows(records).items()}
    assert rows["Full fine-tuning"] == ["1.00x", "-", "-", "-"]
    assert rows["Full fine-tuning with DDP"][:3] == ["1.20x", "1.60x", "0.75"]  # of the first seed, 12: 84 s over 70 s
    piped = rows["Full fine-tuning with PP, 8 micro-batches"]  # 120 s over 100 s; the rest is of its passes
    assert piped == ["1.20x", "1.50x", "0.60", "25% / 50%"]
    alone = measured_rows([record for record in records if record["parallel"] != "single"])
    assert {row["Speed-up"] for row in alone.values()} == {"no run on one device"}
    assert alone["Full fine-tuning with DDP"]["Share of allowed, steps alone"] == "0.75"  # measured in the run itself


def test_records_of_classification_stand_in_no_chat_table(records: list[Record]) -> None:
    kept = kept_records()
    for name in ("master", "full-speed", "full-quality"):
        without = TABLES[name](kept)
        pd.testing.assert_frame_equal(TABLES[name]([*kept, *records]), without)
        assert "roberta" not in str(without.to_dict())  # nor does its folder that nobody has run
    assert settings_of([record for record in kept if task_of(record) == "chat"]) == []


def test_another_task_that_classifies_is_shown_but_runs_of_a_notebook_and_failed_ones_are_not(
    records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "topics", replace(TASKS["classification"], name="topics"))
    for record in records:
        record["config"]["task"] = "topics"
    records[0]["launcher"], records[1]["status"] = "notebook", "failed"
    assert list(measured_rows(records)) == ["Full fine-tuning", "Full fine-tuning with DDP"]


def test_the_terminals_table_has_a_line_for_each_setting(
    records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert results_text([]) == "no classification run is completed yet"
    lines = results_text(records).splitlines()
    assert any(line.startswith("Full fine-tuning with PP, 1 micro-batch") for line in lines)
    assert any(line.startswith("Full fine-tuning ") and "0.9270 (0.9120 to 0.9420)" in line for line in lines)
    assert max(map(len, lines)) <= 120
