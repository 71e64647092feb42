"""Forgetting is measured on other texts: the base itself has forgotten nothing, and texts of nothing are refused."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.splits import tokens_of
from common.models.loading import load_base_model, load_tokenizer
from common.models.trained_weights import add_lora
from common.runtime.recorder import RunRecorder
from common.runtime.world import Rank
from common.tasks.forgetting import Forgetting, drift_of, general_rows, learnt_logits, reading_of

CPU = {"": "cpu"}


def test_the_drift_is_the_divergence_from_the_base() -> None:
    base, other = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.25, 0.5]])
    expected = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5)
    assert drift_of(other.log(), base.log()) == pytest.approx(expected)
    assert drift_of(base.log() + 3, base.log()) == pytest.approx(0, abs=1e-7)  # logits, whose sum is free


def test_the_loss_is_transformers_own_and_only_a_changed_model_drifts(run_config: RunConfig, tmp_path: Path) -> None:
    run = replace(run_config, results_root=str(tmp_path))
    base, tokenizer = load_base_model(run, CPU), load_tokenizer(run)
    log = RunRecorder(run, Rank(0, 1, "cpu", "python"))
    forgetting = Forgetting(run, tokenizer)
    forgetting.before(log, base)
    row = forgetting.texts[0]
    own = base(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])).loss
    logits, labels = learnt_logits(base, row)
    assert torch.nn.functional.cross_entropy(logits, labels).item() == pytest.approx(own.item(), rel=1e-5)
    forgetting.after(log, base)
    assert forgetting.figures["after"] == pytest.approx(forgetting.figures["before"], abs=1e-6)
    adapted = add_lora(base, run).eval()
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(weight, 0.01)
    forgetting.after(log, adapted)
    before, after = forgetting.figures["before"], forgetting.figures["after"]
    assert after["answer_drift"] > 0.01
    assert after["general_loss"] > before["general_loss"]


def test_other_texts_may_be_any_rows(run_config: RunConfig, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(run_config)
    texts = tmp_path / "texts.txt"
    texts.write_text("The first text.\n\nThe second text.\n")
    tokens, _ = general_rows(replace(run_config, forgetting_data=str(texts), train_on="completion"), tokenizer)
    assert tokens == tokens_of([{"text": "The first text."}, {"text": "The second text."}], tokenizer, run_config)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [("none.txt", None, "does not exist"), ("empty.txt", "\n", "is empty"), ("rows.csv", "a,b\n1,2\n", "columns")],
)
def test_texts_without_anything_in_them_are_refused(
    run_config: RunConfig, tmp_path: Path, name: str, content: str | None, says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(BadInputError, match=says):
        general_rows(replace(run_config, forgetting_data=str(tmp_path / name)), load_tokenizer(run_config))


def test_what_has_learnt_nothing_or_is_not_asked_forgets_nothing(run_config: RunConfig) -> None:
    assert run_config.tells_forgetting
    for change in ({"weights": "random"}, {"baseline": "none"}, {"forgetting_data": "none"}):
        assert not replace(run_config, **change).tells_forgetting
    for change in ({"task": "classification", "forgetting_data": "none"}, {"baseline": "none", "forgetting_data": "x"}):
        with pytest.raises(BadInputError, match="forgetting_data"):
            RunConfig(**change)


def test_answers_are_compared_however_long_the_system_message_of_a_template_is(
    run_config: RunConfig, tmp_path: Path
) -> None:
    run = replace(run_config, results_root=str(tmp_path))
    base, tokenizer = load_base_model(run, CPU), load_tokenizer(run)
    forgetting = Forgetting(run, tokenizer)
    tokenizer.chat_template = "{{ 'Be kind to all who ask. ' * 60 }}" + tokenizer.chat_template
    forgetting.before(RunRecorder(run, Rank(0, 1, "cpu", "python")), base)
    assert len(forgetting.answers[0]["input_ids"]) > reading_of(run).max_length
    assert forgetting.of_base.keys() == set(range(len(forgetting.answers)))
