"""Files of weights: which holds which, and what is wrong with them, before a tensor is read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForMaskedLM

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.checks.inputs import check_weights
from common.models.loading import EMBEDDED_BASE, EMBEDDED_SUMMARIZER, any_shape_config, load_base_model, model_class
from common.models.real_models import MINILM
from common.models.weight_files import check_weight_files, weights_in_files
from common.planning.device_maps import whole_model_on
from common.runtime.machines import digest_of_model

INDEX, SINGLE, UP = "model.safetensors.index.json", "model.safetensors", "model.layers.1.mlp.up_proj.weight"
FIRST, SECOND, THIRD = (f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded base as three files with an index."""
    folder = tmp_path_factory.mktemp("made")
    AutoModelForCausalLM.from_pretrained(EMBEDDED_BASE).save_pretrained(folder, max_shard_size="1500KB")
    AutoTokenizer.from_pretrained(EMBEDDED_BASE).save_pretrained(folder)
    assert sorted(path.name for path in folder.glob("*.safetensors")) == [FIRST, SECOND, THIRD]
    return folder


@pytest.fixture
def divided(made: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(made, tmp_path / "divided"))


def check(folder: Path, **settings: Any) -> None:
    check_weights(RunConfig(model=str(folder), **settings))


def refused(folder: Path, **settings: Any) -> str:
    with pytest.raises(BadInputError) as refusal:
        check(folder, **settings)
    said = str(refusal.value)
    assert said.endswith(".")
    assert "\n" not in said
    return said


def files_of(folder: Path) -> dict[str, Path]:
    """The file of each weight."""
    return {name: weight.file for name, weight in weights_in_files(folder).items()}


