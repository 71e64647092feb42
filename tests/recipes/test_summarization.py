"""The three ways to write the loop come to what one device comes to, from the same rows, uneven and padded.

fp32, dropout off: 65 rows in two parts at 8 rows of each leave a step with one row, for which the other rank has none;
so do 33 validation and 9 test rows.
"""

import csv
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from common.run_config import REPOSITORY

pytestmark = pytest.mark.slow
FOLDER = REPOSITORY / "3.2_summarization" / "run_0_cpu_x2"
WAYS = ("torchrun", "accelerate", "machines")
ROWS = ("--train_rows", "65", "--validation_rows", "33", "--test_rows", "9", "--report_to", "none", "--batch_size", "8")
QUICK = ("--max_new_tokens", "12", "--beams", "2")
RECIPES = {
    "sgd": ("--optimizer", "sgd", "--learning_rate", "0.05", "--max_steps", "5", "--report_share", "0.2"),
    "adamw": ("--learning_rate", "1e-3", "--max_steps", "20", "--report_share", "0.05"),
    "accumulated": ("--optimizer", "sgd", "--learning_rate", "0.05", "--max_steps", "5", "--report_share", "0.2",
                    "--batch_size", "4", "--accumulation_steps", "2"),
}  # fmt: skip
EXCHANGES = ("overlapped", "overlapped-bf16")
Runs = dict[str, Any]


def job(way: str, *overrides: str) -> tuple[Any, tuple[str, ...]]:
    return FOLDER / f"my_workflow_summarization_{way}.py", (*ROWS, *QUICK, *overrides)


@pytest.fixture(scope="module")
def one_device(
    tmp_path_factory: pytest.TempPathFactory, run_several: Callable[..., Runs], tiny_summarizer: str
) -> Runs:
    single = ("--model", tiny_summarizer, "--parallel", "single", "--devices", "1", "--partitions", "2")
    runs = {
        f"{way}, {recipe}": job(way, *single, *RECIPES[recipe])
        for way in ("torchrun", "accelerate")
        for recipe in RECIPES
    }
    return run_several(tmp_path_factory.mktemp("one"), runs, 1)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, run_several: Callable[..., Runs], tiny_summarizer: str) -> Runs:
    model = ("--model", tiny_summarizer)
    runs = {f"{way}, {recipe}": job(way, *model, *RECIPES[recipe]) for way in WAYS for recipe in RECIPES}
    for exchange in EXCHANGES:
        sending = ("--gradient_exchange", exchange, "--bucket_mib", "0.05")
        runs[f"machines, {exchange}"] = job("machines", *model, *RECIPES["accumulated"], *sending)
    runs["machines, adamw, uneven"] = job("machines", *model, "--partitions", "3", *RECIPES["sgd"])
    runs["torchrun, adamw, uneven"] = job("torchrun", *model, "--partitions", "3", *RECIPES["sgd"])
    return run_several(tmp_path_factory.mktemp("two"), runs, 2)


def weights_of(run: Any) -> dict[str, torch.Tensor]:
    return load_file(run.results / "model" / "model.safetensors")


def check_equal(one: Any, other: Any, recipe: str) -> None:
    for kind in ("training_losses", "validation_losses"):
        assert len(one.losses(kind)) == {"sgd": 5, "accumulated": 5, "adamw": 20}[recipe]
        assert other.losses(kind) == pytest.approx(one.losses(kind), rel=1e-5)
    for key in ("effective_batch_size", "steps", "trained_parameters"):
        assert other.record[key] == one.record[key]
    if recipe != "adamw":
        assert other.record["checkpoints"]["best"] == one.record["checkpoints"]["best"]
        mine, theirs = weights_of(one), weights_of(other)
        assert mine.keys() == theirs.keys()
        assert max((mine[name] - theirs[name]).abs().max().item() for name in mine) < 1e-5


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", WAYS)
def test_each_way_computes_what_one_device_computes(one_device: Runs, two_ranks: Runs, way: str, recipe: str) -> None:
    check_equal(one_device[f"torchrun, {recipe}"], two_ranks[f"{way}, {recipe}"], recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_plain_loop_on_one_device_is_the_trainer(one_device: Runs, recipe: str) -> None:
    check_equal(one_device[f"torchrun, {recipe}"], one_device[f"accelerate, {recipe}"], recipe)


def test_three_parts_on_two_ranks_give_the_same_steps_in_each_way(two_ranks: Runs) -> None:
    check_equal(two_ranks["torchrun, adamw, uneven"], two_ranks["machines, adamw, uneven"], "sgd")
    assert two_ranks["machines, adamw, uneven"].record["effective_batch_size"] == 24


def test_gradients_sent_during_the_backward_pass_are_the_same(one_device: Runs, two_ranks: Runs) -> None:
    check_equal(one_device["torchrun, accumulated"], two_ranks["machines, overlapped"], "accumulated")


def test_gradients_sent_as_bf16_are_near(one_device: Runs, two_ranks: Runs) -> None:
    exact, rounded = one_device["torchrun, accumulated"], two_ranks["machines, overlapped-bf16"]
    assert rounded.losses("training_losses") == pytest.approx(exact.losses("training_losses"), rel=1e-3)
    assert rounded.losses("training_losses")[1:] != exact.losses("training_losses")[1:]


def test_rouge_is_that_of_the_whole_set_and_each_row_counts_once(two_ranks: Runs) -> None:
    for way in WAYS:
        run = two_ranks[f"{way}, adamw"]
        with (run.results / "predictions_after.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [int(row["row"]) for row in rows] == list(range(1, 10))
        scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
        scores = [scorer.score(row["summary"], row["written"]) for row in rows]
        after = run.record["quality"]["after"]
        assert after["rows"] == 9
        for name in ("rouge1", "rouge2", "rougeL"):
            assert after[name] == pytest.approx(sum(score[name].fmeasure for score in scores) / 9)


def test_plain_transformers_loads_the_result(two_ranks: Runs) -> None:
    for way in WAYS:
        folder = two_ranks[f"{way}, sgd"].results / "model"
        model, about = AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True)
        assert not about["missing_keys"]
        assert not about["unexpected_keys"]
        assert AutoTokenizer.from_pretrained(folder).eos_token_id == model.config.eos_token_id
