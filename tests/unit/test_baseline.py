"""Runs without a baseline (`--baseline none`): whatever reads their records says so, and everything else as before."""

import copy
import json
from pathlib import Path

import pytest

from bench.compare import json_of, labels_of, parts_of, text_of
from bench.curves import plot_curves
from bench.page.runs import values_of
from bench.tables.pages import TABLES
from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.records.store import Record
from common.reporting.rows import STRONG, baseline_of, task_of
from common.reporting.tables import side_by_side
from common.reporting.tasks import PICTURES, SUMMARIZATION
from common.serving.cards import _score_table
from common.tasks.samples import before_and_after, samples

QUALITY = ("lora", "ddp", "full", "mp", "pp", "sharding", "qlora")
SHOWING = (*(f"{name}-quality" for name in QUALITY), "master", "summarization-loops", "summarization-front",
           "pictures-settings", "pictures-kinds", "pictures-front")  # fmt: skip
NO_FIGURE = {"-", "before: score -, by MiniLM -, fact recall -", "before: ROUGE-L -, exact match -"}


def without_baseline(record: Record) -> Record:
    other = copy.deepcopy(record)
    if "quality" in other and other["config"]["task"] != "preferences":
        other["quality"]["before"] = None
        other["config"]["baseline"] = "none"
    return other


def of_task(records: list[Record], task: str) -> Record:
    return next(record for record in records if task_of(record) == task and record["status"] == "completed")


@pytest.mark.parametrize("name", SHOWING)
def test_tables_lose_what_was_before_and_nothing_else(records: list[Record], name: str) -> None:
    whole, found = TABLES[name](records), TABLES[name](list(map(without_baseline, records)))
    assert list(found.columns) == list(whole.columns)
    assert len(found) == len(whole) > 0
    lost = 0
    for column in whole.columns:
        for was, now in zip(whole[column], found[column], strict=True):
            if was == now:
                continue
            lost += 1
            if name == "pictures-kinds":
                assert now == f"- / {was.partition(' / ')[2]}"
            elif "before -> after" in column or column == "Exact match":
                assert now == f"- -> {was.partition(' -> ')[2]}"
            else:
                assert now in NO_FIGURE
    assert lost


def test_runs_side_by_side_have_a_dash_before(records: list[Record]) -> None:
    run = of_task(records, "chat")
    whole, found = (side_by_side([each]).iloc[:, 0] for each in (run, without_baseline(run)))
    changed = {name: found[name] for name in whole.index if found[name] != whole[name]}
    names = {"similarity score before", "by MiniLM before", "fact recall before"}
    assert changed == dict.fromkeys(names, "-")


@pytest.mark.parametrize("task", ["chat", "classification", "summarization", "visual_questions"])
def test_runs_are_compared_in_what_they_became(records: list[Record], task: str) -> None:
    run = of_task(records, task)
    runs = [run, without_baseline(run)]
    lines = {line.name: line.cells[1:] for line in parts_of(runs)["quality"]}
    assert lines
    for both, after_alone in lines.values():
        if " -> " in both and both != "off -> off":
            assert after_alone == f"- -> {both.partition(' -> ')[2]}"
    assert {line.name: line.values for line in parts_of(runs)["settings"]} == {"baseline": ["base", "none"]}
    assert "- -> " in text_of(runs, Path("picture.png"))
    pairs = json.loads(json_of(runs, Path("picture.png")))["quality"].values()
    assert any(isinstance(values[1], list) and values[1][0] is None and values[1][1] for values in pairs)
    plot_curves(runs, labels_of(runs))


@pytest.mark.parametrize("task", ["chat", "summarization", "visual_questions"])
def test_the_page_has_the_quality_after(records: list[Record], task: str) -> None:
    run = of_task(records, task)
    whole, found = values_of(run), values_of(without_baseline(run))
    assert whole["before"] is not None
    assert found["before"] is None
    assert (found["quality"], found["metric"]) == (whole["quality"], whole["metric"])


def test_the_terminals_tables_have_a_dash_before(records: list[Record]) -> None:
    stripped = list(map(without_baseline, records))
    for table, task in ((SUMMARIZATION, "summarization"), (PICTURES, "visual_questions")):
        said = table.text([record for record in stripped if task_of(record) == task])
        assert " - " in said


def test_a_run_without_a_baseline_compares_in_time_with_one_that_has_one(records: list[Record]) -> None:
    pairs = ((record, baseline_of(record, records, STRONG)) for record in records if record["status"] == "completed")
    record, alone = next((record, alone) for record, alone in pairs if alone and alone is not record)
    assert baseline_of(without_baseline(record), records, STRONG) == alone


def test_the_card_has_the_scores_after_alone(records: list[Record]) -> None:
    run = of_task(records, "chat")
    whole, found = _score_table(run), _score_table(without_baseline(run))
    assert "| before | after |" in whole
    assert "before |" not in found
    assert f"{run['quality']['after']['similarity_score']:.3f} |" in found
    assert len(found.splitlines()) == len(whole.splitlines())


def test_samples_are_those_after_alone(tmp_path: Path) -> None:
    lines = ["question,reference,answer,similarity_score", "Who?,Ada,Eve,0.5", "When?,1843,1900,0.25"]
    (tmp_path / "predictions_after.csv").write_text("\n".join(lines))
    assert list(before_and_after(tmp_path).columns) == ["question", "expected", "after"]
    assert samples(tmp_path).splitlines()[:3] == ["question: Who?", "expected: Ada", "   after: Eve"]


def test_pairs_need_what_the_base_finds_of_them() -> None:
    with pytest.raises(BadInputError, match=r"baseline is none, which is for tasks without pairs of answers"):
        RunConfig(task="preferences", baseline="none")
    assert RunConfig(baseline="none").baseline == "none"
