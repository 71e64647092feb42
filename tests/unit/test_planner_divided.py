"""Models that fit no single card: what the planner recommends, what splitting saves, and the command that does it."""

import io
import json
from contextlib import redirect_stdout
from typing import Any

import pytest

from common.checks import planner_command
from common.checks.planner_command import read_options

TOO_LARGE = "--model llama-3.1-70b --gpu h100 --gpus 8 --batch-size 1 --seq-len 2048"


def ranked(question: str) -> list[dict[str, Any]]:
    options = read_options([*question.split(), "--json"])
    with redirect_stdout(io.StringIO()) as said:
        planner_command.answer(options)
    return json.loads(said.getvalue())


def test_a_model_that_fits_no_card_is_trained_by_sharding_and_has_a_command() -> None:
    """Model parallel, with 88 % idle, is the fallback."""
    answer = ranked(TOO_LARGE)
    best = answer["ranked"][0]
    assert (best["technique"], best["parallel"]) in (("lora", "fsdp"), ("lora", "zero3"))
    assert best["tokens_per_s"] >= 7_000
    assert best["run_peak_gib"] <= best["training_peak_gib"]
    assert answer["run"].startswith("make run FOLDER=2.6_full_finetuning_with_fsdp/")
    ways = [(each["technique"], each["parallel"]) for each in answer["ranked"]]
    assert ways.index(("lora", "mp")) > ways.index(("lora", "zero3"))


@pytest.mark.parametrize("gpus", ["--gpus 2 --offload cpu --seq-len 512", "--gpus 4 --seq-len 512"])
def test_qlora_of_70b_fits_the_cards_that_answer_ai_published(gpus: str) -> None:
    """Two of 24 GB with offload, four without (www.answer.ai/posts/2024-03-14-fsdp-qlora-deep-dive.html)."""
    question = f"--model llama-3.1-70b --gpu rtx-3090 {gpus} --technique qlora --parallel fsdp --batch-size 1"
    (plan,) = ranked(question)["ranked"]
    assert all(device["fits"] for device in plan["per_device"])


def test_two_cards_of_24_gb_show_what_splitting_saves() -> None:
    plans = ranked("--model qwen2.5-7b --gpu rtx-3090 --gpus 2 --batch-size 1 --seq-len 1024")["ranked"]
    lora = {plan["parallel"]: plan for plan in plans if plan["technique"] == "lora"}
    for parallel in ("fsdp", "zero3", "pp"):
        assert 13 < lora[parallel]["run_peak_gib"] < 19.1, parallel
        assert lora[parallel]["run_peak_gib"] <= lora[parallel]["training_peak_gib"]


@pytest.mark.parametrize("parallel", ["fsdp", "zero3", "pp"])
def test_a_way_that_divides_the_model_has_a_folder_that_takes_it(parallel: str) -> None:
    question = "--model qwen2.5-7b --gpu rtx-3090 --gpus 2 --technique lora --batch-size 1 --seq-len 1024"
    command = ranked(f"{question} --parallel {parallel}")["run"]
    assert "--technique lora" in command
