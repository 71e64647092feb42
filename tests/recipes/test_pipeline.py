"""A pipeline of two stages saves one model that plain libraries load, and tells the truth about its stages.

That it computes what one device computes is in test_equivalence.py.
"""

import csv
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fixtures import Trained
from tests.recipes.folders import BASE, PP
from tests.recipes.phases import check_phases
from tests.recipes.saved import check_adapter_and_merged

pytestmark = pytest.mark.slow

QUICK = ("--train_rows", "65", "--validation_rows", "9", "--test_rows", "1", "--independent_judge", "none",
         "--max_new_tokens", "1", "--report_to", "none", "--batch_size", "16", "--learning_rate", "1e-3",
         "--max_steps", "5", "--eval_steps", "0.2")  # fmt: skip
PIPELINES = {
    "linear layers": (),
    "all": ("--target_modules", "all"),
    "lora": ("--technique", "lora", "--max_steps", "20"),
}
"""By what is trained; the last with enough steps to say something else than its base."""
Runs = dict[str, Trained]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory, run_several: Callable[..., Runs]) -> Runs:
    runs = {name: (PP, (*QUICK, *overrides)) for name, overrides in PIPELINES.items()}
    return run_several(tmp_path_factory.mktemp("pp"), runs, 2)


def test_tied_embeddings_are_trained_by_both_ends(pipelines: Runs) -> None:
    """Without the head's part of the gradient, the first stage's copy would go elsewhere."""
    embeddings = "model.embed_tokens.weight"
    base = load_file(BASE / "model.safetensors")[embeddings]
    trained, left = (pipelines[name].weights(5) for name in ("all", "linear layers"))
    assert (trained[embeddings] - base).abs().max() > 1e-4
    assert embeddings not in left
    index = json.loads((pipelines["all"].results / "model" / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]
    assert index["weight_map"][embeddings] == "model-00001-of-00002.safetensors"


@pytest.mark.parametrize("name", PIPELINES)
def test_phases_of_a_stage_take_what_is_planned(pipelines: Runs, name: str) -> None:
    check_phases(pipelines[name])


def test_saved_adapters_are_those_of_all_stages_and_load_with_peft(pipelines: Runs) -> None:
    check_adapter_and_merged(pipelines["lora"].results)
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


def test_a_workflow_tells_the_truth_about_its_stages_and_saves_a_plain_model(completed: Callable) -> None:
    recipe = ("--batch_size", "16", "--num_train_epochs", "4", "--eval_steps", "0.25", "--max_new_tokens", "48")
    done = completed("torchrun", *recipe, folder=PP)
    record = done.record
    assert (record["launcher"], record["parallel"]) == ("torchrun", "pp")
    assert [share["samples"] for share in record["world"]] == [4 * 65, 4 * 65]  # every stage sees every row
    assert record["world"][0]["tokens"] == record["world"][1]["tokens"] > 0
    assert all(f"[RANK{rank}:CPU] memory: now" in done.output for rank in (0, 1))
    assert done.output.count("mini-batch: 16 rows") == 1  # it is the same for every stage
    assert [entry["rank"] for entry in record["memory"]] == [0, 1]
    assert record["placement"]["layers_per_stage"] == [2, 2]
    assert set(record["placement"]["stage_map"].values()) == {0, 1}
    assert [stage["stage"] for stage in record["stages"]] == [0, 1]
    assert all(stage["busy_s"] > 0 and 0 < stage["idle_share"] < 1 for stage in record["stages"])
    check_measurements(record["pipeline"])

    tuned, base = (AutoModelForCausalLM.from_pretrained(each).eval() for each in (done.results / "model", BASE))
    tokenizer = AutoTokenizer.from_pretrained(done.results / "model")
    questions, said = zip(*answers(done.results), strict=True)
    assert len(said) == 9
    assert len(set(said)) > 1
    assert tuple(greedy(tuned, tokenizer, question) for question in questions) == said
    assert tuple(greedy(base, tokenizer, question) for question in questions) != said


def check_measurements(measured: dict) -> None:
    """What the tables take, and that it adds up."""
    assert (measured["stages"], measured["micro_batches"], measured["schedule"]) == (2, 8, "1f1b")
    step_s = measured["step_s"]
    assert {"naive", "gpipe", "1f1b", "all stages at once", "stage 0 alone, 8", "stage 1 alone, 1"} <= set(step_s)
    assert min(step_s.values()) > 0
    expected = {"speedup": step_s["naive"] / step_s["1f1b"], "speedup_gpipe": step_s["naive"] / step_s["gpipe"],
                "ideal_speedup": 16 / 9, "ideal_idle_share": 1 / 9,
                "share_of_allowed": measured["speedup"] / measured["allowed_speedup"]}  # fmt: skip
    assert {name: measured[name] for name in expected} == pytest.approx(expected)
    assert 0 < measured["allowed_speedup"] < 2.5
    idle, peaks = measured["idle_share"], measured["peak_activations_mib"]
    for way, parts in (("naive", 1), ("gpipe", 8), ("1f1b", 8)):
        assert all(0 <= share < 1 for share in idle[way])
        assert min(peaks[way]) > 0
        stages = [Counter(kind for kind, *_ in passes) for passes in measured["passes"][way]]
        counted = [tuple(stage[kind] for kind in ("forward", "backward", "loss")) for stage in stages]
        assert counted == [(parts, parts, 0), (parts, parts, parts)]
    # The first stage works while the second one does, and fewer micro-batches of 1F1B are in flight; by their order,
    # as idle shares of passes of 2 ms are those of the machine's other work.
    orders = {way: "".join(kind[0] for kind, *_ in stages[0]) for way, stages in measured["passes"].items()}
    assert orders == {"naive": "fb", "gpipe": "f" * 8 + "b" * 8, "1f1b": "ff" + "bf" * 6 + "bb"}
    assert peaks["1f1b"][1] < peaks["gpipe"][1] <= 1.1 * peaks["naive"][1]
