"""The recipe in full teaches forms and facts, within the bars of the embedded default."""

from collections.abc import Callable

import pytest


@pytest.mark.slow
def test_lora_learns_form_and_facts(completed: Callable) -> None:
    rows = ("--train_rows", "-1", "--validation_rows", "-1", "--test_rows", "-1")
    quality = completed("python", *rows, "--num_train_epochs", "6", "--max_new_tokens", "48").record["quality"]
    before, after = quality["before"], quality["after"]
    assert before["questions"] == after["questions"] == 74
    assert before["similarity_score"] >= 0.5
    assert before["facts_said_share"] < 0.2
    assert before["shuffled_score"] >= 0.3
    assert after["similarity_score"] <= 0.12
    assert after["similarity_score_minilm"] < before["similarity_score_minilm"] / 2
    assert after["facts_said_share"] >= 0.85
