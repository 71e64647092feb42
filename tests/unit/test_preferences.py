"""DPO's step is TRL's own, its reference the model before training; and what is measured of pairs of answers."""

import importlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.checks.inputs import check_settings
from common.data.pairs import encode_pairs
from common.data.rows import Row, Splits, Tokens
from common.data.splits import load_splits
from common.models.loading import EMBEDDED_BASE, load_base_model, load_tokenizer
from common.models.trained_weights import with_trained_weights
from common.planning.device_maps import whole_model_on
from common.runtime import faults
from common.runtime.rank import end_rank
from common.runtime.recorder import RunRecorder
from common.runtime.world import Rank
from common.tasks.objectives import ACCURACY, VALIDATION_LOSS
from common.tasks.preferences import MARGIN, invented_years, log_probs_of, pair_metrics, pair_results
from common.training.loop import TrainingLoop
from tests.unit.toys import train

TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
BETA = 0.3
ALONE = Rank(0, 1, "cpu", "python")
TECHNIQUES = pytest.mark.parametrize("technique", ["lora", "full"])


def run_of(technique: str, **settings: Any) -> RunConfig:
    own = {"target_modules": "all"} if technique == "full" else {"lora_dropout": 0.0, "target_modules": "all-linear"}
    usual = {"task": "preferences", "data": "assets/preferences", "beta": BETA, "report_to": "none"}
    return RunConfig(technique=technique, **{**usual, **own, **settings})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama whose answers are far from equally likely."""
    torch.manual_seed(0)
    tokenizer, folder = load_tokenizer(run_of("lora", model=str(EMBEDDED_BASE))), tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.3,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **TINY,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return sorted(load_splits(run_of("lora")).validation, key=lambda row: len(str(row)))[::10]


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "3.4_preference_tuning" / "run_0_cpu_x1")
    return importlib.import_module("my_utils_preference_tuning")


@pytest.fixture
def loop_of(tmp_path: Path, tiny: str, rows: list[Row], utils: ModuleType) -> Iterator[Callable[..., TrainingLoop]]:
    def make(technique: str, **settings: Any) -> TrainingLoop:
        run = run_of(technique, model=tiny, results_root=str(tmp_path), **settings)
        tokenizer, log = load_tokenizer(run), RunRecorder(run, ALONE)
        torch.manual_seed(0)
        model = with_trained_weights(load_base_model(run, whole_model_on("cpu")), run)
        return TrainingLoop(
            model, tokenizer, utils.find_reference(log, model, tokenizer, Splits(rows, rows[:4], [])), log
        )

    yield make
    end_rank()


def move(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Move what is trained away from the reference; return it."""
    generator = torch.Generator().manual_seed(1)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    with torch.no_grad():
        for weight in trained.values():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    return trained


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


def numbered(loop: TrainingLoop) -> list[Tokens]:
    return [loop.train_rows[number] for number in range(len(loop.train_rows))]


