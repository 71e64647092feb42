"""What serving takes: the closed form against real models' weights, files and caches, vLLM's logs, and the command."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BitsAndBytesConfig,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedModel,
)

from common.checks.planner_command import main
from common.hardware.devices import GIB, Gpu, find_gpu
from common.hardware.prices import ON_DEMAND, read_prices
from common.planning.architectures import FAMILIES, read_architecture
from common.planning.job import BatchShape, Job
from common.planning.serving_plan import GGUF_BYTES, GGUF_FAMILIES, READ_AT_ONCE, WAYS, Serving, sliding_layers
from common.planning.shares import whole_model
from common.planning.terms import size_of
from common.runtime.memory_tracker import MemoryTracker
from common.serving.gguf_file import WEIGHT_TYPES, export_gguf
from tests import families
from tests.families import make_tiny

A6000 = find_gpu("a6000")
Asked = Callable[..., tuple[int, str, str]]
DECODERS = [kind for kind in families.DECODERS if kind in FAMILIES]
ENCODERS = [kind for kind in families.ENCODERS if kind in FAMILIES]
WINDOWS = [  # shorter than the rows, in all layers, in those from the second on, or in five of six
    ("mistral", {"sliding_window": 8}),
    ("phi3", {"sliding_window": 8}),
    ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}),
    ("gemma3_text", {"sliding_window": 8, "num_hidden_layers": 7}),
    ("mistral", {"sliding_window": 100}),
]
ROWS, LENGTH, NEW = 3, 24, 6
WIDE = {"hidden_size": 128, "intermediate_size": 512}


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The command line's exit code, output and errors."""

    def ask(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["planner", "--serve", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return ask


def tiny(kind: str, folder: Path, **changes: object) -> PreTrainedModel:
    """Return a tiny model in 16 bits, whose config is in the folder."""
    family, classes = families.FAMILIES[kind], {"bart": AutoModelForSeq2SeqLM}
    classes |= dict.fromkeys(ENCODERS, AutoModelForMaskedLM)
    config = AutoConfig.for_model(family.model_type, vocab_size=320, **family.sizes | changes)
    config.pad_token_id = 0
    config.save_pretrained(folder)
    return classes.get(kind, AutoModelForCausalLM).from_config(config, dtype=torch.bfloat16).eval()


def serving(
    model: str, technique: str = "full", length: int = LENGTH, target: int = 0, gpu: Gpu = A6000, **changes: object
) -> Serving:
    architecture = read_architecture(model)
    job = Job(technique, "single", BatchShape(ROWS, length, 1, target_length=target))
    found = {"rows": ROWS, "sliding": sliding_layers(architecture, model)} | changes
    return Serving(architecture, job.suited_to(architecture), whole_model(architecture), gpu, **found)


def bytes_of(model: torch.nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


# -- weights


@pytest.mark.parametrize("kind", [*DECODERS, *ENCODERS, "bart"])
def test_weights_take_what_the_models_do_with_an_adapter_and_without(kind: str, tmp_path: Path) -> None:
    model = tiny(kind, tmp_path)
    assert size_of(serving(str(tmp_path)).weights()) == bytes_of(model)
    adapted = serving(str(tmp_path), "lora")
    names = adapted.architecture.names_to_adapt
    named = rf".*\.(layers?|h)\..*\b({'|'.join(map(re.escape, names))})"  # within layers, as heads have such names, too
    whole = get_peft_model(model, LoraConfig(r=8, target_modules=named))
    for name, weight in whole.named_parameters():  # as PEFT keeps an adapter of a model that it loads
        weight.data = weight.data.float() if "lora_" in name else weight.data
    assert size_of(adapted.weights()) == bytes_of(whole)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_weights_in_4_bits_take_what_bitsandbytes_has_of_them(kind: str, tmp_path: Path) -> None:
    tiny(kind, tmp_path).save_pretrained(tmp_path)
    in_4_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=in_4_bits, dtype=torch.bfloat16)
    states = [weight.quant_state for weight in model.parameters() if hasattr(weight, "quant_state")]
    found = bytes_of(model) + sum(each.numel() * 4 for state in states for each in (state.absmax, state.code))
    adapters = size_of(serving(str(tmp_path), "lora").weights()) - size_of(serving(str(tmp_path)).weights())
    assert states
    assert size_of(serving(str(tmp_path), "qlora").weights()) == found + adapters


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize("kind", GGUF_FAMILIES)
def test_a_gguf_file_s_tensors_take_what_is_planned(kind: str, weight_type: str, tmp_path: Path) -> None:
    folder = make_tiny(kind, tmp_path / "model")
    file = export_gguf(Path(folder), tmp_path / "it.gguf", weight_type)
    found = sum(int(tensor.n_bytes) for tensor in GGUFReader(file).tensors)
    assert size_of(serving(folder, way=f"GGUF {weight_type}").weights()) == found


def test_every_type_of_gguf_that_is_written_is_planned() -> None:
    assert list(GGUF_BYTES) == [f"GGUF {each}" for each in WEIGHT_TYPES]


# -- the cache


def cached_bytes(cache: DynamicCache | EncoderDecoderCache) -> int:
    if isinstance(cache, EncoderDecoderCache):
        return cached_bytes(cache.self_attention_cache) + cached_bytes(cache.cross_attention_cache)
    return sum(each.numel() * each.element_size() for layer in cache.layers for each in (layer.keys, layer.values))


@pytest.mark.parametrize(("kind", "changes"), [*((kind, {}) for kind in DECODERS), *WINDOWS])
def test_keys_and_values_take_what_transformers_caches(kind: str, changes: dict, tmp_path: Path) -> None:
    """The last of the new tokens is not read any more."""
    model = tiny(kind, tmp_path, **changes)
    prompts = torch.full((ROWS, LENGTH - NEW + 1), 7)
    found = model.generate(prompts, do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW,
                           return_dict_in_generate=True).past_key_values  # fmt: skip
    assert serving(str(tmp_path)).cache() == cached_bytes(found)


def test_a_decoder_behind_an_encoder_keeps_keys_of_the_text_and_of_the_summary(tmp_path: Path) -> None:
    model = tiny("bart", tmp_path)
    found = model.generate(torch.full((ROWS, LENGTH), 7), do_sample=False, num_beams=1, min_new_tokens=NEW,
                           max_new_tokens=NEW, return_dict_in_generate=True).past_key_values  # fmt: skip
    assert serving(str(tmp_path), target=NEW).cache() == cached_bytes(found)


def counted(model: torch.nn.Module, rows: int, **options: object) -> float:
    """Return the most bytes alive at once in a real forward pass of such rows, beside the weights."""
    with torch.no_grad(), MemoryTracker(model.config.vocab_size) as tracker:
        for tensor in (*model.parameters(), *model.buffers()):
            tracker.add(tensor, "weights")
        tracker.enter("work")
        found = model(input_ids=torch.full((rows, 256), 7), **options)
        _ = found.logits.float() if "logits" in found else None
    return sum(count for part, count in tracker.timeline["work"].items() if part != "weights")


def beside_weights(planned: Serving) -> float:
    return sum(term.count for term in planned.memory.terms if term.part not in ("weights", "overhead"))


@pytest.mark.parametrize("kind", [kind for kind in DECODERS if kind != "gpt2"])
def test_reading_a_prompt_takes_what_is_planned_with_the_cache_that_it_fills(kind: str, tmp_path: Path) -> None:
    model = tiny(kind, tmp_path, **WIDE)
    found = counted(model, 1, logits_to_keep=1, past_key_values=DynamicCache(config=model.config))
    assert beside_weights(serving(str(tmp_path), length=256, rows=1)) == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "phi3", "olmo2"])
