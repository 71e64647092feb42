"""Classification with DDP, PP and TP computes what one device computes, counts each row once, and saves one model.

fp32, dropout off, the same uneven and padded rows: 65 rows at a global batch of 16 leave one row for the last step, so
that with DDP one rank gets a row without a label; so do 33 validation and 9 test rows.
"""

import csv
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    RobertaConfig,
    RobertaModel,
)

from common.minilm import minilm_folder
from common.run_config import REPOSITORY

pytestmark = pytest.mark.slow
FOLDER = REPOSITORY / "3.1_text_classification" / "run_0_cpu_x2"
ROWS = ("--train_rows", "65", "--validation_rows", "33", "--test_rows", "9", "--report_to", "none")
SGD = ("--optimizer", "sgd", "--learning_rate", "0.05", "--max_steps", "5", "--report_share", "0.2")
ADAMW = ("--learning_rate", "1e-3", "--max_steps", "20", "--report_share", "0.05")
RECIPES = {"sgd": SGD, "adamw": ADAMW}
DIVIDED = {
    f"{technique}, {way}, {recipe}": (technique, way, recipe)
    for technique in ("full", "lora")
    for way in ("ddp", "pp", "tp")
    for recipe in RECIPES
}
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
Runs = dict[str, Any]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny BERT and a tiny RoBERTa without heads, each with MiniLM's tokenizer; by their kind, the folder."""
    tokenizer, folders = AutoTokenizer.from_pretrained(minilm_folder()), {}
    for kind, config_class, model_class in (("bert", BertConfig, BertModel), ("roberta", RobertaConfig, RobertaModel)):
        torch.manual_seed(0)
        config = config_class(vocab_size=len(tokenizer), pad_token_id=0, **TINY, **NO_DROPOUT)
        folder = tmp_path_factory.mktemp(kind)
        model_class(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders[kind] = str(folder)
    return folders


def overrides(technique: str, way: str, recipe: str, model: str) -> tuple[str, ...]:
    """Of one run; the global batch is 16."""
    size = "8" if way == "ddp" else "16"
    adapters = ("--lora_dropout", "0") if technique == "lora" else ()
    chosen = ("--technique", technique, "--parallel", way, "--batch_size", size, "--model", model)
    return (*ROWS, *chosen, *adapters, *RECIPES[recipe])


@pytest.fixture(scope="module")
def one_device(
    tmp_path_factory: pytest.TempPathFactory, run_several: Callable[..., Runs], encoders: dict[str, str]
) -> Runs:
    settings = {f"{technique}, {recipe}": (technique, recipe) for technique in ("full", "lora") for recipe in RECIPES}
    runs = {
        name: (FOLDER, overrides(technique, "single", recipe, encoders["bert"]))
        for name, (technique, recipe) in settings.items()
    }
    runs["roberta, full, sgd"] = (FOLDER, overrides("full", "single", "sgd", encoders["roberta"]))
    return run_several(tmp_path_factory.mktemp("one"), runs, 1)


@pytest.fixture(scope="module")
def divided(
    tmp_path_factory: pytest.TempPathFactory, run_several: Callable[..., Runs], encoders: dict[str, str]
) -> Runs:
    runs = {name: (FOLDER, overrides(*setting, encoders["bert"])) for name, setting in DIVIDED.items()}
    for way in ("pp", "tp"):
        runs[f"roberta, full, {way}, sgd"] = (FOLDER, overrides("full", way, "sgd", encoders["roberta"]))
    return run_several(tmp_path_factory.mktemp("two"), runs, 2)


def saved_weights(run: Any, technique: str) -> dict[str, torch.Tensor]:
    files = (run.results / ("adapter" if technique == "lora" else "model")).glob("*.safetensors")
    return {name: weight for file in files for name, weight in load_file(file).items()}


def check_equal(one: Any, other: Any, recipe: str, technique: str) -> None:
    steps = {"sgd": 5, "adamw": 20}[recipe]
    assert len(one.losses("training_losses")) == steps
    for kind in ("training_losses", "validation_losses"):
        assert other.losses(kind) == pytest.approx(one.losses(kind), rel=1e-5)
    assert other.losses("validation_accuracies") == one.losses("validation_accuracies")
    for key in ("effective_batch_size", "steps", "best_accuracy", "trained_parameters", "quality"):
        assert other.record[key] == one.record[key]
    if recipe == "sgd" and other.record["checkpoints"]["best"] == one.record["checkpoints"]["best"]:
        mine, theirs = saved_weights(one, technique), saved_weights(other, technique)
        assert mine.keys() == theirs.keys()
        assert max((mine[name] - theirs[name]).abs().max().item() for name in mine) < 1e-5


@pytest.mark.parametrize("name", DIVIDED)
def test_each_way_computes_what_one_device_computes(one_device: Runs, divided: Runs, name: str) -> None:
    technique, _, recipe = DIVIDED[name]
    check_equal(one_device[f"{technique}, {recipe}"], divided[name], recipe, technique)


@pytest.mark.parametrize("way", ["pp", "tp"])
def test_roberta_is_divided_as_well(one_device: Runs, divided: Runs, way: str) -> None:
    check_equal(one_device["roberta, full, sgd"], divided[f"roberta, full, {way}, sgd"], "sgd", "full")


def test_every_test_row_is_counted_once(divided: Runs) -> None:
    """Nine rows on two ranks: a sampler that fills up would count one twice."""
    for name in ("full, ddp, sgd", "lora, tp, sgd", "full, pp, adamw"):
        after = divided[name].record["quality"]["after"]
        assert after["rows"] == 9 == sum(map(sum, after["confusion"]))
        with (divided[name].results / "predictions_after.csv").open(encoding="utf-8") as file:
            found = list(csv.DictReader(file))
        assert [int(row["row"]) for row in found] == list(range(1, 10))
        assert after["accuracy"] == sum(row["label"] == row["found"] for row in found) / 9


def test_labels_are_in_the_saved_config_and_plain_transformers_loads_it(divided: Runs) -> None:
    for name in ("full, pp, sgd", "full, tp, sgd", "full, ddp, sgd"):
        folder = divided[name].results / "model"
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == ["BertForSequenceClassification"]
        assert config["id2label"]["0"] == "accessibility"
        model, about = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
        assert not about["missing_keys"]
        assert not about["unexpected_keys"]
        assert model.config.label2id["accessibility"] == 0


def test_the_head_is_trained_and_saved_with_the_adapter(divided: Runs) -> None:
    for way in ("ddp", "pp", "tp"):
        weights = saved_weights(divided[f"lora, {way}, adamw"], "lora")
        assert {name.split(".")[-2] for name in weights if "lora" not in name} == {"classifier", "dense"}
    loaded = AutoPeftModelForSequenceClassification.from_pretrained(
        divided["lora, tp, adamw"].results / "adapter", num_labels=6
    )
    assert loaded.get_base_model().classifier.modules_to_save["default"].weight.abs().sum() > 0


@pytest.mark.parametrize("way", ["ddp", "pp", "tp"])
def test_an_adapter_has_its_labels_and_tokenizer_beside_it(divided: Runs, encoders: dict[str, str], way: str) -> None:
    run = divided[f"lora, {way}, adamw"]
    adapter, merged = run.results / "adapter", run.results / "merged"
    config = AutoConfig.from_pretrained(adapter)
    assert config.id2label == AutoConfig.from_pretrained(merged).id2label != {}
    base = AutoModelForSequenceClassification.from_pretrained(encoders["bert"], config=config)
    batch = AutoTokenizer.from_pretrained(adapter)(["is the museum open on sunday?"], return_tensors="pt")
    adapted = PeftModel.from_pretrained(base, adapter)
    whole = AutoModelForSequenceClassification.from_pretrained(merged)
    with torch.no_grad():
        torch.testing.assert_close(adapted.eval()(**batch).logits, whole.eval()(**batch).logits, rtol=1e-5, atol=1e-5)


def test_tensor_parallel_really_divides(divided: Runs) -> None:
    held = divided["full, tp, adamw"].record["held"]
    for rank in held["per_rank"]:
        assert rank["weights_bytes"] < held["whole"]["weights_bytes"]
    assert divided["full, tp, adamw"].record["sent"]["bytes"] > 0


# -- the ways to start it


@pytest.mark.parametrize("launcher", ["python", "accelerate"])
def test_ranks_are_started_as_the_setting_has_them(
    run_workflow: Callable[..., Any], encoders: dict[str, str], launcher: str
) -> None:
    setting = ("--technique", "lora", "--parallel", "ddp", "--validation_rows", "9", "--model", encoders["bert"])
    done = run_workflow(launcher, *setting, folder=FOLDER)
    assert done.exit_code == 0, done.output
    assert done.record["launcher"] == {"python": "torchrun", "accelerate": "acclaunch"}[launcher]
    assert [share["rank"] for share in done.record["world"]] == [0, 1]
    ceiling = done.record["machine_ceiling"]
    assert ceiling["strong"] > 0
    assert ceiling["reached"] == ceiling["all_ranks_share_step_s"] / ceiling["synchronised_share_step_s"] > 0
    assert "--technique lora --parallel ddp" in done.record["command"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("--label_column", "class"), "has no column 'class'"),
        (("--parallel", "fsdp"), "task is classification, but technique is full and parallel fsdp"),
        (
            ("--parallel", "tp", "--devices", "5"),
            "num_attention_heads is 12 and its intermediate_size 1536, which 5 ranks cannot share evenly",
        ),
        (("--model", "assets/embedded_base"), "is of the kind llama"),
        (("--max_length", "2000"), "reads 512 tokens at most"),
    ],
)
def test_bad_input_ends_in_one_sentence_before_a_rank_starts(
    run_workflow: Callable[..., Any], overrides: tuple[str, ...], sentence: str
) -> None:
    done = run_workflow("python", *overrides, folder=FOLDER)
    assert done.exit_code == 2, done.output
    assert sentence in done.output
    assert "Traceback" not in done.output
    assert not done.results.exists()
