"""Classification with DDP, PP and TP counts each row once, and saves one model with its labels.

That it computes what one device computes is in test_equivalence.py.
"""

import csv
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from tests.fixtures import Trained
from tests.recipes.folders import CLASSIFICATION

pytestmark = pytest.mark.slow
QUICK = ("--train_rows", "65", "--validation_rows", "9", "--test_rows", "9", "--report_to", "none",
         "--learning_rate", "1e-3", "--max_steps", "5", "--eval_steps", "0.2")  # fmt: skip
WAYS = {"ddp": "8", "pp": "16", "tp": "16"}
"""With the rows of a rank at once."""
Runs = dict[str, Trained]


@pytest.fixture(scope="module")
def divided(
    tmp_path_factory: pytest.TempPathFactory, run_several: Callable[..., Runs], encoders: dict[str, str]
) -> Runs:
    runs = {
        f"{technique}, {way}": (
            CLASSIFICATION,
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


@pytest.mark.parametrize("way", WAYS)
def test_labels_are_in_the_saved_config_and_plain_transformers_loads_it(divided: Runs, way: str) -> None:
    folder = divided[f"full, {way}"].results / "model"
    model, about = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    assert model.config.architectures == ["BertForSequenceClassification"]
    assert (model.config.id2label[0], model.config.label2id["accessibility"]) == ("accessibility", 0)


@pytest.mark.parametrize("way", WAYS)
def test_an_adapter_has_its_head_labels_and_tokenizer_with_it(
    divided: Runs, encoders: dict[str, str], way: str
) -> None:
    adapter, merged = (divided[f"lora, {way}"].results / name for name in ("adapter", "merged"))
    weights = load_file(adapter / "adapter_model.safetensors")
    assert {name.split(".")[-2] for name in weights if "lora" not in name} == {"classifier", "dense"}
    config = AutoConfig.from_pretrained(adapter)
    assert config.id2label == AutoConfig.from_pretrained(merged).id2label != {}
    base = AutoModelForSequenceClassification.from_pretrained(encoders["bert"], config=config)
    batch = AutoTokenizer.from_pretrained(adapter)(["is the museum open on sunday?"], return_tensors="pt")
    adapted = PeftModel.from_pretrained(base, adapter)
    whole = AutoModelForSequenceClassification.from_pretrained(merged)
    with torch.no_grad():
        torch.testing.assert_close(adapted.eval()(**batch).logits, whole.eval()(**batch).logits, rtol=1e-5, atol=1e-5)


def test_an_adapter_loads_without_its_base_being_named(divided: Runs) -> None:
    adapter = divided["lora, tp"].results / "adapter"
    loaded = AutoPeftModelForSequenceClassification.from_pretrained(adapter, num_labels=6)
    assert loaded.get_base_model().classifier.modules_to_save["default"].weight.abs().sum() > 0


def test_tensor_parallel_really_divides(divided: Runs) -> None:
    held = divided["full, tp"].record["held"]
    for rank in held["per_rank"]:
        assert rank["weights_bytes"] < held["whole"]["weights_bytes"]
    assert divided["full, tp"].record["sent"]["bytes"] > 0


@pytest.mark.parametrize(("launcher", "named"), [("python", "torchrun"), ("accelerate", "acclaunch")])
def test_ranks_are_started_as_the_setting_has_them(
    completed: Callable[..., Any], encoders: dict[str, str], launcher: str, named: str
) -> None:
    setting = ("--technique", "lora", "--parallel", "ddp", "--validation_rows", "9", "--model", encoders["bert"])
    record = completed(launcher, *setting, folder=CLASSIFICATION).record
    assert record["launcher"] == named
    assert [share["rank"] for share in record["world"]] == [0, 1]
    ceiling = record["machine_ceiling"]
    assert ceiling["strong"] > 0
    assert ceiling["reached"] == ceiling["all_ranks_share_step_s"] / ceiling["synchronised_share_step_s"] > 0
    assert "--technique lora --parallel ddp" in record["command"]
