"""What the pages do not show of classification: runs without one device, runs that are left out, and the terminal."""

import copy
from dataclasses import replace

import pandas as pd
import pytest

from bench.tables.tasks import TABLES
from common.base.specs import TASKS
from common.records.store import Record, kept_records
from common.reporting.rows import task_of
from common.reporting.tasks import CLASSIFICATION


@pytest.fixture
def records() -> list[Record]:
    return copy.deepcopy([record for record in kept_records() if task_of(record) == "classification"])


def measured(records: list[Record]) -> pd.DataFrame:
    return TABLES["classification-settings"](records).query("Figures == 'measured'").set_index("Setting")


def test_without_a_run_on_one_device_there_is_no_speed_up_but_a_share_of_what_is_allowed(
    records: list[Record],
) -> None:
    several = [record for record in records if record["parallel"] != "single"]
    assert set(measured(several)["Speed-up"]) == {"no run on one device"}
    shares = TABLES["classification-details"](several).set_index("Setting")[
        "Share of allowed, steps alone"
    ]  # measured in the run itself
    assert float(shares["Full fine-tuning with DDP"]) > 0
    assert float(shares["Full fine-tuning with PP, 8 micro-batches"]) > 0


def test_another_task_that_classifies_is_shown_but_runs_of_a_notebook_and_failed_ones_are_not(
    records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "topics", replace(TASKS["classification"], name="topics"))
    left_out = {"pp": {"launcher": "notebook"}, "tp": {"status": "failed"}}
    for record in records:
        record["config"]["task"] = "topics"
        record |= left_out.get(record["parallel"], {})
    assert set(measured(records).index) == {
        "Full fine-tuning", "Full fine-tuning with DDP", "LoRA", "LoRA with DDP"
    }  # fmt: skip


def test_the_terminals_table_has_a_line_for_each_setting(
    records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert CLASSIFICATION.text([]) == "no classification run is completed yet"
    accuracy, lines = (
        measured(records).loc["Full fine-tuning", "Best accuracy"],
        CLASSIFICATION.text(records).splitlines(),
    )
    assert any(line.startswith("Full fine-tuning with PP, 1 micro-batch") for line in lines)
    assert any(line.startswith("Full fine-tuning ") and accuracy in line for line in lines)
    assert max(map(len, lines)) <= 120
