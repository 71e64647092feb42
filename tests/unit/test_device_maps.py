"""Layers are placed as well as any search can, shares and device maps say the same, and wrong maps are refused."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from common.base.errors import BadInputError
from common.hardware.devices import Gpu, device_name, find_gpu
from common.planning.architectures import Architecture, as_classifier, read_architecture
from common.planning.device_maps import (
    balanced_shares,
    check_device_map,
    device_map_of,
    even_shares,
    read_device_map,
    shares_of_map,
    shares_that_fit,
    whole_model_on,
)
from common.planning.gpu_overhead import memory_with_overhead
from common.planning.job import BatchShape, Job
from common.planning.model_configs import find_config
from common.planning.shares import Share, whole_model

A6000, A5000, H200 = find_gpu("a6000"), find_gpu("a5000"), find_gpu("h200")
LLAMA, TIED = read_architecture("llama-3.1-8b"), read_architecture("llama-3.2-1b")
LORA = Job("lora", "mp", BatchShape(2, 512, 511), devices=2)
BAR = 1.05
"""Fullest device of the search, over the fullest of the best contiguous placement."""


def with_layers(architecture: Architecture, layers: int) -> Architecture:
    (stack,) = architecture.stacks
    return replace(architecture, stacks=(replace(stack, layers=layers),))


# -- the search


def fullest(architecture: Architecture, job: Job, shares: tuple[Share, ...], gpus: tuple[Gpu, ...]) -> float:
    pairs = zip(shares, gpus, strict=True)
    return max(memory_with_overhead(architecture, job, share, gpu).safe_gib / gpu.memory_gib for share, gpu in pairs)


def best_of_all(architecture: Architecture, job: Job, gpus: tuple[Gpu, ...]) -> float:
    """The lowest fullness over every cut, and every place of embeddings and head that the job allows."""
    stages, layers = len(gpus), architecture.layers
    tied = architecture.tied and job.parallel == "mp"
    known: dict[tuple[Share, Gpu], float] = {}

    def fullness(share: Share, gpu: Gpu) -> float:
        if (share, gpu) not in known:
            known[share, gpu] = fullest(architecture, job, (share,), (gpu,))
        return known[share, gpu]

    return min(
        max(
            fullness(Share((end - start,), stage == first, stage == last, job.in_flight(stage)), gpu)
            for stage, (gpu, start, end) in enumerate(zip(gpus, (0, *cuts), (*cuts, layers), strict=True))
        )
        for first, last in ([(0, 0), (stages - 1, stages - 1)] if tied else [(0, stages - 1)])
        for cuts in itertools.combinations(range(1, layers), stages - 1)
    )


MODELS = (("llama-3.2-1b", 0), ("llama-3.2-1b", 7), ("qwen2.5-7b", 13), ("roberta-large", 0))
WAYS = (("mp", "1f1b"), ("pp", "1f1b"), ("pp", "gpipe"))
MACHINES = (
    ((A6000, A6000), BatchShape(4, 512, 511)),
    ((A6000, A5000, H200), BatchShape(16, 128, 8)),
    ((A5000,) * 4, BatchShape(4, 512, 511, padded=True)),
)
SEARCHED = [
    *(  # every pair of a model, a machine, a technique and a way
        (*model, ("lora", "full")[(row + column) % 2], *WAYS[(row + column) % 3], *machine)
        for row, model in enumerate(MODELS)
        for column, machine in enumerate(MACHINES)
    ),
    ("llama-3.1-70b", 0, "full", "pp", "1f1b", (A6000, A6000, H200), BatchShape(4, 512, 511)),
    ("llama-3.1-8b", 0, "lora", "mp", "1f1b", (A5000, A6000, A5000, H200), BatchShape(1, 4096, 4095)),
]


@pytest.mark.parametrize(("name", "layers", "technique", "parallel", "schedule", "gpus", "batch"), SEARCHED)
def test_layers_are_placed_as_well_as_any_search_can(
    name: str,
    layers: int,
    technique: str,
    parallel: str,
    schedule: str,
    gpus: tuple[Gpu, ...],
    batch: BatchShape,
) -> None:
    architecture = read_architecture(name)
    architecture = with_layers(architecture, layers) if layers else architecture
    job = Job(
        technique,
        parallel,
        batch,
        len(gpus),
        micro_batches=min(4, batch.rows) if parallel == "pp" else 1,
        schedule=schedule,
        gradient_checkpointing=layers == 13,
    )
    shares, best = balanced_shares(architecture, job, gpus), best_of_all(architecture, job, gpus)
    assert sum(share.layers[0] for share in shares) == architecture.layers
    assert fullest(architecture, job, shares, gpus) <= BAR * best
    assert (shares_that_fit(architecture, job, gpus) is not None) == (best <= 1)
    assert best <= fullest(architecture, job, even_shares(architecture, job, gpus), gpus)


@pytest.mark.parametrize(
    ("architecture", "parallel", "gpus", "ends"),
    [
        (TIED, "mp", (A6000, H200), [(False, False), (True, True)]),
        (TIED, "mp", (H200, A6000), [(True, True), (False, False)]),
        (TIED, "pp", (H200, A6000), [(True, False), (False, True)]),
        (LLAMA, "mp", (H200, A6000), [(True, False), (False, True)]),
    ],
)
def test_tied_embeddings_and_head_share_a_device_in_one_process(
    architecture: Architecture, parallel: str, gpus: tuple[Gpu, ...], ends: list[tuple[bool, bool]]
) -> None:
    shares = balanced_shares(architecture, replace(LORA, parallel=parallel), gpus)
    assert [(share.has_embeddings, share.has_head) for share in shares] == ends


@pytest.mark.parametrize(("layers", "devices", "counts"), [(7, 3, [3, 2, 2]), (13, 4, [4, 3, 3, 3]), (6, 2, [3, 3])])
def test_even_shares_give_the_first_ones_what_is_over(layers: int, devices: int, counts: list[int]) -> None:
    job = Job("lora", "pp", BatchShape(8, 64, 63), devices, micro_batches=8)
    shares = even_shares(with_layers(LLAMA, layers), job, (A6000,) * devices)
    assert [share.layers[0] for share in shares] == counts
    assert [share.in_flight for share in shares] == list(range(devices, 0, -1))


@pytest.mark.parametrize("place", [balanced_shares, even_shares, shares_that_fit])
def test_more_stages_than_layers_are_refused(place: Callable) -> None:
    with pytest.raises(BadInputError, match=r"16 layers, too few for 20 stages: take at most 16 devices"):
        place(TIED, replace(LORA, devices=20), (A6000,) * 20)


# -- shares and device maps


def meta_model(name: str, layers: int, kind: str = "") -> PreTrainedModel:
    config = AutoConfig.from_pretrained(find_config(name))
    config.num_hidden_layers = layers
    with torch.device("meta"):
        return getattr(transformers, kind or config.architectures[0])._from_config(config)


def names_of(model: PreTrainedModel) -> tuple[list[str], list[tuple[str, str]]]:
    return list(model.state_dict()), list(model.all_tied_weights_keys.items())


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen2.5-7b", "roberta-large"])
@pytest.mark.parametrize(("layers", "devices"), [(7, 2), (13, 3), (5, 4)])
def test_shares_become_the_map_of_a_real_model_and_come_back(name: str, layers: int, devices: int) -> None:
    architecture = with_layers(read_architecture(name), layers)
    shares = balanced_shares(architecture, replace(LORA, devices=devices), (A6000,) * devices)
    names, tied = names_of(meta_model(name, layers))
    for numbers in (list(range(devices)), [f"cuda:{number}" for number in range(devices)]):
        device_map = device_map_of(architecture, shares, numbers)
        check_device_map(device_map, names, tied, devices)
        assert shares_of_map(architecture, device_map, devices) == shares


def test_a_map_may_name_parts_and_wholes() -> None:
    architecture = with_layers(LLAMA, 3)
    device_map = {"": 1, "model.embed_tokens.weight": 0, "model.layers.0.self_attn": 0, "model.layers.0": 0}
    assert shares_of_map(architecture, device_map, 2) == (Share((1,), True, False), Share((2,), False, True))
    assert shares_of_map(architecture, whole_model_on("cpu"), 1) == (whole_model(architecture),)
    parts = {"model.layers.0.self_attn": 0, "model.layers.0.mlp": 0, "model.layers": 1, "model": 0, "lm_head": 1}
    assert [share.layers for share in shares_of_map(architecture, parts, 2)] == [(1,), (2,)]
    with pytest.raises(BadInputError, match=r"no device for model\.layers\.2"):
        shares_of_map(architecture, {"model.layers.0": 0, "model.layers.1": 1}, 2)


def test_a_classifier_s_head_is_named_by_whoever_has_it() -> None:
    architecture = as_classifier(with_layers(read_architecture("roberta-large"), 4), 2)
    shares = (Share((2,), True, False), Share((2,), False, True))
    device_map = device_map_of(architecture, shares, [0, 1])
    model = meta_model("roberta-large", 4, "RobertaForSequenceClassification")
    check_device_map(device_map, list(model.state_dict()), [], 2)
    assert shares_of_map(architecture, device_map, 2) == shares


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bart-large-cnn", "has an encoder and a decoder"),
        ("smolvlm-instruct", "has a vision tower: such models are not divided"),
    ],
)
def test_models_of_two_parts_are_not_divided_by_name(name: str, said: str) -> None:
    model = read_architecture(name)
    with pytest.raises(BadInputError, match=f"{name} {said}"):
        device_map_of(model, [whole_model(model)], [0])
    with pytest.raises(BadInputError, match=f"{name} {said}"):
        shares_of_map(model, {"": 0}, 1)


# -- device maps that users bring

NAMES, PAIRS = names_of(meta_model("llama-3.2-1b", 4))
GOOD = {
    "model.embed_tokens": 0,
    "model.layers.0": 0,
    "model.layers.1": 0,
    "model.layers.2": 1,
    "model.layers.3": "cuda:1",
    "model.norm": 0,
    "model.rotary_emb": 0,
    "lm_head": 0,
}


def without(name: str) -> dict[str, object]:
    return {module: device for module, device in GOOD.items() if module != name}


@pytest.mark.parametrize(
    ("device_map", "devices", "sentence"),
    [
        (without("model.norm"), 2, r'no device for model\.norm\.weight: add "model\.norm"'),
        (without("model.layers.2"), 2, r"no device for model\.layers\.2\."),
        ({**GOOD, "model.layer.3": 1}, 2, r"'model\.layer\.3', .* did you mean model\.layers\.3\?"),
        ({**GOOD, "model.layers.4": 1}, 2, r"'model\.layers\.4', of which the model has no weight"),
        ({**GOOD, "xyz": 1}, 2, r"'xyz', of which the model has no weight: leave it out"),
        ({**GOOD, "model.layers.3": 7}, 2, r"model\.layers\.3 on 7, but the devices of this run are 0, 1"),
        ({**GOOD, "model.layers.3": "cuda:7"}, 2, r"on 'cuda:7', but the devices of this run are 0, 1"),
        ({**GOOD, "model.layers.3": -1}, 2, "on -1, but"),
        ({**GOOD, "lm_head": "disk"}, 2, "lm_head on 'disk', but"),
        ({**GOOD, "lm_head": "cpu"}, 2, "lm_head on 'cpu', but"),
        ({"": "gpu"}, 2, "the whole model on 'gpu', but"),
        ({**GOOD, "model.layers.3.mlp": 0}, 2, r"tears model\.layers\.3 apart, with .* on device 1 and .* on 0"),
        ({**GOOD, "lm_head": 1}, 2, r"lm_head on device 1 and model\.embed_tokens on 0, but they are one tied weight"),
        (GOOD, 3, r"gives device 2 of 3 no layer, and has 4 of them on 2: move some there"),
        ({"": "cpu"}, 2, r"gives device 1 of 2 no layer"),
    ],
)
def test_wrong_maps_are_refused_in_a_sentence(device_map: dict, devices: int, sentence: str) -> None:
    with pytest.raises(BadInputError, match=sentence) as mistake:
        check_device_map(device_map, NAMES, PAIRS, devices)
    assert str(mistake.value).count(". ") == 0


@pytest.mark.parametrize(
    ("device_map", "devices"),
    [
        (GOOD, 2),
        (without("model.rotary_emb"), 2),
        ({"": "cpu"}, 1),
        ({"": 0}, 1),
        ({"": 0, "model.layers.2": "1", "model.layers.3.mlp": 1, "model.layers.3": 1}, 2),
        ({"": 0, "model.layers.3": 1, "model.layers.0.mlp.act_fn": 0}, 2),
    ],
)
def test_right_maps_pass_and_none_with_an_entry_of_no_weight(device_map: dict, devices: int) -> None:
    check_device_map(device_map, NAMES, PAIRS, devices)
    with pytest.raises(BadInputError, match=r"no\.such\.layer"):
        check_device_map({**device_map, "no.such.layer": device_map.get("", 0)}, NAMES, PAIRS, devices)


def test_layers_of_an_encoder_and_of_a_decoder_are_told_apart() -> None:
    names, tied = names_of(meta_model("bart-large-cnn", 2))
    check_device_map({"": 0, "model.decoder.layers": 1}, names, tied, 2)
    with pytest.raises(BadInputError, match=r"tears model\.decoder\.layers\.1 apart"):
        check_device_map({"": 0, "model.decoder.layers.1.fc1": 1}, names, tied, 2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "There is no device map .*: pass balanced, even, or a JSON file"),
        ("{", "is not JSON"),
        ("[1]", "is no object"),
        ("{}", "is no object with modules"),
        ('{"a": 1.5}', r"has 1\.5 for a"),
        ('{"a": true}', "has True for a"),
        ('{"a": null}', "has None for a"),
        ('{"a": {"b": 0}}', "for a: write a device's number"),
        ('{"a": 0, "b": 1, "a": 1}', "names a more than once"),
    ],
)
def test_files_that_hold_no_map_are_refused(tmp_path: Path, text: str | None, sentence: str) -> None:
    path = tmp_path / "map.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInputError, match=sentence):
        read_device_map(path)


@pytest.mark.parametrize("kind", [Path, str])
def test_a_map_is_read_as_it_was_written(tmp_path: Path, kind: type) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps(GOOD))
    assert read_device_map(kind(path)) == GOOD


def test_devices_are_named_as_torch_does() -> None:
    assert [device_name("cpu", 3), device_name("cuda", 3)] == ["cpu", "cuda:3"]
