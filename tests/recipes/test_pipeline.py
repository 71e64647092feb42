"""A pipeline of two stages computes what one device computes: fp32, dropout off, the same uneven and padded rows.

65 rows at a global batch of 16 leave one row for the last step, which is filled up with rows that have no label; so do
33 validation rows. What is saved is one model that plain libraries load.
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.run_config import REPOSITORY

pytestmark = pytest.mark.slow
LORA = REPOSITORY / "2.1_lora_finetuning" / "run_0_cpu_x1"
FULL = REPOSITORY / "2.4_full_finetuning" / "run_0_cpu_x1"
PP = REPOSITORY / "2.7_full_finetuning_with_pp" / "run_0_cpu_x2"
BASE = REPOSITORY / "assets" / "embedded_base"

QUICK = ("--train_rows", "65", "--validation_rows", "33", "--test_rows", "3", "--independent_judge", "none",
         "--report_to", "none", "--batch_size", "16")  # fmt: skip
SGD = ("--optimizer", "sgd", "--learning_rate", "0.05", "--max_steps", "5", "--report_share", "0.2")
ADAMW = ("--learning_rate", "1e-3", "--max_steps", "20", "--report_share", "0.05")
ALL = ("--target_modules", "all")
ADAPTERS = ("--technique", "lora", "--lora_dropout", "0", "--gradient_checkpointing", "none")

ON_ONE_DEVICE = {
    "sgd": (FULL, SGD),
    "adamw": (FULL, ADAMW),
    "all, sgd": (FULL, (*SGD, *ALL)),
    "lora, sgd": (LORA, (*SGD, *ADAPTERS)),
    "lora, adamw": (LORA, (*ADAMW, *ADAPTERS)),
    "other seed, sgd": (FULL, (*SGD, "--seed", "7")),
}
EIGHT = ("--micro_batches", "8")
PIPELINES = {
    "sgd": ("sgd", (*SGD, *EIGHT)),
    "gpipe, accumulated, sgd": (
        "sgd",
        (*SGD, "--schedule", "gpipe", "--batch_size", "8", "--accumulation_steps", "2", "--micro_batches", "4"),
    ),
    "all, sgd": ("all, sgd", (*SGD, *ALL, *EIGHT)),
    "lora, sgd": ("lora, sgd", (*SGD, *ADAPTERS, *EIGHT)),
    "adamw": ("adamw", (*ADAMW, *EIGHT)),
    "lora, adamw": ("lora, adamw", (*ADAMW, *ADAPTERS, *EIGHT)),
}
"""Name, its counterpart on one device, and settings."""
Runs = dict[str, Any]
"""What `run_several` of tests/conftest.py returns."""


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory, run_several: Callable[..., Runs]) -> Runs:
    runs = {name: (folder, (*QUICK, *overrides)) for name, (folder, overrides) in ON_ONE_DEVICE.items()}
    return run_several(tmp_path_factory.mktemp("one"), runs, 1)


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory, run_several: Callable[..., Runs]) -> Runs:
    runs = {name: (PP, (*QUICK, *overrides)) for name, (_, overrides) in PIPELINES.items()}
    return run_several(tmp_path_factory.mktemp("pp"), runs, 2)


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    assert len(first) > 30
    return max((first[name] - second[name]).abs().max().item() for name in first)


@pytest.mark.parametrize("name", PIPELINES)
def test_losses_and_weights_equal_one_devices(one_device: Runs, pipelines: Runs, name: str) -> None:
    one, pipeline = one_device[PIPELINES[name][0]], pipelines[name]
    steps = 20 if "adamw" in name else 5
    assert len(one.losses("training_losses")) == steps
    for kind in ("training_losses", "validation_losses"):
        assert pipeline.losses(kind) == pytest.approx(one.losses(kind), rel=1e-5)
    if "sgd" in name:
        assert largest_difference(one.weights(steps), pipeline.weights(steps)) < 1e-5
    counted = ("trained_parameters", "flops_per_token", "effective_batch_size", "steps")
    assert {key: pipeline.record[key] for key in counted} == {key: one.record[key] for key in counted}
    assert pipeline.record["best_validation_loss"] < one.losses("validation_losses")[0]


def test_other_rows_and_untrained_weights_are_told_apart(one_device: Runs) -> None:
    """The control of the bars above: a step is larger than they are."""
    other, base = one_device["other seed, sgd"], load_file(BASE / "model.safetensors")
    trained = one_device["sgd"].weights(5)
    assert largest_difference(trained, other.weights(5)) > 5e-5
    assert one_device["sgd"].losses("training_losses") != pytest.approx(other.losses("training_losses"), rel=1e-3)
    assert max((trained[name] - base[name]).abs().max().item() for name in base) > 1e-4


def test_tied_embeddings_are_trained_by_both_ends(one_device: Runs, pipelines: Runs) -> None:
    """Without the head's part of the gradient, the first stage's copy would go elsewhere."""
    embeddings = "model.embed_tokens.weight"
    base = load_file(BASE / "model.safetensors")[embeddings]
    trained = pipelines["all, sgd"].weights(5)
    assert (trained[embeddings] - base).abs().max() > 1e-4
    assert torch.equal(pipelines["sgd"].weights(5)[embeddings], base)
    index = json.loads((pipelines["all, sgd"].results / "model" / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]
    assert index["weight_map"][embeddings] == "model-00001-of-00002.safetensors"


def test_saved_adapters_are_those_of_all_stages_and_load_with_peft(pipelines: Runs) -> None:
    results = pipelines["lora, adamw"].results
    ids = torch.tensor([AutoTokenizer.from_pretrained(results / "merged")("Who made it?")["input_ids"]])
    base = AutoModelForCausalLM.from_pretrained(BASE).eval()
    merged = AutoModelForCausalLM.from_pretrained(results / "merged").eval()
    with torch.no_grad():
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, results / "adapter").eval()
        assert (adapted(ids).logits - merged(ids).logits).abs().max() < 1e-4
        assert (before - merged(ids).logits).abs().max() > 1e-2
    weights = load_file(results / "adapter" / "adapter_model.safetensors")
    assert len(weights) == 2 * 7 * base.config.num_hidden_layers
    assert [name for name, weight in weights.items() if "lora_B" in name and not weight.any()] == []
    assert set(pipelines["lora, adamw"].record["largest_logit_differences"]) == {"adapter", "merged"}


def answers(results: Path) -> list[tuple[str, str]]:
    with (results / "predictions_after.csv").open(encoding="utf-8") as file:
        return [(row["question"], row["answer"]) for row in csv.DictReader(file)]


@torch.no_grad()
def greedy(model: torch.nn.Module, tokenizer: object, question: str) -> str:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    made = model.generate(**prompt, do_sample=False, max_new_tokens=48)
    return tokenizer.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def test_a_workflow_tells_the_truth_about_its_stages_and_saves_a_plain_model(run_workflow: Callable) -> None:
    done = run_workflow("torchrun", "--batch_size", "16", "--epochs", "4", "--report_share", "0.25", folder=PP)
    assert done.exit_code == 0, done.output
    record = done.record
    assert (record["status"], record["launcher"], record["parallel"]) == ("completed", "torchrun", "pp")
    assert [share["samples"] for share in record["world"]] == [4 * 65, 4 * 65]  # every stage sees every row
    assert record["world"][0]["tokens"] == record["world"][1]["tokens"] > 0
    for rank in (0, 1):
        assert f"[RANK{rank}:CPU] memory: now" in done.output
        assert f"[RANK{rank}:CPU] mini-batch: 16 rows" in done.output
    assert [entry["rank"] for entry in record["memory"]] == [0, 1]
    assert record["placement"]["layers_per_stage"] == [2, 2]
    assert set(record["placement"]["stage_map"].values()) == {0, 1}
    assert [stage["stage"] for stage in record["stages"]] == [0, 1]
    assert all(stage["busy_s"] > 0 and 0 < stage["idle_share"] < 1 for stage in record["stages"])
    check_measurements(record["pipeline"])

    model = AutoModelForCausalLM.from_pretrained(done.results / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(done.results / "model")
    said = answers(done.results)
    assert len(said) == 9
    assert len({answer for _, answer in said}) > 1
    assert [greedy(model, tokenizer, question) for question, _ in said] == [answer for _, answer in said]
    base = AutoModelForCausalLM.from_pretrained(BASE).eval()
    assert [greedy(base, tokenizer, question) for question, _ in said] != [answer for _, answer in said]


def check_measurements(measured: dict) -> None:
    """What the README's tables take, and that it adds up."""
    assert (measured["stages"], measured["micro_batches"], measured["schedule"]) == (2, 8, "1f1b")
    step_s = measured["step_s"]
    assert {"naive", "gpipe", "1f1b", "all stages at once", "stage 0 alone, 8", "stage 1 alone, 1"} <= set(step_s)
    assert all(seconds > 0 for seconds in step_s.values())
    assert measured["speedup"] == pytest.approx(step_s["naive"] / step_s["1f1b"])
    assert measured["speedup_gpipe"] == pytest.approx(step_s["naive"] / step_s["gpipe"])
    assert measured["ideal_speedup"] == pytest.approx(16 / 9)
    assert measured["ideal_idle_share"] == pytest.approx(1 / 9)
    assert 0 < measured["allowed_speedup"] < 2.5
    assert measured["share_of_allowed"] == pytest.approx(measured["speedup"] / measured["allowed_speedup"])
    for way in ("naive", "gpipe", "1f1b"):
        assert all(0 <= share < 1 for share in measured["idle_share"][way])
        assert all(mib > 0 for mib in measured["peak_activations_mib"][way])
        parts = 1 if way == "naive" else 8
        for stage in (0, 1):
            passes = [kind for kind, *_ in measured["passes"][way][stage]]
            assert (passes.count("forward"), passes.count("backward")) == (parts, parts)
            assert passes.count("loss") == (parts if stage == 1 else 0)
    # One stage waits while the other works, and fewer micro-batches of 1F1B are in flight.
    assert sum(measured["idle_share"]["naive"]) > sum(measured["idle_share"]["1f1b"])
    peaks = measured["peak_activations_mib"]
    assert peaks["1f1b"][1] < peaks["gpipe"][1] <= 1.1 * peaks["naive"][1]


def test_micro_batches_that_do_not_divide_the_batch_are_refused(run_workflow: Callable) -> None:
    done = run_workflow("python", "--micro_batches", "5", "--batch_size", "16", folder=PP)
    assert done.exit_code == 2
    said = "error: batch_size is 16, which 5 micro-batches do not divide"
    assert sum(said in line for line in done.output.splitlines()) == 1
    assert "Traceback" not in done.output
    assert not done.results.exists()
