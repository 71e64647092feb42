"""Batched answers equal single ones, scores are distances, and every question is counted once."""

from dataclasses import replace
from pathlib import Path

import pytest

from common.data import load_splits
from common.evaluation import Evaluation, ScoredAnswer, evaluate, generate_answers, similarity_scores
from common.launch import Rank
from common.models import load_base_model, load_tokenizer
from common.run_config import RunConfig
from common.run_record import RunLog

CPU = {"": "cpu"}


def test_batched_answers_equal_one_row_at_a_time(run_config: RunConfig) -> None:
    model, tokenizer = load_base_model(run_config, CPU), load_tokenizer(run_config)
    rows = load_splits(run_config).test[:6]
    together = generate_answers(model, tokenizer, rows, 30)
    assert together == [generate_answers(model, tokenizer, [row], 30)[0] for row in rows]
    assert all(together)


def test_scores_are_distances_that_padding_does_not_move(run_config: RunConfig) -> None:
    model, tokenizer = load_base_model(run_config, CPU), load_tokenizer(run_config)
    answers = ["It is made of copper.", "walnut", "", "When was it made, and by whom, and of what?"]
    references = ["It is made of copper.", "In the Violet Room.", "walnut", "walnut"]
    scores = similarity_scores(model, tokenizer, answers, references)
    alone = [similarity_scores(model, tokenizer, [a], [r])[0] for a, r in zip(answers, references, strict=True)]
    assert scores == pytest.approx(alone, abs=1e-5)
    assert scores[0] == pytest.approx(0, abs=1e-6)
    assert scores[2] == 1
    assert scores[1] > 0.1


def test_every_question_is_answered_once_in_the_files_order(run_config: RunConfig, tmp_path: Path) -> None:
    run = replace(run_config, results_root=str(tmp_path), test_rows=7, evaluation_batch_size=2, max_new_tokens=4)
    log = RunLog(run, Rank(rank=0, world_size=1, device="cpu", launcher="python"))
    model, tokenizer = load_base_model(run, CPU), load_tokenizer(run)
    rows = load_splits(run).test
    evaluation = evaluate(model, model, tokenizer, rows, log, "before")
    assert [answer.row for answer in evaluation.answers] == list(range(7))
    assert [answer.question for answer in evaluation.answers] == [row["messages"][0]["content"] for row in rows]
    assert len((log.folder / "predictions_before.csv").read_text().splitlines()) == 8


def test_facts_are_shared_out_over_all_facts_asked() -> None:
    answers = [ScoredAnswer(0, "q", "r", "a", 0.5, facts=3, facts_said=1), ScoredAnswer(1, "q", "r", "a", 0.0, 1, 1)]
    assert Evaluation(answers).summary() == {"similarity_score": 0.25, "facts_said_share": 0.5, "questions": 2}
    assert Evaluation([ScoredAnswer(0, "q", "r", "a", 0.5, 0, 0)]).facts_said_share is None
