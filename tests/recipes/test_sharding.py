"""FSDP2 and each ZeRO stage on two ranks hold and send what they should, save one model, and go on from a checkpoint.

That they compute what one device computes is in test_equivalence.py.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fixtures import Trained
from tests.recipes.folders import SHARDED
from tests.recipes.phases import check_phases

pytestmark = pytest.mark.slow

QUICK = ("--train_rows", "65", "--validation_rows", "9", "--test_rows", "1", "--independent_judge", "none",
         "--max_new_tokens", "1", "--report_to", "none", "--learning_rate_scaling", "none",
         "--learning_rate", "1e-3")  # fmt: skip
EIGHT_STEPS = ("--max_steps", "8", "--eval_steps", "0.25", "--save_steps", "0.5", "--warmup_steps", "0",
               "--batch_size", "6")  # fmt: skip
FOUR_STEPS = ("--max_steps", "4", "--eval_steps", "0.5", "--batch_size", "8")
FSDP = {
    "fsdp": EIGHT_STEPS,
    "ddp": (*FOUR_STEPS, "--parallel", "ddp"),
    "all, checkpointed": (*FOUR_STEPS, "--target_modules", "all", "--gradient_checkpointing"),
    "mixed": (*FOUR_STEPS, "--precision", "bf16-mixed"),
    "lora": (*FOUR_STEPS, "--technique", "lora"),
}  # fmt: skip
ZERO = {
    **{f"zero{stage}": (*FOUR_STEPS, "--parallel", f"zero{stage}") for stage in (1, 2, 3)},
    "zero3, to be gone on with": (*EIGHT_STEPS, "--parallel", "zero3"),
}
Runs = dict[str, Trained]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, run_several: Callable[..., Runs]) -> Callable[..., Runs]:
    """Run the folder with these overrides, by name, on so many ranks."""

    def started(ranks: int, overrides: dict[str, tuple[str, ...]]) -> Runs:
        runs = {name: (SHARDED, (*QUICK, *own)) for name, own in overrides.items()}
        return run_several(tmp_path_factory.mktemp("runs"), runs, ranks)

    return started


@pytest.fixture(scope="module")
def fsdp(start: Callable[..., Runs]) -> Runs:
    return start(2, FSDP)


@pytest.fixture(scope="module")
def zero(start: Callable[..., Runs]) -> Runs:
    return start(2, ZERO)


@pytest.fixture(scope="module")
def two(start: Callable[..., Runs], fsdp: Runs) -> Any:
    """Two ranks that go on from the last checkpoint of `fsdp`."""
    return start(2, {"two": going_on_from(fsdp["fsdp"])})["two"]


def going_on_from(run: Any) -> tuple[str, ...]:
    return (
        *EIGHT_STEPS,
        "--max_steps",
        "12",
        "--resume_from_checkpoint",
        str(run.results / "checkpoints/checkpoint-8"),
    )


def check_same_losses(run: Any, expected: Any, rel: float) -> None:
    for kind in ("training_losses", "validation_losses"):
        assert run.losses(kind) == pytest.approx(expected.losses(kind), rel=rel)


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
@pytest.mark.parametrize(("stage", "off"), [(1, 1e-3), (2, 1e-3), (3, 0.06)])  # stage 3 gathers some weights twice
def test_zero_takes_and_sends_what_is_planned(zero: Runs, stage: int, off: float) -> None:
    check_phases(zero[f"zero{stage}"])
    record = zero[f"zero{stage}"].record
    assert record["sent"]["bytes"] == pytest.approx(record["planned"]["sent_bytes"], rel=off)


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


def test_shards_of_two_ranks_go_on_with_three(fsdp: Runs, two: Any, start: Callable[..., Runs]) -> None:
    assert fsdp["fsdp"].record["checkpoints"]["best"] == "checkpoint-8"
    three_ranks = (*going_on_from(fsdp["fsdp"]), "--batch_size", "4", "--devices", "3")
    three = start(3, {"three": three_ranks})["three"]
    assert two.record["steps"] == three.record["steps"] == 12
    assert two.record["training_losses"][0][0] == 2  # the history goes on, from the first part's
    check_same_losses(three, two, rel=1e-5)
    assert two.losses("validation_losses")[-1] < two.losses("validation_losses")[3]
    assert sum(share["samples"] for share in three.record["world"]) < 4 * 12 + 1  # of the last four steps alone


def test_two_copies_of_two_ranks_hold_halves_send_what_the_formula_says_and_resume(
    fsdp: Runs, two: Any, start: Callable[..., Runs]
) -> None:
    copies = (*going_on_from(fsdp["fsdp"]), "--batch_size", "3", "--devices", "4", "--dp_replicate_size", "2")
    hybrid = start(4, {"hybrid": copies})["hybrid"]
    check_same_losses(hybrid, two, rel=1e-5)
    for share in held(hybrid):
        assert share == pytest.approx({"weights": 0.5, "gradients": 0.5, "optimizer": 0.5}, abs=0.01)
    assert hybrid.record["sent"]["bytes"] == pytest.approx(hybrid.record["planned"]["sent_bytes"], rel=1e-3)


@pytest.mark.usefixtures("needs_deepspeed")
def test_deepspeed_goes_on_from_its_own_parts(zero: Runs, two: Any, start: Callable[..., Runs]) -> None:
    """What follows a checkpoint is what follows without one: optimizer states and schedule are taken along."""
    more = (*going_on_from(zero["zero3, to be gone on with"]), "--parallel", "zero3")
    check_same_losses(start(2, {"zero": more})["zero"], two, rel=1e-4)