def test_an_adapter_s_result_comes_beside_the_widest_of_a_layer(kind: str, tmp_path: Path) -> None:
    """In 16 bits, as vLLM computes with adapters; PEFT does in fp32, which takes more."""
    model = get_peft_model(tiny(kind, tmp_path, **WIDE), LoraConfig(r=8, target_modules="all-linear")).bfloat16()
    found = counted(model, 1, logits_to_keep=1, past_key_values=DynamicCache(config=model.config))
    assert beside_weights(serving(str(tmp_path), "lora", length=256, rows=1)) == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_reads_all_texts_together(kind: str, tmp_path: Path) -> None:
    model = tiny(kind, tmp_path, **WIDE).base_model
    assert beside_weights(serving(str(tmp_path), length=256)) == pytest.approx(counted(model, ROWS), rel=0.1)


# -- what others measured

BLOCK = 16  # tokens of a block of vLLM's cache
# model, card, share of it that vLLM may use, GiB of its weights and of its cache, tokens of the cache, by its log
LOGS = [
    # github.com/oracle-samples/oci-data-science-ai-samples, ai-quick-actions/troubleshooting-tips.md
    ("llama-3.1-8b", 22.07, 0.9, 14.99, 4.60, 2356 * BLOCK),
    # vLLM 0.15.1: github.com/ilseokoh/vllm-gce, README.md
    ("llama-3.1-8b", find_gpu("a100-40gb").memory_gib, 0.9, 14.99, 19.28, 157_936),
    # vLLM 0.8.2 on a T4: github.com/huggingface/cookbook, notebooks/en/fine_tune_chatbot_docs_synthetic.ipynb
    ("llama-3.2-3b", 14.74, 0.8939, 6.02, 6.22, 3637 * BLOCK),
]


