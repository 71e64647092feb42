"""Batched answers equal single ones, scores are distances, and every question is counted once."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.splits import load_splits
from common.models.loading import load_base_model, load_tokenizer
from common.models.real_models import minilm_folder
from common.models.trained_weights import add_lora
from common.runtime.recorder import RunRecorder
from common.runtime.world import Rank
from common.tasks.answers import (
    Evaluation,
    Judge,
    ScoredAnswer,
    evaluate,
    generate_answers,
    independent_judges,
    shuffled_answers,
)

CPU = {"": "cpu"}


@pytest.fixture
def base(run_config: RunConfig) -> Judge:
    return Judge("base", load_base_model(run_config, CPU), load_tokenizer(run_config))


def test_batched_answers_equal_one_row_at_a_time(run_config: RunConfig, base: Judge) -> None:
    rows = load_splits(run_config).test[:6]
    together = generate_answers(base.model, base.tokenizer, rows, 30)
    assert together == [generate_answers(base.model, base.tokenizer, [row], 30)[0] for row in rows]
    assert all(together)


def test_scores_are_distances_that_padding_does_not_move(run_config: RunConfig, base: Judge) -> None:
    answers = ["It is made of copper.", "walnut", "", "When was it made, and by whom, and of what?"]
    references = ["It is made of copper.", "In the Violet Room.", "walnut", "walnut"]
    for judge in (base, *independent_judges(run_config, "cpu")):
        scores = judge.scores(answers, references)
        alone = [judge.scores([a], [r])[0] for a, r in zip(answers, references, strict=True)]
        assert scores == pytest.approx(alone, abs=1e-5)
        assert (scores[0], scores[2]) == (pytest.approx(0, abs=1e-6), 1)
        assert scores[1] > 0.1


def test_the_independent_judge_is_the_published_one_under_a_free_licence(
    run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (judge,) = independent_judges(run_config, "cpu")
    same, other = judge.scores(["A cat sits outside."] * 2, ["A kitten sits outdoors.", "Interest rates fell."])
    assert same < 0.3 < 0.8 < other
    assert "license: apache-2.0" in (Path(judge.tokenizer.name_or_path) / "README.md").read_text()
    assert independent_judges(replace(run_config, independent_judge="none"), "cpu") == []
    monkeypatch.setattr("common.models.real_models.SHA256", "0" * 64)
    minilm_folder.cache_clear()
    with pytest.raises(BadInputError, match="SHA-256 53aa51172d14"):
        independent_judges(run_config, "cpu")


def test_each_reference_is_shuffled_to_another_row(base: Judge) -> None:
    own = [f"a{number}" for number in range(9)]
    rows = [{"messages": [{"content": "q"}, {"content": answer}]} for answer in own]
    others = shuffled_answers(rows)
    assert sorted(others) == own
    assert not any(map(str.__eq__, others, own))
    assert shuffled_answers(rows[:1]) == [None]
    assert base.judge((["Vance."], ["Vance."], [None]), [0]) == [(pytest.approx(0, abs=1e-6), None)]


def test_every_question_is_answered_once_in_the_files_order(run_config: RunConfig, tmp_path: Path, base: Judge) -> None:
    run = replace(run_config, results_root=str(tmp_path), test_rows=7, per_device_eval_batch_size=2, max_new_tokens=4)
    log, rows = RunRecorder(run, Rank(rank=0, world_size=1, device="cpu", launcher="python")), load_splits(run).test
    evaluation = evaluate(base.model, base.tokenizer, rows, [base], log, "before")
    answered = [(answer["row"], answer["question"]) for answer in evaluation.answers]
    assert answered == [(number, row["messages"][0]["content"]) for number, row in enumerate(rows)]
    assert len((log.folder / "predictions_before.csv").read_text().splitlines()) == 1 + len(rows) == 8


def scored(score: float, facts: int, facts_said: int, minilm: float | None = None) -> ScoredAnswer:
    judged = {"similarity_score": score, "similarity_score_tuned": None, "similarity_score_minilm": minilm}
    return {**judged, "shuffled_score": 0.4, "shuffled_score_minilm": minilm, "facts": facts, "facts_said": facts_said}


def test_facts_are_shared_out_over_all_facts_asked_and_absent_judges_give_no_mean() -> None:
    summary = Evaluation([scored(0.5, 3, 1, minilm=0.2), scored(0.0, 1, 1, minilm=0.4)]).summary()
    assert (summary["similarity_score"], summary["facts_said_share"], summary["questions"]) == (0.25, 0.5, 2)
    assert (summary["similarity_score_minilm"], summary["similarity_score_tuned"]) == (pytest.approx(0.3), None)
    assert Evaluation([scored(0.5, 0, 0)]).facts_share() is None


def test_a_tuned_model_without_its_adapter_judges_as_the_base(run_config: RunConfig, base: Judge) -> None:
    """So that a card chosen for 4 bits needs no second model."""
    texts = (["It is made of copper.", "walnut"], ["It is made of walnut.", "In the Violet Room."])
    adapted = add_lora(load_base_model(run_config, CPU), run_config).eval()
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    scores, tuned = base.scores(*texts), adapted.get_base_model()
    without = Judge("base", tuned, base.tokenizer, adapted.disable_adapter).scores(*texts)
    assert without == pytest.approx(scores, abs=1e-6)
    assert Judge("tuned", tuned, base.tokenizer).scores(*texts) != pytest.approx(scores, abs=1e-3)