def in_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def in_file(file: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(file)
    change(weights)
    save_file(weights, file)


def test_each_weight_is_read_from_the_file_that_is_named(divided: Path) -> None:
    whole = load_file(EMBEDDED_BASE / SINGLE)
    for folder in (divided, EMBEDDED_BASE):
        files = files_of(folder)
        assert set(files) == set(whole)
        for name, file in files.items():
            with safe_open(file, "pt") as opened:
                assert torch.equal(opened.get_tensor(name), whole[name])
    shapes = {name: tuple(weight.shape) for name, weight in whole.items()}
    assert {name: weight.shape for name, weight in weights_in_files(divided).items()} == shapes


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"technique": "qlora"},
        {"task": "classification"},
        {"model": "assets/embedded_labeller", "task": "preferences"},
        {"model": MINILM, "task": "classification"},
        {"model": str(EMBEDDED_SUMMARIZER), "task": "summarization", "technique": "full"},
        {"model": "assets/embedded_vision_base", "task": "visual_questions"},
        {"model": "qwen2.5-7b", "weights": "random"},
    ],
    ids=lambda settings: " ".join(settings.values()) or "chat",
)
def test_good_models_pass_and_nothing_is_said(settings: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    check_weights(RunConfig(**settings))
    assert capfd.readouterr() == ("", "")


def test_files_beside_those_of_the_index_are_none_of_the_models(divided: Path) -> None:
    files = files_of(divided)
    (divided / "consolidated.safetensors").write_bytes(b"not even safetensors")
    save_file({UP: torch.zeros(1)}, divided / "adapter_model.safetensors")
    check(divided)
    assert files_of(divided) == files


def test_of_one_file_and_an_index_that_is_taken_which_transformers_loads(
    divided: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(EMBEDDED_BASE / SINGLE, divided)
    in_file(divided / SINGLE, lambda weights: weights[UP].fill_(7))
    check(divided)
    check(divided)
    assert capsys.readouterr().out.count("model.safetensors is loaded, and not the files of") == 1
    assert set(files_of(divided).values()) == {divided / SINGLE}
    loaded = load_base_model(RunConfig(model=str(divided)), whole_model_on(torch.device("cpu")))
    assert torch.all(loaded.get_parameter(UP) == 7)


def test_files_of_other_names_alone_are_no_weights(divided: Path) -> None:
    for file in divided.glob("model*"):
        file.unlink()
    shutil.copy(EMBEDDED_BASE / SINGLE, divided / "consolidated.safetensors")
    assert f"has neither {SINGLE} nor {INDEX}" in refused(divided)


def test_a_missing_file_is_named_with_the_weights_it_had(divided: Path) -> None:
    (divided / SECOND).unlink()
    said = refused(divided)
    assert f"lacks {SECOND}, in which {INDEX} has " in said
    (divided / THIRD).unlink()
    assert f"lacks {SECOND} and 1 more, in which" in refused(divided)


@pytest.mark.parametrize("left", [0, 4, 100, -1], ids=lambda left: f"{left} bytes")
def test_a_file_cut_short_is_refused_with_its_size(divided: Path, left: int) -> None:
    file = divided / SECOND
    kept = left % file.stat().st_size
    file.write_bytes(file.read_bytes()[:kept])
    assert f"{file}, which has {kept:,} bytes, cannot be read (SafetensorError: " in refused(divided)


def test_what_is_no_safetensors_file_is_refused(divided: Path) -> None:
    (divided / SECOND).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n")
    assert "`git lfs pull` what is only a pointer" in refused(divided)
    (divided / SECOND).write_bytes((4).to_bytes(8, "little") + b"[{}]" * 9)
    assert "or is no safetensors file: copy or download it again" in refused(divided)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": {}}', '{"metadata": {}, "weight_map": []}'])
def test_what_is_no_index_is_refused(divided: Path, text: str) -> None:
    (divided / INDEX).write_text(text)
    assert "model.safetensors.index.json cannot be read (" in refused(divided)


def test_an_index_that_contradicts_its_files_is_refused(divided: Path) -> None:
    place = files_of(divided)[UP].name
    other = FIRST if place != FIRST else SECOND
    in_index(divided, lambda places: places.update({UP: other}))
    assert f"has {UP} in {other}, which does not hold it" in refused(divided)


def test_a_weight_in_two_of_the_files_is_refused(divided: Path) -> None:
    place = files_of(divided)[UP].name
    other = FIRST if place != FIRST else SECOND
    in_file(divided / other, lambda weights: weights.update({UP: torch.zeros(384, 128)}))
    said = refused(divided)
    assert f"{UP} is both in " in said
    assert other in said
    assert place in said


def test_weights_that_no_file_has_are_refused(divided: Path) -> None:
    for name in (UP, "model.norm.weight"):
        in_file(files_of(divided)[name], lambda weights, name=name: weights.pop(name))
        in_index(divided, lambda places, name=name: places.pop(name))
    said = refused(divided)
    assert f"lack {UP} and 1 more of the 38 weights that a LlamaForCausalLM" in said
    assert "lack" in refused(divided, task="classification")  # which starts its head alone


def test_a_language_model_without_its_head_is_refused(divided: Path) -> None:
    """It would start at random, as a classifier's head does; tied to the embedding it needs no weights."""
    config = json.loads((divided / "config.json").read_text())
    (divided / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert "lack lm_head.weight of the 39 weights" in refused(divided)
    check(divided, task="classification")


def test_another_shape_than_the_configs_is_refused(divided: Path) -> None:
    config = json.loads((divided / "config.json").read_text())
    (divided / "config.json").write_text(json.dumps({**config, "intermediate_size": 512}))
    said = refused(divided)
    assert "has the shape (128, 384) in its file, but (128, 512) by config.json" in said


def test_weights_that_the_model_has_no_use_for_are_said_once(divided: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_file(divided / THIRD, lambda weights: weights.update({"value_head.weight": torch.zeros(1, 128)}))
    check(divided)
    check(divided)
    assert capsys.readouterr().out.count("also have value_head.weight, which a LlamaForCausalLM has no use for") == 1


def test_a_language_models_encoder_starts_a_classifier(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    BertForMaskedLM(BertConfig(**shape)).save_pretrained(tmp_path)  # without the pooling that classifiers have
    run = RunConfig(model=str(tmp_path), task="classification")
    config = any_shape_config(str(tmp_path))
    check_weight_files(run, tmp_path, model_class(run, config), config)
    in_file(tmp_path / SINGLE, lambda weights: weights.pop("bert.encoder.layer.0.output.dense.weight"))
    with pytest.raises(BadInputError, match="BertForSequenceClassification"):
        check_weight_files(run, tmp_path, model_class(run, config), config)


def test_pickled_weights_are_refused_where_ranks_read_parts(tmp_path: Path) -> None:
    for path in EMBEDDED_BASE.iterdir():
        if path.name != SINGLE:
            shutil.copy(path, tmp_path)
    torch.save(load_file(EMBEDDED_BASE / SINGLE), tmp_path / "pytorch_model.bin")
    assert weights_in_files(tmp_path) == {}
    for settings in ({}, {"parallel": "ddp"}, {"parallel": "zero2", "technique": "full"}):
        check(tmp_path, devices=2 if settings else 1, **settings)
    for parallel in ("fsdp", "zero3", "pp"):
        said = refused(
            tmp_path,
            parallel=parallel,
            devices=2,
            technique="full",
            **({"micro_batches": 2} if parallel == "pp" else {}),
        )
        assert f"parallel is {parallel}: convert them once" in said
        assert "(t.AutoModelForCausalLM, t.AutoTokenizer)" in said
    said = refused(tmp_path, parallel="tp", devices=2, technique="full", task="classification")
    assert "(t.AutoModel, t.AutoTokenizer)" in said
    assert "pickled" in refused(tmp_path, parallel="fsdp", devices=2, technique="qlora")


def test_a_model_of_the_hub_is_checked_as_far_as_it_is_in_the_cache(divided: Path, tmp_path: Path) -> None:
    """A file that is not there yet is no fault: it is downloaded when the model is loaded."""
    cache, commit = tmp_path / "cache", "a" * 40
    kept = cache / "models--some--model" / "snapshots" / commit
    shutil.copytree(divided, kept)
    run = RunConfig(model="some/model", model_revision=commit)
    config = any_shape_config(str(divided))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        assert set(weights_in_files("some/model", commit)) == set(files_of(divided))
        file = kept / SECOND
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(BadInputError, match="not copied to its end"):
            check_weight_files(run, "some/model", model_class(run, config), config)
        file.unlink()
        check_weight_files(run, "some/model", model_class(run, config), config)


def test_machines_whose_files_of_weights_differ_are_told_apart(divided: Path) -> None:
    def digest() -> str:
        return digest_of_model(RunConfig(model=str(divided)))

    before = digest()
    in_index(divided, lambda places: places.update({UP: FIRST}))
    changed = digest()
    (divided / SECOND).unlink()
    assert len({before, changed, digest()}) == 3


def test_machines_whose_tokenizers_differ_are_told_apart_whatever_lies_beside_them(tmp_path: Path) -> None:
    def digest() -> str:
        return digest_of_model(RunConfig(model=str(tmp_path)))

    (tmp_path / "tokenizer").mkdir()
    digests = [digest()]
    for name in ("vocab.json", "vocab.txt", "merges.txt", "special_tokens_map.json", "added_tokens.json", "spm.model"):
        (tmp_path / name).write_text(name)
        digests.append(digest())
    assert len(set(digests)) == len(digests)


def test_the_headers_of_a_model_of_70b_are_checked_in_a_moment(tmp_path: Path) -> None:
    """30 files that are as long as they say, and empty: no tensor is read, or this would take minutes."""
    shape = (REPOSITORY / "assets" / "model_configs" / "llama-3.1-70b.json").read_text()
    (tmp_path / "config.json").write_text(shape)
    run = RunConfig(model=str(tmp_path), precision="bf16")
    config = any_shape_config(str(tmp_path))
    kind = model_class(run, config)
    with torch.device("meta"):
        named = list(kind(config).named_parameters())
    places = {}
    for number in range(30):
        file, header, end = tmp_path / f"model-{number + 1:05}-of-00030.safetensors", {}, 0
        for name, weight in named[number::30]:
            begin, end = end, end + 2 * weight.numel()
            header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [begin, end]}
            places[name] = file.name
        text = json.dumps(header).encode()
        with file.open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert len(places) == 723
    check_weight_files(run, tmp_path, kind, config)
    with (tmp_path / "model-00030-of-00030.safetensors").open("r+b") as opened:
        opened.truncate(opened.seek(0, 2) - 1)
    with pytest.raises(BadInputError, match="model-00030-of-00030"):
        check_weight_files(run, tmp_path, kind, config)