@pytest.mark.parametrize(("model", "card_gib", "share", "weights_gib", "cache_gib", "tokens"), LOGS)
def test_vllm_s_logs_have_such_weights_caches_and_rows(
    model: str, card_gib: float, share: float, weights_gib: float, cache_gib: float, tokens: int
) -> None:
    gpu = replace(A6000, memory_gib=share * card_gib)
    planned = serving(model, gpu=gpu, length=2048, rows=1)
    assert size_of(planned.weights()) / GIB == pytest.approx(weights_gib, rel=0.01)
    assert planned.cache() / 2048 == pytest.approx(cache_gib * GIB / tokens, rel=0.002)
    assert planned.figures(None)["max_rows"] == pytest.approx(tokens / 2048, rel=0.1)


# -- the command


def test_a_card_s_answer_adds_up_and_its_rows_are_the_most_that_are_safe(asked: Asked) -> None:
    question = ("--model", "qwen2.5-7b", "--gpu", "a6000", "--seq-len", 4096, "--json")
    code, out, _ = asked(*question, "--batch-size", 16)
    served = json.loads(out)["served"]
    assert code == 0
    assert [each["way"] for each in served] == [*WAYS, *GGUF_BYTES]
    for each in served:
        parts = (each[f"{part}_gib"] for part in ("weights", "cache", "beside"))
        assert sum(parts) == pytest.approx(each["likely_gib"])
        assert each["likely_gib"] < each["safe_gib"] < each["capacity_gib"]
    most = served[0]["max_rows"]
    fits = [json.loads(asked(*question, "--batch-size", rows)[1])["served"][0]["fits"] for rows in (most, most + 1)]
    assert fits[0] == "yes" != fits[1]


def test_rows_that_do_not_fit_are_told_how_many_do(asked: Asked) -> None:
    code, out, _ = asked("--model", "qwen2.5-7b", "--gpu", "a6000", "--seq-len", 4096, "--batch-size", 999)
    most = json.loads(asked("--model", "qwen2.5-7b", "--gpu", "a6000", "--seq-len", 4096, "--json")[1])["served"]
    assert code == 1
    assert f"do not fit (pass fewer or shorter ones): up to {max(each['max_rows'] for each in most)} are" in out


@pytest.mark.parametrize("gpu", [(), ("--gpu", "any")])
def test_without_a_card_the_cheapest_that_hold_all_rows_are_named(gpu: tuple[str, ...], asked: Asked) -> None:
    code, out, _ = asked("--model", "qwen2.5-7b", "--seq-len", 4096, "--batch-size", 16, "--json", *gpu)
    served = [each for each in json.loads(out)["served"] if each["way"] == "merged, 16 bits"]
    assert code == 0
    assert len(served) == 3
    assert all(each["fits"] == "yes" for each in served)
    assert all(cheap["usd_per_hour"] <= dear["usd_per_hour"] for cheap, dear in pairwise(served))
    alone = [price for price in read_prices() if (price.kind, price.gpus) == (ON_DEMAND, 1)]
    cheaper = {price.gpu for price in alone if price.usd_per_hour < served[0]["usd_per_hour"]}
    for name in cheaper:
        at_it = asked("--model", "qwen2.5-7b", "--seq-len", 4096, "--batch-size", 16, "--json", "--gpu", name)
        assert json.loads(at_it[1])["served"][0]["fits"] != "yes"


def test_a_model_that_no_card_holds_is_shown_on_those_that_hold_most(asked: Asked) -> None:
    code, out, _ = asked("--model", "llama-3.1-70b", "--seq-len", 100_000, "--batch-size", 40, "--json")
    served = [each for each in json.loads(out)["served"] if each["way"] == "merged, 16 bits"]
    assert code == 1
    assert {each["fits"] for each in served} == {"no"}
    assert min(each["capacity_gib"] for each in served) > 200


def test_servers_have_a_fused_kernel_for_gpt_oss(asked: Asked) -> None:
    code, out, _ = asked("--model", "gpt-oss-20b", "--gpu", "a6000", "--seq-len", 8192, "--json")
    assert code == 0
    assert json.loads(out)["served"][0]["beside_gib"] < 3


