"""The tables of model parallel and pipelines: published factors, what is compared with what, and what stays out."""

import copy

from bench.tables.pages import TABLES
from bench.tables.table import FULL, FULL_PP
from common.records.store import Record
from common.reporting.rows import completed


def test_published_factors_are_those_of_the_source(records: list[Record]) -> None:
    table = TABLES["mp-speed"](records)
    published = table[table["Figures"].str.startswith("published")]
    factors = {name: [text.split(" ")[0] for text in published[name]] for name in table.columns if "factor" in name}
    assert factors == {"CUDA scaling factor": ["1x", "3.11x", "4.74x"], "VRAM scaling factor": ["1x", "1.2x", "1.2x"]}
    assert published["Training time"].tolist() == ["53:20", "40:41", "1:15:55"]


def test_schedules_are_stated_against_naive_model_parallel(records: list[Record]) -> None:
    record = next(each for each in completed(records, FULL_PP) if each["config"]["seed"] == 42)
    doubled = copy.deepcopy(record)
    doubled["pipeline"]["step_s"]["naive"] = 2 * doubled["pipeline"]["step_s"]["1f1b"]
    table = TABLES["pp-schedules"]([doubled]).set_index("Schedule")
    assert table["Against naive MP"][["naive MP", "1F1B"]].tolist() == ["1.00x", "2.00x"]
    assert table["Formula"].tolist() == ["1.00x", "1.78x", "1.78x"]


def test_trials_of_speed_and_precision_stay_out_of_the_quality_tables(records: list[Record]) -> None:
    trials = [each for each in completed(records, FULL_PP, FULL) if each["config"]["weights"] == "random"]
    assert trials
    assert TABLES["pp-quality"](trials).query("Figures == 'measured'").empty
    assert not TABLES["pp-schedules"](trials).empty
