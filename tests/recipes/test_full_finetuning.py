"""Full fine-tuning on one device and with model parallel: what is trained and saved."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.planning.step_speed import COUNTED
from common.records.store import fit_to_be_kept
from tests.recipes.folders import BASE, FULL, MP
from tests.recipes.saved import logits_of

EMBEDDINGS = "model.embed_tokens.weight"


def changed(results: Path) -> set[str]:
    """Names of the weights that are not the base's any more."""
    base, tuned = load_file(BASE / "model.safetensors"), load_file(results / "model" / "model.safetensors")
    assert base.keys() == tuned.keys()
    return {name for name, weight in base.items() if not torch.equal(weight, tuned[name])}


def check_model_folder(folder: Path) -> None:
    """Plain Transformers loads it, and it says something else than the base."""
    tuned, base = (logits_of(AutoModelForCausalLM.from_pretrained(each), folder) for each in (folder, BASE))
    assert (tuned - base).abs().max() > 1e-2


@pytest.mark.slow
def test_model_parallel_trains_what_one_device_trains(completed: Callable, tmp_path: Path) -> None:
    one, divided = (completed("python", folder=folder, name=folder.parent.name) for folder in (FULL, MP))
    for done in (one, divided):
        record = done.record
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
    said = ("on CPU there is one device: the map splits nothing here",
            "stages in the order of their work: [0, 1, 0]", "Device map")  # fmt: skip
    assert [words for words in said if words not in divided.output] == []
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


def test_all_weights_are_trained_where_that_is_asked(completed: Callable) -> None:
    done = completed("python", "--target_modules", "all", "--independent_judge", "none", folder=FULL)
    names = changed(done.results)
    assert EMBEDDINGS in names
    assert names == set(load_file(BASE / "model.safetensors"))
    assert done.record["flops_formula"] == COUNTED
    check_model_folder(done.results / "model")
