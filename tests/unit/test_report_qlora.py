"""What the pages do not show of QLoRA: runs beside others, and what was not run."""

import copy

import pytest

from bench.tables.pages import TABLES
from common.records.store import Record
from common.reporting.tables import side_by_side


@pytest.fixture
def qlora(records: list[Record]) -> Record:
    return copy.deepcopy(next(each for each in records if each["technique"] == "qlora"))


def test_a_base_that_had_no_room_beside_the_merged_model_was_not_run(qlora: Record) -> None:
    qlora["quality"]["after_original_base"] = None
    measured = TABLES["qlora-quality"]([qlora]).query("Figures == 'measured'")
    assert measured["Original base: validation loss"].tolist() == ["not run"]


def test_without_a_seed_of_the_recipe_the_three_are_not_compared(records: list[Record]) -> None:
    recipe = [run for run in records if run["run_name"] != "python-batch16-seed8" or run["technique"] != "qlora"]
    assert len(recipe) == len(records) - 1
    assert any(run["technique"] == "qlora" and run["config"]["seed"] == 8 for run in recipe)  # in another data type
    assert TABLES["best-good-ok"](recipe)["Figures"].tolist() == ["measured", "measured", "not run"]


def test_a_run_beside_others_shows_what_it_stores(qlora: Record) -> None:
    qlora["quality"]["after_original_base"]["facts_said_share"] = 0.25
    qlora["quantization"] |= {"weights_gib": 0.001, "unquantized_gib": 0.004}
    table = side_by_side([qlora])
    assert table.loc["weights of the base, in 4 bits / not (MiB)"].item() == "1.02 / 4.10"
    assert table.loc["fact recall, merged into the original base"].item() == "25%"
