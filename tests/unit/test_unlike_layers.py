"""Models whose layers are not alike: what layers share is trained, and what is beside them is on one device."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.base.run_config import RunConfig
from common.models.families import suited_to_model
from common.models.placement import place_stages
from common.planning.job import BatchShape
from tests.families import make_tiny


def gradients(folder: str, **checkpointing: bool) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    if checkpointing:
        model.gradient_checkpointing_enable(checkpointing)
    ids = torch.arange(5, 45).view(2, 20)
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def largest_difference(folder: str, use_reentrant: bool) -> float:
    without, recomputed = gradients(folder), gradients(folder, use_reentrant=use_reentrant)
    size = max(gradient.abs().max() for gradient in without.values())
    return max((without[name] - recomputed[name]).abs().max() / size for name in without).item()


def test_keys_that_layers_share_get_their_gradients_when_layers_are_recomputed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny("gemma4_text", tmp_path / "gemma4", initializer_range=0.1)
    asked = RunConfig(model=folder, gradient_checkpointing=True, use_reentrant=True)
    assert not suited_to_model(asked).use_reentrant
    assert "use_reentrant is False" in capsys.readouterr().out
    assert largest_difference(folder, use_reentrant=False) < 1e-5
    assert largest_difference(folder, use_reentrant=True) > 1e-3  # the negative control


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_where_layers_share_nothing_both_kinds_of_checkpointing_are_taken(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / family, initializer_range=0.1)
    asked = RunConfig(model=folder, gradient_checkpointing=True, use_reentrant=True)
    assert suited_to_model(asked).use_reentrant
    assert largest_difference(folder, use_reentrant=True) < 1e-5


@pytest.mark.parametrize("family", ["gemma4_text", "qwen3_5_text", "lfm2"])
def test_modules_whose_results_are_added_are_on_one_device(family: str, tmp_path: Path) -> None:
    """A last norm is with the last layer; of several modules beside the layers some compute what layers are given."""
    run = RunConfig(technique="full", model=make_tiny(family, tmp_path / family), parallel="mp", stages=2)
    held = place_stages(suited_to_model(run), BatchShape(2, 16, 15)).stage_map
    beside = {name.rpartition(".")[2]: stage for name, stage in held.items() if ".layers." not in name}
    if family == "gemma4_text":
        assert {beside[name] for name in beside if "per_layer" in name} == {0}
    else:
        assert beside["norm" if family == "qwen3_5_text" else "embedding_norm"] == 1
    assert beside["embed_tokens"] == 0
    assert {stage for name, stage in held.items() if ".layers." in name} == {0, 1}
