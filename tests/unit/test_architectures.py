"""What a config.json says of a model's size."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig

from common.base.errors import BadInputError, NotPlannedError
from common.hardware.devices import find_gpu
from common.planning.architectures import read_architecture
from common.planning.device_maps import balanced_shares, check_device_map, device_map_of, shares_of_map
from common.planning.job import BatchShape, Job
from common.planning.model_configs import MODEL_CONFIGS, cached_commit, find_config, is_hub_id, usual_tiles
from common.planning.plans import make_plan
from common.planning.ranking import ranked_plans
from common.planning.time_plan import Cluster

LLAMA_LIKE = ("gemma3_text", "llama", "ministral3", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "smollm3")


def on_meta(make: Callable[..., torch.nn.Module], path: Path) -> torch.nn.Module:
    with torch.device("meta"):
        return make(AutoConfig.from_pretrained(path))


def weights_of(module: torch.nn.Module, name: str = "") -> int:
    return sum(weight.numel() for key, weight in module.named_parameters() if name in key)


@pytest.mark.parametrize("model", ["assets/embedded_vision_base", "smolvlm-instruct", "idefics3-8b-llama3"])
@pytest.mark.parametrize("kind", ["idefics3", "smolvlm"])
def test_a_vision_tower_s_parts_are_those_of_the_real_model(model: str, kind: str, tmp_path: Path) -> None:
    config = json.loads(find_config(model).read_text())
    config["model_type"], config["vision_config"]["model_type"] = kind, f"{kind}_vision"
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    real, planned = on_meta(transformers.AutoModelForImageTextToText.from_config, path), read_architecture(str(path))
    real.tie_weights()
    parts, vision = planned.by_part(), real.model.vision_model
    expected = {
        "vision tower": weights_of(vision),
        "connector": weights_of(real.model.connector),
        **{name: weights_of(real.model.text_model, name) for name in ("q_proj", "o_proj", "down_proj")},
        "norms": weights_of(real.model.text_model, "norm"),
    }
    assert sum(parts.values()) == weights_of(real)
    assert {name: parts[name] for name in expected} == expected
    assert (planned.tower.encoder.max_length, planned.tower.tokens) == (
        vision.embeddings.num_patches,
        real.model.image_seq_len,
    )


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


@pytest.mark.parametrize("kind", [*LLAMA_LIKE])
def test_the_llama_family(kind: str, tmp_path: Path) -> None:
    facts = {
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
        "pad_token_id": 0,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(facts))
    real = on_meta(transformers.AutoModelForCausalLM.from_config, path)
    assert read_architecture(str(path)).parameters == weights_of(real)


MIXTURE = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 64},
    **{"num_experts_per_tok": 2, "num_local_experts": 8, "num_experts": 8, "moe_intermediate_size": 32},
}


@pytest.mark.parametrize(("kind", "wide"), [("mixtral", 96), ("qwen3_moe", 32), ("olmoe", 96), ("gpt_oss", 96)])
def test_a_mixture_s_parts_are_those_of_the_real_model(kind: str, wide: int, tmp_path: Path) -> None:
    path, config = tmp_path / "config.json", {**MIXTURE, "model_type": kind}
    if kind == "olmoe":  # whose norms of queries are as wide as the hidden states
        config["head_dim"] = 16
    if kind != "qwen3_moe":
        del config["num_experts"], config["moe_intermediate_size"]
    path.write_text(json.dumps(config))
    real, planned = on_meta(transformers.AutoModelForCausalLM.from_config, path), read_architecture(str(path))
    parts = planned.by_part()
    assert planned.parameters == sum(parts.values()) == weights_of(real)
    assert {name: parts[name] for name in ("experts", "gate", "norms")} == {
        "experts": weights_of(real, "experts"),
        "gate": weights_of(real, "mlp.gate.") + weights_of(real, "mlp.router."),
        "norms": weights_of(real, "norm") + weights_of(real, "sinks"),
    }
    biases = weights_of(real, "experts.gate_up_proj_bias") + weights_of(real, "experts.down_proj_bias")
    assert planned.expert_weights == parts["experts"] - biases
    assert (planned.experts, planned.chosen, planned.intermediate) == (8, 2, 2 * wide)
    path.write_text(json.dumps({**config, "mlp_only_layers": [0]}))
    with pytest.raises(NotPlannedError, match="Only some layers"):
        read_architecture(str(path))


def test_a_mixture_that_clips_its_queries_is_refused(tmp_path: Path) -> None:
    config = json.loads((MODEL_CONFIGS / "olmoe-1b-7b-0924.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "clip_qkv": 8.0}))
    with pytest.raises(NotPlannedError, match="clip_qkv"):
        read_architecture(str(path))


def test_layers_of_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    config = json.loads((MODEL_CONFIGS / "olmo-3-7b.json").read_text())
    path = tmp_path / "config.json"
    for kinds, unknown in ((["sliding_attention", "full_attention"], ""), (["full_attention", "conv"], "conv")):
        path.write_text(json.dumps({**config, "num_hidden_layers": 2, "layer_types": kinds}))
        with pytest.raises(NotPlannedError, match=f"layers of the kind '{unknown}'") if unknown else nullcontext():
            assert read_architecture(str(path)).layers == 2


def test_a_hub_id_is_found_among_the_shapes_and_a_revision_in_the_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model, cache = "Qwen/Qwen2.5-7B-Instruct", tmp_path / "models--Qwen--Qwen2.5-7B-Instruct"
    assert find_config(model) == MODEL_CONFIGS / "qwen2.5-7b.json"
    for absent, revision, said in (
        (model, "v1", r"hf download Qwen.* --revision v1"),
        ("someone/theirs", "", "There is no shape of someone/theirs"),
    ):
        with pytest.raises(BadInputError, match=said):
            find_config(absent, revision)
    for commit, ref in (("a1", "v1"), ("b2", "main")):
        for file, text in ((cache / "snapshots" / commit / "config.json", "{}"), (cache / "refs" / ref, commit)):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    assert find_config(model, "v1") == find_config(model, "a1") == cache / "snapshots" / "a1" / "config.json"
    assert [cached_commit(model, revision) for revision in ("v1", "a1", "", "v9")] == ["a1", "a1", "b2", None]
    with pytest.raises(BadInputError, match=r"no shape of .* at the revision v9"):
        find_config(model, "v9")
    cache = cache.rename(tmp_path / "models--someone--theirs")
    assert find_config("someone/theirs").parent.name == "b2", "the main branch's, not the first of all"
    (cache / "refs" / "main").unlink()
    assert find_config("someone/theirs").parent.parent == cache / "snapshots"


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
    ("text", "error", "sentence"),
    [
        ("{", BadInputError, "cannot be read"),
        ("[]", BadInputError, "has no key model_type"),
        ('{"model_type": "llama", "hidden_size": 8}', BadInputError, "lacks the key 'num_attention_heads'"),
        (
            '{"model_type": "llama", "hidden_size": -8}',
            BadInputError,
            "hidden_size in config.json .* is -8, but must be a whole number",
        ),
        (
            '{"model_type": "llama", "vocab_size": "x"}',
            BadInputError,
            "vocab_size in config.json .* is 'x', but must be a whole number",
        ),
        ('{"model_type": "mamba"}', NotPlannedError, r"'mamba'.*llama, mistral, qwen2"),
    ],
)
def test_a_broken_or_unknown_config_is_named(text: str, error: type, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(error, match=sentence):
        read_architecture(str(path))


@pytest.mark.parametrize(
    "unknown", [{"activation_function": "gelu"}, {"attn_pdrop": 0.0}, {"add_cross_attention": True}], ids=str
)
def test_a_gpt2_is_planned_as_published_alone(unknown: dict, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    facts = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 128}
    path.write_text(json.dumps({**facts, "n_inner": 96}))
    real = on_meta(transformers.AutoModelForCausalLM.from_config, path)
    assert read_architecture(str(path)).parameters == weights_of(real)
    path.write_text(json.dumps({**facts, **unknown}))
    with pytest.raises(NotPlannedError, match="GPT-2"):
        read_architecture(str(path))


def test_a_gpt2_is_divided_by_layers_but_not_into_stages() -> None:
    architecture, gpu = read_architecture("gpt2"), find_gpu("a6000")
    of_two = {"technique": "full", "batch": BatchShape(4, 512, 511), "devices": 2}
    shares = balanced_shares(architecture, Job(parallel="mp", **of_two), (gpu, gpu))
    device_map = device_map_of(architecture, shares, (0, 1))
    real = on_meta(transformers.AutoModelForCausalLM.from_config, find_config("gpt2"))
    tied = [("lm_head.weight", "transformer.wte.weight")]
    check_device_map(device_map, [name for name, _ in real.named_parameters(remove_duplicate=False)], tied, 2)
    assert tuple(replace(share, in_flight=1) for share in shares) == shares_of_map(architecture, device_map, 2)
    ways = ranked_plans(architecture, Job(**of_two, parallel="ddp"), Cluster((gpu, gpu)), {}, ["full"])
    assert ways
    assert not any(plan.job.parallelism.pipelines for plan in ways)
    with pytest.raises(NotPlannedError, match="ddp or mp"):
        make_plan(architecture, Job(**of_two, parallel="pp", micro_batches=2), Cluster((gpu, gpu)), {})
