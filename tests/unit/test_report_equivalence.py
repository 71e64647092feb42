"""The table of equal steps: largest differences in a cell, and what was not run this time kept from before."""

import json
from pathlib import Path

import pytest

from bench.tables.outcomes import TABLES
from tests.outcomes import merged


def outcome(technique: str, loss: float | None, weight: float | None, note: str = "") -> dict[str, object]:
    return {
        "task": "chat", "strategy": "DDP", "technique": technique, "note": note,
        "loss_difference": loss, "weight_difference": weight,
    }  # fmt: skip


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("bench.tables.outcomes.EQUIVALENCE", tmp_path / "equivalence.json")
    return tmp_path / "equivalence.json"


def test_a_cell_has_the_largest_loss_and_weight_of_its_cases(kept: Path) -> None:
    rows = [outcome("full", 2e-7, 3e-9), outcome("full", 1e-7, 4e-9, "bf16"), outcome("lora", 0.0, 0.0)]
    for of_qlora, cell in (([outcome("qlora", None, None)], "not run"), ([], "")):
        kept.write_text(json.dumps(rows + of_qlora))
        assert TABLES["equivalence"]([]).to_dict("records") == [
            {"Task": "chat", "Strategy": "DDP", "Full": "2e-07 / 4e-09", "LoRA": "0 / 0", "QLoRA": cell}
        ]


def test_a_skipped_case_keeps_its_figures_and_a_dropped_one_goes(kept: Path) -> None:
    skipped, before = outcome("full", None, None), outcome("full", 1e-7, 1e-9)
    assert not kept.exists()
    assert merged([skipped]) == [skipped]
    kept.write_text(json.dumps([before, outcome("lora", 2e-7, 1e-9), outcome("qlora", 5e-7, 0.0)]))
    assert merged([outcome("lora", 3.14159e-7, 0.0), skipped]) == [before, outcome("lora", 3.1e-7, 0.0)]
