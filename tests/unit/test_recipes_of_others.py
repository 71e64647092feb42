"""What others' recipes name can be asked for: alpha over rank, tokens, layers by an expression, and a rate by rule."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import LlamaConfig, Qwen2Config

from common.base.errors import BadInputError, NotPlannedError
from common.base.parsing import parse_overrides
from common.base.run_config import RunConfig
from common.base.settings import BY_MODEL
from common.checks.inputs import check_settings
from common.models.families import suited_to_model
from common.models.loading import load_base_model
from common.models.real_models import SMOLLM2
from common.models.trained_weights import add_lora, layers_called
from common.planning.job import BatchShape, job_of_run

CPU = {"": "cpu"}


def adapted_layers(model: torch.nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def test_adapters_are_scaled_as_peft_scales_them(run_config: RunConfig) -> None:
    for is_rank_stabilized in (True, False):
        asked = {"lora_alpha": 6.5, "lora_r": 4, "use_rslora": is_rank_stabilized}
        own = add_lora(load_base_model(run_config, CPU), replace(run_config, **asked))
        config = LoraConfig(r=4, lora_alpha=6.5, use_rslora=is_rank_stabilized, target_modules=["q_proj"])
        its = get_peft_model(load_base_model(run_config, CPU), config)
        scales = [
            {each.scaling["default"] for each in model.modules() if isinstance(each, LoraLayer)} for model in (own, its)
        ]
        assert scales[0] == scales[1]


def test_layers_are_adapted_whose_whole_names_fit_an_expression(run_config: RunConfig) -> None:
    for expression in (r".*\.(0|3)\..*(q|v)_proj", "model.layers.1.mlp.up_proj|model.layers.2.self_attn.o_proj"):
        own = add_lora(load_base_model(run_config, CPU), replace(run_config, target_modules=expression))
        config = LoraConfig(target_modules=expression, task_type="CAUSAL_LM")
        its = get_peft_model(load_base_model(run_config, CPU), config)
        assert adapted_layers(own) == adapted_layers(its)
        assert adapted_layers(own)


@pytest.mark.parametrize(
    ("targets", "says"),
    [("q_proj,v_prj", "v_prj.*did you mean v_proj"), (".*_prj", "no linear layer's whole name"), ("(q_proj", "no reg")],
)
def test_targets_that_match_nothing_are_refused(run_config: RunConfig, targets: str, says: str) -> None:
    with pytest.raises(BadInputError, match=says):
        layers_called(load_base_model(run_config, CPU), targets)


def test_an_expression_is_not_planned(run_config: RunConfig) -> None:
    with pytest.raises(NotPlannedError, match="by their names alone"):
        job_of_run(replace(run_config, target_modules=".*q_proj"), BatchShape(2, 8, labelled=4))


def test_the_named_tokens_alone_are_trained_beside_adapters(run_config: RunConfig) -> None:
    model = add_lora(load_base_model(run_config, CPU), replace(run_config, trainable_token_indices="3, 5"))
    others = {name for name, weight in model.named_parameters() if weight.requires_grad and "lora_" not in name}
    assert len(others) == 1  # the head is tied
    (trained,) = (weight for name, weight in model.named_parameters() if name in others)
    assert trained.shape == (2, model.config.hidden_size)
    for wrong in ("3,x", "-1", "99999999"):
        with pytest.raises(BadInputError, match="tokens have numbers"):
            add_lora(load_base_model(run_config, CPU), replace(run_config, trainable_token_indices=wrong))
    with pytest.raises(BadInputError, match=r"trainable_token_indices .* without pairs"):
        RunConfig(task="preferences", technique="lora", lora_dropout=0.0, trainable_token_indices="3")


@pytest.mark.parametrize(
    ("targets", "has_head"),
    [("q_proj,lm_head", True), ("q_proj", False), ("all-linear", False), (".*(q_proj|lm_head)", True),
     ("lm_.*", True), (".*q_proj", False), ("(.*", False)],
)  # fmt: skip
def test_the_head_is_found_by_its_name_and_by_an_expression(
    run_config: RunConfig, targets: str, has_head: bool
) -> None:
    assert replace(run_config, target_modules=targets).targets_head is has_head


def shape(folder: Path, config: LlamaConfig | Qwen2Config) -> str:
    config.save_pretrained(folder)
    return str(folder)


def test_a_rate_is_chosen_by_width_and_technique_where_none_was_passed(
    run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    embedded = load_base_model(run_config, CPU).config
    wide = LlamaConfig(**{**embedded.to_dict(), "hidden_size": 2000, "architectures": ["LlamaForCausalLM"]})
    model = shape(tmp_path / "wide", wide)

    def rate(*arguments: str) -> float:
        run = parse_overrides(run_config, ["--model", model, "--weights", "random", *arguments])
        return suited_to_model(run).learning_rate

    assert rate("--technique", "full") == 5e-5
    start = 16 / math.sqrt(3 * 2000)  # ours is larger by 1 / this
    for alpha, is_rank_stabilized, expected in ((32, False, 5e-4), (8, False, 2e-3), (8, True, 5e-4)):
        asked = ("--lora_r", "16", "--lora_alpha", f"{alpha}", "--use_rslora", f"{is_rank_stabilized}".lower())
        assert rate(*asked) == pytest.approx(expected * start, rel=0.05)  # of two digits
    assert rate("--learning_rate", f"{run_config.learning_rate}") == run_config.learning_rate
    assert rate("--model", SMOLLM2) == 4.5e-5
    rmsprop = parse_overrides(run_config, ["--model", model, "--weights", "random", "--optim", "rmsprop"])
    assert check_settings(rmsprop).learning_rate > 0, "the optimizer is built with a rate that was chosen"
    assert "learning_rate is 5e-05" in capsys.readouterr().out


def test_a_folders_own_model_and_other_tasks_keep_their_rates(run_config: RunConfig) -> None:
    assert parse_overrides(run_config, []).learning_rate == run_config.learning_rate
    pairs = RunConfig(task="preferences")
    assert parse_overrides(pairs, ["--model", "other"]).learning_rate == pairs.learning_rate
    assert parse_overrides(run_config, ["--model", "other"]).learning_rate == BY_MODEL
    for wrong in (0.0, -2.0):
        with pytest.raises(BadInputError, match="learning_rate is"):
            replace(run_config, learning_rate=wrong)
