"""QLoRA on one device and with DDP: what is trained, and merged both ways."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from common.records.store import fit_to_be_kept
from tests.recipes.folders import BASE, QLORA
from tests.recipes.saved import logits_of

TWO_RANKS = ("--train_sampling_strategy", "group_by_length", "--lora_dropout", "0", "--batch_size", "8",
             "--parallel", "ddp", "--devices", "2", "--independent_judge", "none")  # fmt: skip
GOLDEN_TRAINING_LOSSES = [8.303706, 8.489314, 6.081975, 5.354761, 4.067763]
"""Of one device at 16 rows, grouped by length; measured on 2026-11-21 with torch 2.13.0, Transformers 5.23.0,
PEFT 0.21.2 and bitsandbytes 0.50.2."""


@pytest.mark.slow
def test_two_ranks_train_what_one_does_and_both_merges_load_as_plain_models(
    completed: Callable, tmp_path: Path
) -> None:
    done = completed("torchrun", *TWO_RANKS, folder=QLORA)
    record = done.record
    assert [loss for _, loss in record["training_losses"]] == pytest.approx(GOLDEN_TRAINING_LOSSES, rel=1e-4)
    assert [share["samples"] for share in record["world"]] == [33, 32]
    assert record["quantization"]["stored_dtype"] == "uint8"
    assert record["quantization"]["quantized_share"] > 0.8
    assert record["judged_by"] == "original base"
    check_merges(done.results, record)
    assert str(tmp_path) not in json.dumps(fit_to_be_kept(record))


def check_merges(results: Path, record: dict) -> None:
    """Both load without bitsandbytes' configuration; only the de-quantized one is what was trained."""
    differences, losses = record["largest_logit_differences"], record["merged_validation_losses"]
    assert differences["adapter"] == 0
    assert differences["merged"] < 1e-3
    assert differences["merged_into_original"] > 0.1
    assert losses["merged"] == pytest.approx(record["best_validation_loss"], rel=1e-4)
    assert losses["merged_into_original"] != pytest.approx(losses["merged"], rel=1e-3)
    assert record["quality"]["after"] != record["quality"]["after_original_base"]
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    base = AutoModelForCausalLM.from_pretrained(BASE, quantization_config=config, device_map={"": "cpu"})
    for module in base.modules():
        module.support_avx512bf16_for_cpu = False
    trained = logits_of(PeftModel.from_pretrained(base, results / "adapter"), results / "adapter")
    assert not (results / "adapter" / "README.md").exists()  # PEFT's, which names a path
    for name in ("merged", "merged_into_original"):
        assert "quantization_config" not in json.loads((results / name / "config.json").read_text())
        assert {weight.dtype for weight in load_file(results / name / "model.safetensors").values()} == {torch.float32}
        merged = logits_of(AutoModelForCausalLM.from_pretrained(results / name), results / name)
        assert torch.allclose(merged, trained, atol=1e-3) == (name == "merged")


def test_double_quantization_and_8_bit_states_train_too(completed: Callable) -> None:
    settings = ("--quantization", "nf4-double", "--optimizer", "paged_adamw_8bit", "--independent_judge", "none")
    record = completed("python", *settings, folder=QLORA).record
    losses = [loss for _, loss in record["validation_losses"]]
    assert losses[-1] < 0.7 * losses[0]
    assert record["quantization"]["bits_per_quantized_weight"] < 4.45


@pytest.mark.slow
def test_without_room_the_quantized_base_judges_and_merging_is_done_all_the_same(
    completed: Callable, tmp_path: Path
) -> None:
    """As on a card that was chosen for 4 bits; the run says so."""
    place = tmp_path / "folder"
    shutil.copytree(QLORA, place, ignore=shutil.ignore_patterns("results", "records"))
    workflow = place / "my_workflow_qlora_finetuning.py"
    workflow.write_text(workflow.read_text().replace("has_room_for_plain(log.run, log.rank, model)", "False"))
    done = completed("python", "--independent_judge", "none", folder=place)
    assert "no room for unquantized models on this device" in done.output
    record = done.record
    assert record["judged_by"] == "quantized base"
    assert record["quality"]["after_original_base"] is None
    assert record["quality"]["after"]["similarity_score_tuned"] is not None
    for name in ("merged", "merged_into_original"):
        assert (done.results / name / "model.safetensors").is_file()
