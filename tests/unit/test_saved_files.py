"""Models of which each rank holds a part: saved file by file, as one device saves them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from common.models import shards
from common.models.saved_files import save_model, weights_to_save
from common.planning import host_memory
from common.planning.host_memory import file_bytes
from tests.unit.ranks import found_by_ranks

AS_ONE_DEVICE = {"equal": True, "loads": True, "config": True, "numel": True}


def check_saved(found: dict[str, list]) -> None:
    for case, (of_main, of_other) in found.items():
        assert of_other == {"held": 0}, case
        assert {name: of_main[name] for name in AS_ONE_DEVICE} == AS_ONE_DEVICE, case
        assert of_main["held"] <= 1, case
        assert of_main["divided"] == pytest.approx(0.5, abs=0.02), case
        assert of_main["files"] > 4, case


@pytest.mark.slow
def test_ranks_save_their_parts_as_one_device_saves_the_whole(tmp_path: Path) -> None:
    check_saved(found_by_ranks("saved_files_worker.py", 2, tmp_path, "fsdp", "fsdp, tied", "fsdp, experts", "tp"))


@pytest.mark.slow
@pytest.mark.usefixtures("needs_deepspeed")
def test_deepspeeds_parts_are_handed_over_and_saved_as_one_device_saves_the_whole(tmp_path: Path) -> None:
    check_saved(found_by_ranks("saved_files_worker.py", 2, tmp_path, "zero3", "zero3, tied"))


@pytest.fixture
def model() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.fixture
def many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "SMALL_FILE_BYTES", 0)


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("weights", [0, 5, 20])
def test_what_was_not_finished_does_not_load(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: int
) -> None:
    """Also where an earlier model was whole there."""
    save_model(model, tmp_path, True)
    left = iter(range(weights))

    def dies(weight: torch.Tensor) -> torch.Tensor:
        if next(left, None) is None:
            raise ConnectionError("the other rank is gone")
        return weight

    monkeypatch.setattr(shards, "gathered", dies)
    with pytest.raises(ConnectionError):
        save_model(model, tmp_path, True)
    with pytest.raises((OSError, ValueError)):  # no config.json
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_small_model_is_one_file_and_a_later_one_takes_its_place(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(model, tmp_path, True)
    names = {"config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == names
    monkeypatch.setattr(host_memory, "SMALL_FILE_BYTES", 0)
    save_model(model, tmp_path, True)
    index = json.loads((tmp_path / SAFE_WEIGHTS_INDEX_NAME).read_text())
    files = {path.name for path in tmp_path.glob("*.safetensors")}
    assert files == set(index["weight_map"].values())
    assert index["weight_map"].keys() == weights_to_save(model).keys()
    assert index["metadata"] == {
        "total_parameters": model.num_parameters(),
        "total_size": sum(weight.nbytes for weight in model.parameters()),
    }
    for name in files:
        with safe_open(tmp_path / name, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_a_file_is_a_small_part_of_a_model_and_no_more_than_the_hub_s() -> None:
    assert [file_bytes(size * 10**9) / 10**9 for size in (0, 16, 32, 140)] == [0.016, 1, 2, 5]
