"""Full fine-tuning on one device and with model parallel: what is trained, saved, and refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.base.paths import REPOSITORY
from common.records.store import fit_to_be_kept

FULL = REPOSITORY / "2.4_full_finetuning" / "run_0_cpu_x1"
MP = REPOSITORY / "2.5_full_finetuning_with_mp" / "run_0_cpu_x1"
BASE = REPOSITORY / "assets" / "embedded_base"
EMBEDDINGS = "model.embed_tokens.weight"


def changed(results: Path) -> set[str]:
    """Names of the weights that are not the base's any more."""
    base, tuned = load_file(BASE / "model.safetensors"), load_file(results / "model" / "model.safetensors")
    assert base.keys() == tuned.keys()
    return {name for name, weight in base.items() if not torch.equal(weight, tuned[name])}


def check_model_folder(folder: Path) -> None:
    """Plain Transformers loads it, and it says something else than the base."""
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)("Who made it?")["input_ids"]])
    tuned, base = (AutoModelForCausalLM.from_pretrained(each).eval() for each in (folder, BASE))
    with torch.no_grad():
        assert (tuned(ids).logits - base(ids).logits).abs().max() > 1e-2


@pytest.mark.slow
def test_model_parallel_trains_what_one_device_trains(run_workflow: Callable, tmp_path: Path) -> None:
    one = run_workflow("python", folder=FULL, name="one")
    divided = run_workflow("python", folder=MP, name="divided")
    assert (one.exit_code, divided.exit_code) == (0, 0), one.output + divided.output
    for done in (one, divided):
        record = done.record
        assert record["status"] == "completed"
        assert record["steps"] == 5
        assert record["largest_logit_differences"] == {"model": 0.0}
        shares = [share for _, share in record["updated_share_by_step"]]
        assert min(shares[1:]) > 0.999  # fp32 loses no update; the first step's learning rate is 0
        assert record["best_validation_loss"] < record["validation_losses"][0][1]
        check_model_folder(done.results / "model")
        names = changed(done.results)
        assert len(names) == 4 * 7
        assert all(name.endswith("_proj.weight") for name in names)
        assert len((done.results / "predictions_after.csv").read_text().splitlines()) == 10
    for kind in ("training_losses", "validation_losses"):
        expected = [loss for _, loss in one.record[kind]]
        assert [loss for _, loss in divided.record[kind]] == pytest.approx(expected, rel=1e-6)
    assert "stages_seen" not in one.record
    assert divided.record["stages_seen"] == {"stages": 2, "order": [0, 1, 0], "logit_difference_with_hooks": 0.0}
    assert divided.record["placement"]["stage_map"]["lm_head"] == 0  # with the embeddings, which are the same weight
    assert "on CPU there is one device: the map splits nothing here" in divided.output
    assert "stages in the order of their work: [0, 1, 0]" in divided.output
    assert "Device map" in divided.output
    assert str(tmp_path) not in json.dumps(fit_to_be_kept(divided.record))


def test_a_run_trains_without_the_rows_that_it_may_leave_out(
    run_workflow: Callable, tmp_path: Path, tiny_chat_model: str
) -> None:
    """Rows whose answers lie beyond `max_length`: the check of the inputs and the training go by the same share."""
    answer = {"role": "assistant", "content": "In the hall."}
    for name, counts in {"train": (50, 1, 40, 2, 3, 4), "validation": (5,), "test": (6,)}.items():
        questions = [{"role": "user", "content": "Where is it? " * count} for count in counts]
        rows = [json.dumps({"messages": [question, answer]}) + "\n" for question in questions]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    settings = ("--model", tiny_chat_model, "--data", str(tmp_path), "--max_length", "60")
    done = run_workflow("python", *settings, "--max_truncated_fraction", "0.5", folder=FULL)
    assert done.exit_code == 0, done.output
    assert "2 of 6 rows have no token to learn within 60 tokens, and are left out" in done.output
    assert done.record["data"]["training_rows"] == 4
    refused = run_workflow("python", *settings, "--max_truncated_fraction", "0.3", folder=FULL)
    assert refused.exit_code == 2, refused.output
    assert "train.jsonl, line 1 has no token to learn within its first 60 tokens" in refused.output


def test_all_weights_are_trained_where_that_is_asked(run_workflow: Callable) -> None:
    done = run_workflow("python", "--target_modules", "all", "--independent_judge", "none", folder=FULL)
    assert done.exit_code == 0, done.output
    names = changed(done.results)
    assert EMBEDDINGS in names
    assert names == set(load_file(BASE / "model.safetensors"))
    assert done.record["flops_formula"] == "6N full"
    check_model_folder(done.results / "model")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("--stages", "9"), "has 4 layers, too few for 9 stages"),
        pytest.param(
            ("--device_map", "cuda7.json"),
            "on 'cuda:7', but the devices of this run are 0, 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(
    run_workflow: Callable, tmp_path: Path, overrides: tuple[str, ...], said: str
) -> None:
    (tmp_path / "cuda7.json").write_text('{"": 0, "model.layers.3": "cuda:7"}')
    given = [str(tmp_path / each) if each.endswith(".json") else each for each in overrides]
    done = run_workflow("python", *given, folder=MP)
    assert done.exit_code == 2, done.output
    assert [said in line for line in done.output.splitlines()] == [True], done.output
    assert not done.results.exists()


def test_adapters_are_refused_where_weights_are_trained(run_workflow: Callable) -> None:
    done = run_workflow("python", "--technique", "lora", folder=FULL)
    assert done.exit_code == 2
    assert "technique is lora, but the workflow of" in done.output
    assert not done.results.exists()
