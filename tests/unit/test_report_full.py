"""The tables of full fine-tuning, model parallel and pipeline say what their records say."""

import copy

import pytest

from common.records.store import Record, kept_records
from common.reporting.full import SMALL_LEARNING_RATE
from common.reporting.rows import FULL, FULL_PP, baseline_of, completed, kind_of
from common.reporting.tables import TABLES


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return kept_records()


def test_smaller_batches_take_more_steps_for_the_same_rows(records: list[Record]) -> None:
    measured = TABLES["mp-price"](records).query("Figures == 'measured'")
    assert measured["Rows"].nunique() == 1
    batches, steps = ([int(text.replace(",", "")) for text in measured[name]] for name in ("Batch size", "Steps"))
    assert len(set(batches)) >= 3
    assert (batches, steps) == (sorted(batches, reverse=True), sorted(steps))


def test_schedules_are_stated_against_naive_model_parallel(records: list[Record]) -> None:
    record = copy.deepcopy(next(each for each in completed(records, FULL_PP) if each["config"]["seed"] == 42))
    record["pipeline"]["step_s"]["naive"] = 2 * record["pipeline"]["step_s"]["1f1b"]
    table = TABLES["pp-schedules"]([record])
    assert table[["Schedule", "The formula's", "The formula's idle share"]].values.tolist() == [
        ["naive MP", "1.00x", "50%"],
        ["GPipe", "1.78x", "11%"],
        ["1F1B", "1.78x", "11%"],
    ]
    assert table["Against naive MP"].tolist()[::2] == ["1.00x", "2.00x"]


def test_a_pipeline_is_compared_with_one_device_at_the_same_global_batch(records: list[Record]) -> None:
    pipelines = [each for each in completed(records, FULL_PP) if each["config"]["weights"] == "pretrained"]
    found = [(each, baseline_of(each, records, "effective_batch_size")) for each in pipelines]
    compared = [(pipeline, baseline) for pipeline, baseline in found if baseline]
    assert compared
    for pipeline, baseline in compared:
        assert kind_of(baseline) == FULL
        assert baseline["effective_batch_size"] == pipeline["effective_batch_size"]


def test_pure_bf16_loses_updates_that_fp32_keeps(records: list[Record]) -> None:
    small = [each for each in completed(records, FULL) if each["config"]["learning_rate"] == SMALL_LEARNING_RATE]
    shares = {each["config"]["precision"]: each["updated_share"] for each in small}
    assert shares["bf16"] < 0.5 < shares["fp32"]


def test_trials_of_speed_and_precision_stay_out_of_the_quality_tables(records: list[Record]) -> None:
    trials = [each for each in completed(records, FULL_PP, FULL) if each["config"]["weights"] == "random"]
    assert trials
    assert TABLES["pp-quality"](trials).query("Figures == 'measured'").empty
    assert not TABLES["pp-schedules"](trials).empty
