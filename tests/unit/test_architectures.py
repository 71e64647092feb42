"""What a config.json says of a model's size."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig

from common.base.errors import BadInputError
from common.planning.architectures import (
    MODEL_CONFIGS,
    UnknownArchitectureError,
    as_classifier,
    cached_commit,
    find_config,
    is_hub_id,
    read_architecture,
    slice_of_rank,
    usual_tiles,
)

SHAPES = sorted(path.stem for path in MODEL_CONFIGS.glob("*.json"))


def parameters_in_torch(path: Path) -> int:
    config = AutoConfig.from_pretrained(path)
    # a bare encoder is planned with the head that it was trained with
    name = config.architectures[0].replace("BertModel", "BertForMaskedLM")
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_real_model(name: str) -> None:
    architecture = read_architecture(name)
    assert architecture.parameters == parameters_in_torch(MODEL_CONFIGS / f"{name}.json")
    assert architecture.parameters == sum(architecture.by_part().values())


@pytest.mark.parametrize("model", ["assets/embedded_vision_base", "smolvlm-instruct", "idefics3-8b-llama3"])
@pytest.mark.parametrize("kind", ["idefics3", "smolvlm"])
def test_a_vision_tower_s_parts_are_those_of_the_real_model(model: str, kind: str, tmp_path: Path) -> None:
    config = json.loads(find_config(model).read_text())
    config["model_type"], config["vision_config"]["model_type"] = kind, f"{kind}_vision"
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with torch.device("meta"):
        real = transformers.AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(path))
    real.tie_weights()
    parts, tower = read_architecture(str(path)).by_part(), read_architecture(str(path)).tower

    def weights(module: torch.nn.Module, name: str = "") -> int:
        return sum(weight.numel() for key, weight in module.named_parameters() if name in key)

    assert sum(parts.values()) == weights(real)
    assert parts["vision tower"] == weights(real.model.vision_model)
    assert parts["connector"] == weights(real.model.connector)
    for name in ("q_proj", "o_proj", "down_proj", "norm"):
        assert parts[{"norm": "norms"}.get(name, name)] == weights(real.model.text_model, name)
    assert tower.patches == real.model.vision_model.embeddings.num_patches
    assert tower.tokens == real.model.image_seq_len


@pytest.mark.parametrize(
    ("processor", "tiles"),
    [
        (None, 17),
        ({"do_image_splitting": False}, 1),
        ({"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}}, 17),
        ({"image_processor": {"size": {"longest_edge": 1000}, "max_image_size": {"longest_edge": 384}}}, 10),
        ({"size": {"longest_edge": 384}, "max_image_size": {"longest_edge": 384}}, 1),
    ],
)
def test_a_square_picture_becomes_as_many_squares_as_the_processor_cuts(
    processor: dict | None, tiles: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    if processor is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    assert usual_tiles(str(tmp_path)) == tiles


ENCODERS = [name for name in SHAPES if read_architecture(name).family.classifier]


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("classes", [2, 7])
def test_a_classifier_s_parameters_are_those_of_the_real_model(name: str, classes: int) -> None:
    config = AutoConfig.from_pretrained(MODEL_CONFIGS / f"{name}.json", num_labels=classes)
    with torch.device("meta"):
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    architecture = as_classifier(read_architecture(name), classes)
    assert architecture.parameters == sum(weight.numel() for weight in model.parameters())
    assert as_classifier(architecture, classes) == architecture


def test_only_encoders_classify_and_are_divided_by_columns() -> None:
    for name in ("llama-3.2-1b", "bart-large-cnn"):
        with pytest.raises(BadInputError, match=f"{name} is of kind .*, but classifiers are planned for encoders"):
            as_classifier(read_architecture(name), 3)
        with pytest.raises(BadInputError, match=r"--parallel tp is planned for encoders .* pass --parallel ddp"):
            slice_of_rank(read_architecture(name), 2)
    minilm = read_architecture("all-minilm-l6-v2")
    for ranks, sentence in ((5, "12 attention heads, which 5 ranks"), (9, "12 attention heads, which 9 ranks")):
        with pytest.raises(BadInputError, match=sentence):
            slice_of_rank(minilm, ranks)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_rank_of_tensor_parallel_has_halves_of_the_layers_matrices(name: str) -> None:
    whole = read_architecture(name)
    half, hidden = slice_of_rank(whole, 2), whole.hidden
    for linear, part in zip(whole.stacks[0].linears, half.stacks[0].linears, strict=True):
        assert part.inputs * part.outputs * 2 == linear.inputs * linear.outputs
        biases = [each.parameters - each.inputs * each.outputs for each in (linear, part)]
        assert biases[0] == biases[1] * (2 if not linear.ends_block else 1)
    matrices = 4 * hidden**2 + 2 * hidden * whole.intermediate
    biases = 3 * hidden + whole.intermediate  # of those that are split by columns
    assert whole.parameters - half.parameters == whole.layers * (matrices + biases) / 2
    assert (half.heads * 2, half.head_dim, half.hidden) == (whole.heads, whole.head_dim, whole.hidden)


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
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BadInputError, match="There is no shape of someone/theirs"):
        find_config("someone/theirs")
    snapshot = tmp_path / "models--someone--theirs" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert find_config("someone/theirs") == snapshot / "config.json"


def test_a_revision_of_a_hub_id_is_found_in_the_cache_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model, cache = "Qwen/Qwen2.5-7B-Instruct", tmp_path / "models--Qwen--Qwen2.5-7B-Instruct"
    with pytest.raises(BadInputError, match=r"hf download Qwen.* --revision v1"):
        find_config(model, "v1")
    for commit, ref in (("a1", "v1"), ("b2", "main")):
        for file, text in ((cache / "snapshots" / commit / "config.json", "{}"), (cache / "refs" / ref, commit)):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    assert find_config(model, "v1") == find_config(model, "a1") == cache / "snapshots" / "a1" / "config.json"
    assert [cached_commit(model, revision) for revision in ("v1", "a1", "", "v9")] == ["a1", "a1", "b2", None]
    with pytest.raises(BadInputError, match=r"no shape of .* at the revision v9"):
        find_config(model, "v9")
    cache.rename(tmp_path / "models--someone--theirs")
    assert find_config("someone/theirs").parent.name == "b2", "the main branch's, not the first of all"


@pytest.mark.parametrize("model", ["qwen2.5-7b", "assets/embedded_base", str(MODEL_CONFIGS / "qwen2.5-7b.json")])
def test_the_revision_of_what_is_no_hub_id_is_refused(model: str) -> None:
    with pytest.raises(BadInputError, match="model_revision is 'v1', but it is for models of the Hub"):
        find_config(model, "v1")
    assert cached_commit(model) is None


@pytest.mark.parametrize("model", ["not a/name", "../model", "a/b/c", "~/model"])
def test_what_cannot_be_an_id_is_none(model: str) -> None:
    assert not is_hub_id(model)
    assert cached_commit(model) is None


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