def test_where_the_weights_alone_are_too_large_a_larger_card_is_asked_for(asked: Asked) -> None:
    assert "a larger card" in asked("--model", "llama-3.1-70b", "--gpu", "t4")[1]


def test_all_experts_of_a_mixture_are_held(asked: Asked) -> None:
    served = json.loads(asked("--model", "mixtral-8x7b", "--gpu", "h200", "--json")[1])["served"]
    assert served[0]["weights_gib"] == pytest.approx(46_702_792_704 * 2 / GIB)


def test_an_encoder_has_no_cache_and_a_classifier_s_head_is_its_own(asked: Asked) -> None:
    question = ("--model", "roberta-large", "--seq-len", 512, "--gpu", "t4", "--json")
    whole, classifier = (json.loads(asked(*question, *more)[1])["served"] for more in ((), ("--classes", 3)))
    assert {each["cache_gib"] for each in (*whole, *classifier)} == {0}
    assert [each["way"] for each in classifier] == ["merged, 16 bits", "16 bits and adapter"]
    assert classifier[0]["weights_gib"] < whole[0]["weights_gib"]


def test_a_picture_s_tower_is_held_and_its_tokens_are_of_the_row(asked: Asked) -> None:
    code, out, _ = asked("--model", "smolvlm-instruct", "--seq-len", 2048, "--gpu", "a6000", "--json")
    assert code == 0
    assert json.loads(out)["served"][0]["weights_gib"] == pytest.approx(
        read_architecture("smolvlm-instruct").parameters * 2 / GIB
    )
    assert "a picture of" in asked("--model", "smolvlm-instruct", "--gpu", "a6000")[2]


def test_a_prompt_longer_than_a_server_reads_at_once_takes_no_more(asked: Asked) -> None:
    question = ("--model", "llama-3.1-8b", "--gpu", "h200", "--json", "--seq-len")
    shorter, longer = (json.loads(asked(*question, length)[1])["served"][0] for length in (READ_AT_ONCE, 65_536))
    assert shorter["beside_gib"] == pytest.approx(longer["beside_gib"])
    assert longer["cache_gib"] == pytest.approx(8 * shorter["cache_gib"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "a6001"), "not in the catalogue"),
        (("--gpu", "a6000", "--nodes", 2), "leave out --nodes"),
        (("--budget", 20), "leave out --budget"),
        (("--seq-len", "max"), "pass --seq-len a number"),
        (("--seq-len", 1_000_000), "longer than qwen2.5-7b can read"),
        (("--classes", 3), "classifiers are planned for encoders"),
        (("--gpu", "a6000", "--lora-rank", 8, "--target-modules", "nothing"), "no linear layer 'nothing'"),
    ],
)
def test_what_serving_is_not_planned_for_is_refused_in_a_sentence(
    arguments: tuple[object, ...], said: str, asked: Asked
) -> None:
    code, out, error = asked("--model", "qwen2.5-7b", *arguments)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert said in error


def test_an_unknown_kind_of_model_is_refused(tmp_path: Path, asked: Asked) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt"}))
    code, _, error = asked("--model", tmp_path, "--gpu", "a6000")
    assert (code, error.count("\n")) == (2, 1)
    assert "The architecture 'opt'" in error


def test_layers_of_another_number_than_the_windows_are_refused(tmp_path: Path, asked: Asked) -> None:
    config = tiny("mistral", tmp_path).config.to_dict() | {"sliding_window": 8, "layer_types": ["full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, error = asked("--model", tmp_path, "--gpu", "a6000", "--seq-len", 24)
    assert code == 2
    assert "Take the config.json as published" in error
    assert "fault" not in error


PRICES = """
[[prices]]
provider = "Here"
gpu = "H100 80GB SXM"
usd_per_hour = 2
gpus = 8
date = "2026-11-01"
source = "https://example.org"
"""


def test_prices_of_whole_machines_are_refused_and_spot_is_left_out(tmp_path: Path, asked: Asked) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(PRICES)
    code, _, error = asked("--model", "qwen2.5-7b", "--prices", file)
    assert code == 2
    assert "None of these prices is of one card alone" in error
    alone, spot = PRICES.replace("gpus = 8", ""), PRICES.replace("gpus = 8", 'kind = "spot"').replace("= 2\n", "= 1\n")
    (tmp_path / "mine.toml").write_text(alone + spot)
    served = json.loads(asked("--model", "qwen2.5-7b", "--prices", tmp_path / "mine.toml", "--json")[1])["served"]
    assert {each["usd_per_hour"] for each in served} == {2}
