"""A pipeline of two stages saves one model that plain libraries load, and tells the truth about its stages.

That it computes what one device computes is in test_equivalence.py.
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

from common.base.paths import REPOSITORY
from tests.recipes.phases import check_phases

pytestmark = pytest.mark.slow
PP = REPOSITORY / "2.7_full_finetuning_with_pp" / "run_0_cpu_x2"
BASE = REPOSITORY / "assets" / "embedded_base"

QUICK = ("--train_rows", "65", "--validation_rows", "9", "--test_rows", "1", "--independent_judge", "none",
         "--max_new_tokens", "1", "--report_to", "none", "--batch_size", "16", "--learning_rate", "1e-3",
         "--max_steps", "5", "--eval_steps", "0.2")  # fmt: skip
PIPELINES = {
    "linear layers": (),
    "all": ("--target_modules", "all"),
    "lora": ("--technique", "lora", "--max_steps", "20"),
}
"""By what is trained; the last with enough steps to say something else than its base."""
Runs = dict[str, Any]
"""What `run_several` of tests/fixtures.py returns."""


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory, run_several: Callable[..., Runs]) -> Runs:
    runs = {name: (PP, (*QUICK, *overrides)) for name, overrides in PIPELINES.items()}
    return run_several(tmp_path_factory.mktemp("pp"), runs, 2)


def test_tied_embeddings_are_trained_by_both_ends(pipelines: Runs) -> None:
    """Without the head's part of the gradient, the first stage's copy would go elsewhere."""
    embeddings = "model.embed_tokens.weight"
    base = load_file(BASE / "model.safetensors")[embeddings]
    trained, left = (pipelines[name].weights(5)[embeddings] for name in ("all", "linear layers"))
    assert (trained - base).abs().max() > 1e-4
    assert torch.equal(left, base)
    index = json.loads((pipelines["all"].results / "model" / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]
    assert index["weight_map"][embeddings] == "model-00001-of-00002.safetensors"


@pytest.mark.parametrize("name", PIPELINES)
def test_phases_of_a_stage_take_what_is_planned(pipelines: Runs, name: str) -> None:
    check_phases(pipelines[name])


def test_saved_adapters_are_those_of_all_stages_and_load_with_peft(pipelines: Runs) -> None:
    results = pipelines["lora"].results
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
    assert set(pipelines["lora"].record["largest_logit_differences"]) == {"adapter", "merged"}


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
    recipe = ("--batch_size", "16", "--num_train_epochs", "4", "--eval_steps", "0.25", "--max_new_tokens", "48")
    done = run_workflow("torchrun", *recipe, folder=PP)
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
    """What the tables take, and that it adds up."""
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
    said = "error: per_device_train_batch_size is 16, which 5 micro-batches do not divide"
    assert sum(said in line for line in done.output.splitlines()) == 1
    assert "Traceback" not in done.output
    assert not done.results.exists()
