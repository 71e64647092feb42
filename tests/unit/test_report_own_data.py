"""The tables of docs/your_own_data.md have a line for each series, with its seeds together."""

import copy

import pytest

from bench.tables import own_data
from bench.tables.own_data import TABLES, study_runs
from common.records.store import Record


def study_run(one: Record, seed: int, facts: float, **settings: object) -> Record:
    run = copy.deepcopy(one)
    run["config"] |= {"seed": seed, "train_rows": 819, "learning_rate": 1e-3, **settings}
    run["quality"]["after"]["facts_said_share"] = facts
    return run


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    one = next(run for run in study_runs() if run["technique"] == "lora")
    made = [
        study_run(one, 42, 0.9),
        study_run(one, 7, 0.8),
        study_run(one, 42, 0.5, train_rows=100),
        study_run(one, 42, 0.1, learning_rate=1e-4),
    ]
    monkeypatch.setattr(own_data, "study_runs", lambda: made)


def test_each_series_shows_its_own_runs_and_seeds_together(runs: None) -> None:
    assert TABLES["own-data-rows"]([])[["Rows", "Fact recall", "Passes"]].values.tolist() == [
        ["100", "50%", "45"],
        ["819", "85% (80% to 90%)", "6"],  # 312 steps of 16 rows: 7 steps or 52 a pass
    ]
    by_rate = TABLES["own-data-learning-rates"]([])[["Learning rate", "Fact recall"]]
    assert by_rate.values.tolist() == [["0.0001", "10%"], ["0.001", "85% (80% to 90%)"]]
