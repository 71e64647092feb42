"""The tables of full fine-tuning, model parallel and pipeline say what their records say."""

import copy

import pytest

from common.records.store import Record, kept_records
from common.reporting.full import SMALL_LEARNING_RATE
from common.reporting.rows import FULL, FULL_MP, FULL_PP, baseline_of, completed, kind_of, published_results
from common.reporting.tables import TABLES


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return kept_records()


@pytest.mark.parametrize("kind", [FULL, FULL_MP, FULL_PP])
def test_each_kind_has_a_kept_record(records: list[Record], kind: tuple[str, str]) -> None:
    assert completed(records, kind)


def test_published_factors_are_those_of_the_source(records: list[Record]) -> None:
    table = TABLES["mp-speed"](records)
    published = table[table["Figures"].str.startswith("published")]
    assert [text.split(" ")[0] for text in published["CUDA scaling factor"]] == ["1x", "3.11x", "4.74x"]
    assert [text.split(" ")[0] for text in published["VRAM scaling factor"]] == ["1x", "1.2x", "1.2x"]
    assert [text.split(" ")[0] for text in published["VRAM requirement per GPU"]] == ["1x", "0.6x", "0.3x"]
    assert published["Training time"].tolist() == ["53:20", "40:41", "1:15:55"]


def test_a_classification_is_no_similarity_score() -> None:
    assert all("similarity_score" in result for result in published_results())
    assert len(TABLES["pp-published"]([])) == 4


def test_smaller_batches_take_more_steps_for_the_same_rows(records: list[Record]) -> None:
    table = TABLES["mp-price"](records)
    measured = table[table["Figures"] == "measured"]
    assert measured["Rows"].nunique() == 1
    batches = measured["Batch size"].astype(int).tolist()
    steps = [int(text.replace(",", "")) for text in measured["Steps"]]
    assert len(set(batches)) >= 3
    assert batches == sorted(batches, reverse=True)
    assert steps == sorted(steps)


def test_schedules_are_stated_against_naive_model_parallel(records: list[Record]) -> None:
    record = next(each for each in completed(records, FULL_PP) if each["config"]["seed"] == 42)
    doubled = copy.deepcopy(record)
    doubled["pipeline"]["step_s"]["naive"] = 2 * doubled["pipeline"]["step_s"]["1f1b"]
    table = TABLES["pp-schedules"]([doubled])
    assert table["Schedule"].tolist() == ["naive MP", "GPipe", "1F1B"]
    assert table["Against naive MP"].tolist()[0] == "1.00x"
    assert table["Against naive MP"].tolist()[2] == "2.00x"
    assert table["The formula's"].tolist() == ["1.00x", "1.78x", "1.78x"]
    assert table["The formula's idle share"].tolist() == ["50%", "11%", "11%"]


def test_a_pipeline_is_compared_with_one_device_at_the_same_global_batch(records: list[Record]) -> None:
    pipelines = [each for each in completed(records, FULL_PP) if each["config"]["weights"] == "pretrained"]
    baselines = [baseline_of(each, records, "effective_batch_size") for each in pipelines]
    assert any(baselines)
    for pipeline, baseline in zip(pipelines, baselines, strict=True):
        if baseline:
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