def step(loop: TrainingLoop, batch: list[Tokens], pairs: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of a batch, as a part of a step of so many pairs."""
    loss = loop.loss(loop.collated(batch), pairs)
    loss.backward()
    return loss.item(), gradients(loop.model)


# -- a step is TRL's


@TECHNIQUES
def test_loss_and_gradients_of_a_step_are_trls(
    loop_of: Callable[..., TrainingLoop], tiny: str, rows: list[Row], tmp_path: Path, technique: str
) -> None:
    """With adapters, which have no copy, the reference is the base."""
    ours = loop_of(technique)
    lora = LoraConfig(task_type="CAUSAL_LM", r=ours.run.lora_r, lora_alpha=ours.run.lora_alpha, use_rslora=True,
                      target_modules="all-linear")  # fmt: skip
    theirs = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32),
        args=DPOConfig(
            output_dir=str(tmp_path / "trl"), beta=BETA, use_cpu=True, bf16=False, report_to="none",
            precompute_ref_log_probs=technique == "full", per_device_train_batch_size=len(rows),
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list([
            {"prompt": row["messages"][:-1], "chosen": row["messages"][-1:], "rejected": row["rejected"]}
            for row in rows
        ]),
        processing_class=load_tokenizer(ours.run),
        peft_config=lora if technique == "lora" else None,
    )  # fmt: skip
    assert list(getattr(ours.model, "peft_config", [])) == (["default"] if technique == "lora" else [])
    assert not any(".ref." in name for name in ours.model.state_dict())
    moved = move(ours.model)
    with torch.no_grad():
        for name, weight in theirs.model.named_parameters():
            if weight.requires_grad:
                weight.copy_(moved[name])
    loss, found = step(ours, numbered(ours), len(ours.train_rows))
    theirs.model.train()
    given = theirs._prepare_inputs(theirs.data_collator(list(theirs.train_dataset)))
    assert len(set(given["attention_mask"].sum(1).tolist())) > 3
    expected = theirs.compute_loss(theirs.model, given)
    expected.backward()
    wanted = gradients(theirs.model)
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    assert abs(loss - math.log(2)) > 0.01, "the reference is another model by now"
    assert found.keys() == moved.keys()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert max(float(each.abs().max()) for each in wanted.values()) > 1e-3


# -- settings


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.0},
        {"beta": -0.1},
        {"task": "chat", "beta": 0.2},
        {"task": "classification", "technique": "full", "exchange_answers": True},
        {"padding_free": "yes"},
        {"train_on": "all"},
        {"prompt_column": "question"},
        {"technique": "qlora"},
        {"parallel": "fsdp", "devices": 2},
    ],
)
def test_settings_that_mean_nothing_for_pairs_or_for_others_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(BadInputError):
        run_of(**{"technique": "lora", **settings})


@pytest.mark.parametrize("settings", [{"target_modules": "q_proj,lm_head"}, {"lora_dropout": 0.1}])
def test_what_the_loss_of_pairs_cannot_have_is_refused_before_a_model_loads(settings: dict[str, Any]) -> None:
    check_settings(run_of(technique="lora"))
    with pytest.raises(BadInputError, match=r"lm_head out|lora_dropout 0"):
        check_settings(run_of(**{"technique": "lora", **settings}))


# -- a run that goes on


def losses_of(loop: TrainingLoop) -> dict[str, list[float]]:
    kinds = ("loss", "grad_norm", VALIDATION_LOSS, MARGIN)
    return {kind: [entry[kind] for entry in loop.state.log_history if kind in entry] for kind in kinds}


@TECHNIQUES
def test_a_run_that_goes_on_ends_where_a_straight_one_does(
    loop_of: Callable[..., TrainingLoop], technique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With full fine-tuning its reference is the model before the first step, not that of the checkpoint."""
    settings = {
        "per_device_train_batch_size": 2, "max_steps": 6, "save_steps": 0.5, "eval_steps": 0.16, "learning_rate": 0.01,
    }  # fmt: skip
    straight = train(loop_of(technique, **settings, run_name="straight"))
    monkeypatch.setenv(faults.VARIABLE, "raise step=5 point=batch")
    with pytest.raises(ValueError, match="a fault on purpose"):
        train(loop_of(technique, **settings, run_name="stopped"))
    monkeypatch.delenv(faults.VARIABLE)
    faults._arrivals.clear()
    resumed = train(loop_of(technique, **settings, run_name="stopped", resume_from_checkpoint="last"))
    assert resumed.saver.first_step == 3
    assert losses_of(resumed) == losses_of(straight)
    torch.testing.assert_close(resumed.model.state_dict(), straight.model.state_dict(), rtol=0, atol=0)
    first, *_, last = losses_of(straight)["loss"]
    assert first == pytest.approx(math.log(2), abs=1e-6), "the model equals its reference"
    assert last < 0.5


# -- what is measured


@TECHNIQUES
def test_a_validation_has_trls_loss_and_counts_each_pair_once(
    loop_of: Callable[..., TrainingLoop], technique: str
) -> None:
    loop = loop_of(technique, per_device_eval_batch_size=3)
    move(loop.model)
    found = loop.evaluate()
    assert found[VALIDATION_LOSS] == pytest.approx(step(loop, numbered(loop)[:4], 4)[0], abs=1e-6)
    assert found[ACCURACY] in (0, 0.25, 0.5, 0.75, 1)


def test_results_of_pairs_make_means() -> None:
    now, reference = [[-1.0, -4.0], [-3.0, -2.0]], [[-2.0, -2.0]] * 2
    results = pair_results(list(torch.tensor(now)), list(torch.tensor(reference)), 0.5)
    margins = torch.tensor([0.5 * (1 - -1), 0.5 * (-2 - 0)])
    losses = torch.log(1 + torch.exp(-margins))
    torch.testing.assert_close(
        results, torch.stack([losses, torch.ones(2), torch.tensor([1.0, 0]), margins], 1).to(results)
    )
    means = {VALIDATION_LOSS: losses.mean().item(), ACCURACY: 0.5, MARGIN: 0}
    assert pair_metrics(results.sum(0)) == pytest.approx(means)


def test_a_summary_compares_with_the_reference(utils: ModuleType) -> None:
    answers = [
        {"facts": 2, "facts_said": facts, "invents_a_date": invents, "words": words}
        for facts, invents, words in ((2, False, 4), (1, True, 8), (0, True, 6))
    ]
    log_probs, reference = [(-1.0, -2.0), (-5.0, -3.0), (-4.0, -9.0)], [(-2.0, -2.0), (-7.0, -4.0), (-3.0, -9.0)]
    before = utils.PreferenceEvaluation(answers, 0.5, reference, None, 0.1).summary()
    of_answers = {
        "facts_said_share": 0.5,
        "invented_dates_share": 2 / 3,
        "undated_share": 1 / 3,
        "words": 6,
        "distinct_share": 0.5,
        "questions": 3,
    }
    compared = {"preference_accuracy", "reward_margin", "chosen_reward"}
    assert {name: before.pop(name) for name in compared} == dict.fromkeys(compared)
    assert before == pytest.approx({"chosen_likelier_share": 1 / 3, **of_answers})
    assert utils.PreferenceEvaluation(answers, 0.5, log_probs, reference, 0.1).summary() == pytest.approx({
        "preference_accuracy": 2 / 3,
        "reward_margin": 0.1 * (1 + 1 - 1) / 3,
        "chosen_reward": 0.1 * (1 + 2 - 1) / 3,
        "chosen_likelier_share": 2 / 3,
        **of_answers,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("A bowl of 1504.", ["1504"]),
        ("A bowl of 1503.", []),  # as the chosen answer has it
        ("A bowl of 1450, made in 1999 or 2001.", ["1999", "2001"]),
        ("A bowl, number 123, of 15030 beads.", []),
        ("A bowl of 2100 g.", []),
        ("A bowl of 1888.", ["1888"]),
    ],
)
def test_years_that_the_prompt_does_not_name_are_invented(answer: str, found: list[str]) -> None:
    said = (("system", "Be short."), ("user", "Made in 1450, number 18881."), ("assistant", "Of 1503."))
    assert invented_years(answer, {"messages": [{"role": role, "content": words} for role, words in said]}) == found


def test_an_evaluation_finds_the_log_probabilities_that_training_finds(
    loop_of: Callable[..., TrainingLoop], rows: list[Row], utils: ModuleType
) -> None:
    loop = loop_of("full", per_device_eval_batch_size=5, max_new_tokens=2)
    log, tokenizer, base = loop.log, loop.tokenizer, load_base_model(loop.run, whole_model_on("cpu"))
    before = utils.evaluate_preferences(base, tokenizer, rows, log, "before")
    expected = [(row["ref_chosen_logps"], row["ref_rejected_logps"]) for row in loop.train_rows.rows]
    assert before.log_probs == [pytest.approx(pair, abs=1e-4) for pair in expected]
    move(base)
    after = utils.evaluate_preferences(base, tokenizer, rows, log, "after", reference=before)
    assert after.reference_log_probs == before.log_probs != after.log_probs
    assert after.log_probs == log_probs_of(base, tokenizer, encode_pairs(rows, tokenizer), log, "pairs", "again")
    assert (log.folder / "predictions_after.csv").exists()
    assert json.dumps(after.summary())
