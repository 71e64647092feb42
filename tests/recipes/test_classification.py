"""Classification with DDP, PP and TP counts each row once, and saves one model with its labels.

That it computes what one device computes is in test_equivalence.py.
"""

import csv
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from common.base.paths import REPOSITORY

pytestmark = pytest.mark.slow
FOLDER = REPOSITORY / "3.1_text_classification" / "run_0_cpu_x2"
QUICK = ("--train_rows", "65", "--validation_rows", "9", "--test_rows", "9", "--report_to", "none",
         "--learning_rate", "1e-3", "--max_steps", "5", "--eval_steps", "0.2")  # fmt: skip
WAYS = {"ddp": "8", "pp": "16", "tp": "16"}
"""With the rows of a rank at once."""
Runs = dict[str, Any]


@pytest.fixture(scope="module")
def divided(
    tmp_path_factory: pytest.TempPathFactory, run_several: Callable[..., Runs], encoders: dict[str, str]
) -> Runs:
    runs = {
        f"{technique}, {way}": (
            FOLDER,
            (*QUICK, "--technique", technique, "--parallel", way, "--batch_size", size, "--model", encoders["bert"]),
        )
        for technique in ("full", "lora")
        for way, size in WAYS.items()
    }
    return run_several(tmp_path_factory.mktemp("two"), runs, 2)


def test_every_test_row_is_counted_once(divided: Runs) -> None:
    """Nine rows on two ranks: a sampler that fills up would count one twice."""
    for name in ("full, ddp", "lora, tp", "full, pp"):
        after = divided[name].record["quality"]["after"]
        assert after["rows"] == 9 == sum(map(sum, after["confusion"]))
        with (divided[name].results / "predictions_after.csv").open(encoding="utf-8") as file:
            found = list(csv.DictReader(file))
        assert [int(row["row"]) for row in found] == list(range(1, 10))
        assert after["accuracy"] == sum(row["label"] == row["found"] for row in found) / 9


def test_labels_are_in_the_saved_config_and_plain_transformers_loads_it(divided: Runs) -> None:
    for name in ("full, pp", "full, tp", "full, ddp"):
        folder = divided[name].results / "model"
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == ["BertForSequenceClassification"]
        assert config["id2label"]["0"] == "accessibility"
        model, about = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
        assert not about["missing_keys"]
        assert not about["unexpected_keys"]
        assert model.config.label2id["accessibility"] == 0


def test_the_head_is_trained_and_saved_with_the_adapter(divided: Runs) -> None:
    for way in WAYS:
        weights = load_file(divided[f"lora, {way}"].results / "adapter" / "adapter_model.safetensors")
        assert {name.split(".")[-2] for name in weights if "lora" not in name} == {"classifier", "dense"}
    loaded = AutoPeftModelForSequenceClassification.from_pretrained(
        divided["lora, tp"].results / "adapter", num_labels=6
    )
    assert loaded.get_base_model().classifier.modules_to_save["default"].weight.abs().sum() > 0


@pytest.mark.parametrize("way", WAYS)
def test_an_adapter_has_its_labels_and_tokenizer_beside_it(divided: Runs, encoders: dict[str, str], way: str) -> None:
    run = divided[f"lora, {way}"]
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
    held = divided["full, tp"].record["held"]
    for rank in held["per_rank"]:
        assert rank["weights_bytes"] < held["whole"]["weights_bytes"]
    assert divided["full, tp"].record["sent"]["bytes"] > 0


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
        (("--max_length", "2000"), "has positions for 512 tokens"),
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
