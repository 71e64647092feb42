"""What a config.json says of a model's size."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig

from common.architectures import MODEL_CONFIGS, UnknownArchitectureError, find_config, read_architecture
from common.run_config import BadInputError

SHAPES = sorted(path.stem for path in MODEL_CONFIGS.glob("*.json"))


def parameters_in_torch(path: Path) -> int:
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_real_model(name: str) -> None:
    architecture = read_architecture(name)
    assert architecture.parameters == parameters_in_torch(MODEL_CONFIGS / f"{name}.json")
    assert architecture.parameters == sum(architecture.by_part().values())


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "llama"])
def test_the_llama_family(kind: str, tmp_path: Path) -> None:
    names = {"mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}
    facts = {
        "architectures": [f"{names[kind]}ForCausalLM"],
        "model_type": kind,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 128,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(facts))
    assert read_architecture(str(path)).parameters == parameters_in_torch(path)


def test_the_embedded_base_is_found_by_its_folder() -> None:
    assert read_architecture("assets/embedded_base").parameters == 1_049_728


def test_a_hub_id_is_found_among_the_shapes_and_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_config("Qwen/Qwen2.5-7B-Instruct") == MODEL_CONFIGS / "qwen2.5-7b.json"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BadInputError, match="There is no shape of someone/theirs"):
        find_config("someone/theirs")
    snapshot = tmp_path / "models--someone--theirs" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert find_config("someone/theirs") == snapshot / "config.json"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not JSON"),
        ("[]", "has no key model_type"),
        ('{"model_type": "llama", "hidden_size": 8}', "lacks the key 'num_attention_heads'"),
        (
            '{"model_type": "llama", "hidden_size": -8}',
            "hidden_size in config.json .* is -8, but must be a whole number",
        ),
        (
            '{"model_type": "llama", "vocab_size": "x"}',
            "vocab_size in config.json .* is 'x', but must be a whole number",
        ),
    ],
)
def test_a_broken_config_is_named(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(BadInputError, match=sentence):
        read_architecture(str(path))


def test_an_unknown_architecture_names_those_that_are_known(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "mamba"}')
    with pytest.raises(UnknownArchitectureError, match=r"'mamba'.*llama, mistral, qwen2"):
        read_architecture(str(path))
