"""FSDP2 and each ZeRO stage on two ranks hold and send what they should, save one model, and go on from a checkpoint.

That they compute what one device computes is in test_equivalence.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.base.paths import REPOSITORY
from tests.recipes.phases import check_phases

pytestmark = pytest.mark.slow
SHARDED = REPOSITORY / "2.6_full_finetuning_with_fsdp" / "run_0_cpu_x2"

QUICK = ("--train_rows", "65", "--validation_rows", "9", "--test_rows", "1", "--independent_judge", "none",
         "--max_new_tokens", "1", "--report_to", "none", "--learning_rate_scaling", "none",
         "--learning_rate", "1e-3")  # fmt: skip
EIGHT_STEPS = ("--max_steps", "8", "--eval_steps", "0.25", "--save_steps", "0.5", "--warmup_steps", "0",
               "--batch_size", "6")  # fmt: skip
CONSTANT = ("--lr_scheduler_type", "constant")
HALF = ("--max_steps", "4", "--eval_steps", "0.5")
FOUR_STEPS = ("--max_steps", "4", "--eval_steps", "0.5", "--batch_size", "8")
FSDP = {
    "fsdp": EIGHT_STEPS,
    "ddp": (*FOUR_STEPS, "--parallel", "ddp"),
    "all, checkpointed": (*FOUR_STEPS, "--target_modules", "all", "--gradient_checkpointing",
                          "--wrap", "LlamaMLP,LlamaAttention"),
    "mixed": (*FOUR_STEPS, "--precision", "bf16-mixed"),
    "lora": (*FOUR_STEPS, "--technique", "lora"),
    "whole": (*EIGHT_STEPS, *CONSTANT),
    "half": (*EIGHT_STEPS, *CONSTANT, *HALF),
}  # fmt: skip
ZERO = {
    **{f"zero{stage}": (*FOUR_STEPS, "--parallel", f"zero{stage}") for stage in (1, 2, 3)},
    "zero3, to be gone on with": (*EIGHT_STEPS, "--parallel", "zero3"),
}
Runs = dict[str, Any]
"""What `run_several` of tests/fixtures.py returns."""


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory, run_several: Callable[..., Runs]) -> Runs:
    runs = {name: (SHARDED, (*QUICK, *overrides)) for name, overrides in FSDP.items()}
    return run_several(tmp_path_factory.mktemp("fsdp"), runs, 2)


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory, run_several: Callable[..., Runs]) -> Runs:
    runs = {name: (SHARDED, (*QUICK, *overrides)) for name, overrides in ZERO.items()}
    return run_several(tmp_path_factory.mktemp("zero"), runs, 2)


@pytest.fixture(scope="module")
def gone_on(tmp_path_factory: pytest.TempPathFactory, run_several: Callable[..., Runs], fsdp: Runs) -> Runs:
    """Two ranks that go on from checkpoints of `fsdp`: from the last one, and half the way."""
    runs = {
        "two": (*EIGHT_STEPS, "--max_steps", "12", "--resume_from_checkpoint", checkpoint_of(fsdp["fsdp"], 8)),
        "rest": (*EIGHT_STEPS, *CONSTANT, "--resume_from_checkpoint", checkpoint_of(fsdp["half"], 4)),
    }
    jobs = {name: (SHARDED, (*QUICK, *overrides)) for name, overrides in runs.items()}
    return run_several(tmp_path_factory.mktemp("two"), jobs, 2)


def checkpoint_of(run: Any, step: int) -> str:
    return str(run.results / "checkpoints" / f"checkpoint-{step}")


def held(run: Any) -> list[dict[str, float]]:
    """What each rank holds, as shares of the whole: weights, gradients, optimizer."""
    whole = run.record["held"]["whole"]
    return [
        {name.removesuffix("_bytes"): each[name] / whole[name] for name in whole if whole[name]}
        for each in run.record["held"]["per_rank"]
    ]


def test_each_rank_holds_half_of_everything_with_fsdp_and_everything_with_ddp(fsdp: Runs) -> None:
    for share in held(fsdp["fsdp"]):
        assert share == pytest.approx({"weights": 0.5, "gradients": 0.5, "optimizer": 0.5}, abs=0.01)
    for share in held(fsdp["ddp"]):
        assert share["weights"] == share["gradients"] == 1


@pytest.mark.parametrize("name", ["fsdp", "ddp", "mixed", "lora"])
def test_phases_take_what_is_planned(fsdp: Runs, name: str) -> None:
    check_phases(fsdp[name])


@pytest.mark.usefixtures("needs_deepspeed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_phases_with_zero_take_what_is_planned(zero: Runs, stage: int) -> None:
    check_phases(zero[f"zero{stage}"])


@pytest.mark.usefixtures("needs_deepspeed")
def test_each_zero_stage_divides_more(zero: Runs) -> None:
    """Adam's two states, and DeepSpeed's fp32 copy: three quarters of a half, where one device would have two."""
    shares = {stage: held(zero[f"zero{stage}"])[0] for stage in (1, 2, 3)}
    assert [shares[stage]["weights"] for stage in (1, 2, 3)] == pytest.approx([1, 1, 0.5], abs=0.01)
    assert [shares[stage]["optimizer"] for stage in (1, 2, 3)] == pytest.approx([0.75] * 3, abs=0.01)


def test_what_is_sent_is_what_the_formula_says(fsdp: Runs) -> None:
    for name in ("fsdp", "mixed", "ddp", "all, checkpointed"):
        record = fsdp[name].record
        root_is_wrapped_too = 1.02 if "all" in name else 1.001  # norms beside attention and MLP are gathered once
        assert record["sent"]["bytes"] == pytest.approx(record["planned"]["sent_bytes"], rel=root_is_wrapped_too - 1)


@pytest.mark.usefixtures("needs_deepspeed")
def test_what_deepspeed_sends_is_what_the_formula_says(zero: Runs) -> None:
    for stage, off in ((1, 1e-3), (2, 1e-3), (3, 0.06)):  # stage 3 gathers some small weights twice
        record = zero[f"zero{stage}"].record
        assert record["sent"]["bytes"] == pytest.approx(record["planned"]["sent_bytes"], rel=off)


def test_what_was_saved_is_one_model_of_all_ranks(fsdp: Runs) -> None:
    results = fsdp["all, checkpointed"].results
    config = json.loads((results / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    model = AutoModelForCausalLM.from_pretrained(results / "model")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
    merged = AutoModelForCausalLM.from_pretrained(fsdp["lora"].results / "merged")
    assert merged.num_parameters() == model.num_parameters()


# -- checkpoints


def test_shards_of_two_ranks_go_on_with_three(
    fsdp: Runs, gone_on: Runs, tmp_path: Path, run_several: Callable[..., Runs]
) -> None:
    assert fsdp["fsdp"].record["checkpoints"]["best"] == "checkpoint-8"
    more = (*EIGHT_STEPS, "--max_steps", "12", "--resume_from_checkpoint", checkpoint_of(fsdp["fsdp"], 8))
    three_ranks = (*QUICK, *more, "--batch_size", "4", "--devices", "3")
    two, three = gone_on["two"], run_several(tmp_path, {"three": (SHARDED, three_ranks)}, 3)["three"]
    assert two.record["steps"] == three.record["steps"] == 12
    assert two.record["training_losses"][0][0] == 2  # the history goes on, from the first part's
    for kind in ("training_losses", "validation_losses"):
        assert three.losses(kind) == pytest.approx(two.losses(kind), rel=1e-5)
    assert two.losses("validation_losses")[-1] < two.losses("validation_losses")[3]
    assert sum(share["samples"] for share in three.record["world"]) < 4 * 12 + 1  # of the last four steps alone


def test_two_copies_of_two_ranks_hold_halves_send_what_the_formula_says_and_resume(
    fsdp: Runs, gone_on: Runs, tmp_path: Path, run_several: Callable[..., Runs]
) -> None:
    more = (*EIGHT_STEPS, "--max_steps", "12", "--resume_from_checkpoint", checkpoint_of(fsdp["fsdp"], 8))
    copies = (*QUICK, *more, "--batch_size", "3", "--devices", "4", "--dp_replicate_size", "2")
    hybrid = run_several(tmp_path, {"hybrid": (SHARDED, copies)}, 4)["hybrid"]
    for kind in ("training_losses", "validation_losses"):
        assert hybrid.losses(kind) == pytest.approx(gone_on["two"].losses(kind), rel=1e-5)
    for share in held(hybrid):
        assert share == pytest.approx({"weights": 0.5, "gradients": 0.5, "optimizer": 0.5}, abs=0.01)
    assert hybrid.record["sent"]["bytes"] == pytest.approx(hybrid.record["planned"]["sent_bytes"], rel=1e-3)


@pytest.mark.usefixtures("needs_deepspeed")
def test_deepspeed_goes_on_from_its_own_parts(
    zero: Runs, gone_on: Runs, tmp_path: Path, run_several: Callable[..., Runs]
) -> None:
    """What follows a checkpoint is what follows without one: optimizer states and schedule are taken along."""
    checkpoint = checkpoint_of(zero["zero3, to be gone on with"], 8)
    more = (*QUICK, *EIGHT_STEPS, "--max_steps", "12", "--parallel", "zero3", "--resume_from_checkpoint", checkpoint)
    after = run_several(tmp_path, {"zero": (SHARDED, more)}, 2)["zero"]
    for kind in ("training_losses", "validation_losses"):
        assert after.losses(kind) == pytest.approx(gone_on["two"].losses(kind), rel=1e-4)


def test_half_the_way_and_the_rest_is_the_whole_way(fsdp: Runs, gone_on: Runs) -> None:
    """The first part stops early by what its folder keeps: the checkpoint of a whole run's half."""
    by_step = dict(fsdp["whole"].record["validation_losses"])
    for step, loss in gone_on["rest"].record["validation_losses"]:
        assert loss == pytest.approx(by_step[step], rel=1e-5)
    assert gone_on["rest"].record["validation_losses"][-1][0] == 8
