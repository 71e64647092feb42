"""Names of layers to adapt that only some layers of a hybrid have: said, or refused where most are left out."""

from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.models import families
from common.models.families import suited_to_model

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 128, "max_position_embeddings": 512, "pad_token_id": 0}  # fmt: skip
LINEAR = {"head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
          "linear_value_head_dim": 16}  # fmt: skip
HYBRIDS = {
    "qwen3_5_text": {**LINEAR, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "qwen3_next": {**LINEAR, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_experts": 4,
                   "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "lfm2": {"layer_types": ["conv", "conv", "conv", "full_attention"], "block_multiple_of": 64},
}  # fmt: skip
"""Tiny ones of Transformers' hybrids, each with one layer of attention and three of another kind."""
ALIKE = {"llama": {}, "olmo_hybrid": {**LINEAR, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}}
"""Models all of whose layers have queries and values, linear attention or not."""
OTHERS = {"qwen3_5_text": "in_proj_qkv", "qwen3_next": "in_proj_qkvz", "lfm2": "in_proj"}
"""A name that the layers without attention alone have."""


def folder_of(model_type: str, folder: Path, **changes: object) -> str:
    settings = {**SIZES, "num_hidden_layers": 4, **HYBRIDS.get(model_type, {}), **ALIKE.get(model_type, {}), **changes}
    settings["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    AutoConfig.for_model(model_type, **settings).save_pretrained(folder)
    (folder / "model.safetensors").touch()  # names are read from a model without weights
    return str(folder)


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_names_that_leave_most_layers_out_are_refused_with_those_of_the_rest(model_type: str, tmp_path: Path) -> None:
    run = RunConfig(model=folder_of(model_type, tmp_path), technique="lora", target_modules="q_proj,v_proj")
    with pytest.raises(BadInputError, match="reaches 1 of 4 layers") as refusal:
        suited_to_model(run)
    assert OTHERS[model_type] in str(refusal.value)
    assert "all-linear" in str(refusal.value)
    also = f"q_proj,v_proj,{OTHERS[model_type]}"
    assert suited_to_model(run.changed_to(target_modules=also)).target_modules == also


@pytest.mark.parametrize("model_type", HYBRIDS)
@pytest.mark.parametrize("targets", ["all-linear", r".*q_proj"])
def test_all_layers_and_an_expression_are_taken_as_they_are(model_type: str, targets: str, tmp_path: Path) -> None:
    run = RunConfig(model=folder_of(model_type, tmp_path), technique="lora", target_modules=targets)
    assert suited_to_model(run).target_modules == targets


def test_names_that_miss_some_layers_are_taken_and_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = folder_of("qwen3_5_text", tmp_path, layer_types=["full_attention"] * 3 + ["linear_attention"])
    run = RunConfig(model=model, technique="lora", target_modules="q_proj,v_proj")
    assert suited_to_model(run).target_modules == "q_proj,v_proj"
    said = capsys.readouterr().out
    assert "3 of 4 layers" in said
    assert "in_proj_qkv" in said


def test_a_folder_s_own_names_give_way_to_all_linear_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "recipe_targets", lambda run: "q_proj,v_proj")
    run = RunConfig(model=folder_of("qwen3_5_text", tmp_path), technique="lora", target_modules="q_proj,v_proj")
    assert suited_to_model(run).target_modules == "all-linear"
    assert "1 of 4 layers" in capsys.readouterr().out


@pytest.mark.parametrize("model_type", ALIKE)
def test_names_that_all_layers_have_are_taken_in_silence(
    model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunConfig(model=folder_of(model_type, tmp_path), technique="lora", target_modules="q_proj,v_proj")
    assert suited_to_model(run).target_modules == "q_proj,v_proj"
    assert " of 4 layers" not in capsys.readouterr().out
