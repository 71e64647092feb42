"""Models that fit no single card: what the planner recommends, what splitting saves, and the command that does it."""

import io
import json
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.base.paths import REPOSITORY
from common.base.run_folders import literal_of
from common.checks import planner_command
from common.checks.planner_command import read_options
from common.planning.job import BatchShape
from common.planning.plans import plan_run

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


@pytest.mark.parametrize(
    "published",
    ["--gpu rtx-3090 --gpus 2 --offload cpu --batch-size 2", "--gpu a5000 --gpus 4 --batch-size 1"],
    ids=["two cards with offload", "four without"],
)
def test_qlora_of_70b_fits_the_cards_that_answer_ai_published(published: str, tmp_path: Path) -> None:
    """Rows of 2,048 tokens (github.com/AnswerDotAI/fsdp_qlora, benchmarks_03_2024.md)."""
    llama_2 = {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
               "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32000,
               "max_position_embeddings": 4096, "tie_word_embeddings": False}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(llama_2))
    options = "--seq-len 2048 --technique qlora --parallel fsdp --quantization nf4-double --lora-rank 64"
    (plan,) = ranked(f"--model {tmp_path} {published} {options}")["ranked"]
    assert all(device["fits"] for device in plan["per_device"])


def test_two_cards_of_24_gb_show_what_splitting_saves() -> None:
    plans = ranked("--model qwen2.5-7b --gpu rtx-3090 --gpus 2 --batch-size 1 --seq-len 1024")["ranked"]
    lora = {plan["parallel"]: plan for plan in plans if plan["technique"] == "lora"}
    for parallel in ("fsdp", "zero3", "pp"):
        assert 11.2 < lora[parallel]["run_peak_gib"] < 17.3, parallel
        assert lora[parallel]["run_peak_gib"] <= lora[parallel]["training_peak_gib"]


@pytest.mark.parametrize("parallel", ["fsdp", "zero3", "pp"])
def test_a_way_that_divides_the_model_has_a_folder_that_takes_it(parallel: str) -> None:
    question = "--model qwen2.5-7b --gpu rtx-3090 --gpus 2 --technique lora --batch-size 1 --seq-len 1024"
    command = ranked(f"{question} --parallel {parallel}")["run"]
    assert "--technique lora" in command


def test_where_no_ranks_can_share_rows_fsdp_that_offloads_is_offered_with_its_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    question = "--model llama-3.1-70b --gpu 4090 --gpus 2 --batch-size 1 --seq-len 2048"
    (fitting,) = (plan for plan in ranked(question)["ranked"] if plan["per_device"][0]["fits"])
    assert fitting["parallel"] == "fsdp"
    assert fitting["host_gib"] > 100
    assert planner_command.answer(read_options(question.split())) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert "--technique qlora" in last
    assert "--offload cpu" in last


def test_a_judge_that_is_larger_than_the_model_does_not_leave_one_row_at_a_time() -> None:
    run = literal_of(REPOSITORY / "2.7_full_finetuning_with_pp/run_0_cpu_x2")
    plan = plan_run(run, BatchShape(64, 39, 20))
    with_one = plan_run(replace(run, per_device_eval_batch_size=1), BatchShape(64, 39, 20))
    assert with_one.run_peak.memory.peak_gib > with_one.training_peak_gib
    assert plan.job.evaluation.rows >= 8
