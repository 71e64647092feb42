"""FSDP2 and each ZeRO stage on two ranks compute what one device computes, and hold what they should.

fp32, dropout off, the same uneven and padded rows: 65 rows at a global batch of 16 leave one row for the last step, so
that one rank gets a row without labels; so do 33 validation rows.
"""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.run_config import REPOSITORY

pytestmark = pytest.mark.slow
LORA = REPOSITORY / "2.1_lora_finetuning" / "run_0_cpu_x1"
QLORA = REPOSITORY / "2.3_qlora_finetuning" / "run_0_cpu_x1"
FULL = REPOSITORY / "2.4_full_finetuning" / "run_0_cpu_x1"
SHARDED = REPOSITORY / "2.6_full_finetuning_with_fsdp" / "run_0_cpu_x2"
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="the extra DeepSpeed is not installed: `make deepspeed`"
)

QUICK = ("--train_rows", "65", "--validation_rows", "33", "--test_rows", "3", "--independent_judge", "none",
         "--report_to", "none")  # fmt: skip
SGD = ("--optimizer", "sgd", "--learning_rate", "0.05", "--max_steps", "5", "--report_share", "0.2")
ADAMW = ("--learning_rate", "1e-3", "--max_steps", "20", "--report_share", "0.05")
ALL = ("--target_modules", "all")
ADAPTERS = ("--technique", "lora", "--lora_dropout", "0")
RANK = ("--batch_size", "8", "--learning_rate_scaling", "none")
CHECKPOINTED = ("--gradient_checkpointing", "non-reentrant")

ON_ONE_DEVICE = {
    "sgd": (FULL, SGD),
    "adamw": (FULL, ADAMW),
    "all, sgd": (FULL, (*SGD, *ALL)),
    "lora, sgd": (LORA, (*SGD, *ADAPTERS, "--gradient_checkpointing", "none")),
    "qlora, sgd": (QLORA, (*SGD, "--lora_dropout", "0")),
}
FSDP = {
    "fsdp, sgd": ("sgd", SGD),
    "fsdp, adamw": ("adamw", ADAMW),
    "fsdp, all, checkpointed, sgd": ("all, sgd", (*SGD, *ALL, *CHECKPOINTED, "--wrap", "LlamaMLP,LlamaAttention")),
    "fsdp, accumulated, sgd": ("sgd", (*SGD, "--batch_size", "4", "--accumulation_steps", "2", "--prefetch", "2")),
    "fsdp, lora, sgd": ("lora, sgd", (*SGD, *ADAPTERS)),
    "fsdp, qlora, sgd": ("qlora, sgd", (*SGD, "--technique", "qlora", "--lora_dropout", "0")),
    "ddp, sgd": ("sgd", (*SGD, "--parallel", "ddp")),
}
ZERO = {
    **{f"zero{stage}, sgd": ("sgd", (*SGD, "--parallel", f"zero{stage}")) for stage in (1, 2, 3)},
    **{f"zero{stage}, adamw": ("adamw", (*ADAMW, "--parallel", f"zero{stage}")) for stage in (1, 2, 3)},
    "zero3, lora, sgd": ("lora, sgd", (*SGD, *ADAPTERS, "--parallel", "zero3")),
    "zero3, all, accumulated, sgd": (
        "all, sgd",
        (*SGD, *ALL, "--parallel", "zero3", "--batch_size", "4", "--accumulation_steps", "2"),
    ),
}
Runs = dict[str, Any]
"""What `run_several` of tests/conftest.py returns."""


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory, run_several: Callable[..., Runs]) -> Runs:
    runs = {
        name: (folder, (*QUICK, "--batch_size", "16", *overrides))
        for name, (folder, overrides) in ON_ONE_DEVICE.items()
    }
    return run_several(tmp_path_factory.mktemp("one"), runs, 1)


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory, run_several: Callable[..., Runs]) -> Runs:
    runs = {name: (SHARDED, (*QUICK, *RANK, *overrides)) for name, (_, overrides) in FSDP.items()}
    return run_several(tmp_path_factory.mktemp("fsdp"), runs, 2)


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory, run_several: Callable[..., Runs]) -> Runs:
    runs = {name: (SHARDED, (*QUICK, *RANK, *overrides)) for name, (_, overrides) in ZERO.items()}
    return run_several(tmp_path_factory.mktemp("zero"), runs, 2)


def check_equal(one: Any, sharded: Any, name: str) -> None:
    steps = 20 if "adamw" in name else 5
    assert len(one.losses("training_losses")) == steps
    for kind in ("training_losses", "validation_losses"):
        assert sharded.losses(kind) == pytest.approx(one.losses(kind), rel=1e-5)
    counted = ("trained_parameters", "flops_per_token", "effective_batch_size", "steps")
    assert {key: sharded.record[key] for key in counted} == {key: one.record[key] for key in counted}
    if "sgd" in name:
        assert sharded.record["checkpoints"]["best"] == f"checkpoint-{steps}"
        folder = sharded.results / ("adapter" if "lora" in name else "model")
        saved = {key: weight for file in folder.glob("*.safetensors") for key, weight in load_file(file).items()}
        trained = one.weights(steps)
        assert saved.keys() == trained.keys()
        assert max((saved[key] - trained[key]).abs().max().item() for key in saved) < 1e-5


@pytest.mark.parametrize("name", FSDP)
def test_fsdp_computes_what_one_device_computes(one_device: Runs, fsdp: Runs, name: str) -> None:
    check_equal(one_device[FSDP[name][0]], fsdp[name], name)


@needs_deepspeed
@pytest.mark.parametrize("name", ZERO)
def test_each_zero_stage_computes_what_one_device_computes(one_device: Runs, zero: Runs, name: str) -> None:
    check_equal(one_device[ZERO[name][0]], zero[name], name)


def held(run: Any) -> tuple[dict[str, float], dict[str, float]]:
    """What the two ranks hold, as shares of the whole: weights, gradients, optimizer."""
    whole = run.record["held"]["whole"]
    first, second = (
        {name.removesuffix("_bytes"): each[name] / whole[name] for name in whole if whole[name]}
        for each in run.record["held"]["per_rank"]
    )
    return first, second


def test_each_rank_holds_half_of_everything_with_fsdp_and_everything_with_ddp(fsdp: Runs) -> None:
    for share in held(fsdp["fsdp, adamw"]):
        assert share == pytest.approx({"weights": 0.5, "gradients": 0.5, "optimizer": 0.5}, abs=0.01)
    for share in held(fsdp["ddp, sgd"]):
        assert share["weights"] == share["gradients"] == 1


@needs_deepspeed
def test_each_zero_stage_divides_more(zero: Runs) -> None:
    """Adam's two states, and DeepSpeed's fp32 copy: three quarters of a half, where one device would have two."""
    shares = {stage: held(zero[f"zero{stage}, adamw"])[0] for stage in (1, 2, 3)}
    assert [shares[stage]["weights"] for stage in (1, 2, 3)] == pytest.approx([1, 1, 0.5], abs=0.01)
    assert [shares[stage]["optimizer"] for stage in (1, 2, 3)] == pytest.approx([0.75] * 3, abs=0.01)


def test_what_is_sent_is_what_the_formula_says(fsdp: Runs) -> None:
    for name in ("fsdp, sgd", "ddp, sgd", "fsdp, all, checkpointed, sgd"):
        record = fsdp[name].record
        root_is_wrapped_too = 1.02 if "all" in name else 1.001  # norms beside attention and MLP are gathered once
        assert record["sent"]["bytes"] == pytest.approx(record["planned"]["sent_bytes"], rel=root_is_wrapped_too - 1)


@needs_deepspeed
def test_what_deepspeed_sends_is_what_the_formula_says(zero: Runs) -> None:
    for stage, off in ((1, 1e-3), (2, 1e-3), (3, 0.06)):  # stage 3 gathers some small weights twice
        record = zero[f"zero{stage}, adamw"].record
        assert record["sent"]["bytes"] == pytest.approx(record["planned"]["sent_bytes"], rel=off)


def test_what_was_saved_is_one_model_of_all_ranks(fsdp: Runs) -> None:
    results = fsdp["fsdp, all, checkpointed, sgd"].results
    config = json.loads((results / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    model = AutoModelForCausalLM.from_pretrained(results / "model")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
    merged = AutoModelForCausalLM.from_pretrained(fsdp["fsdp, lora, sgd"].results / "merged")
    assert merged.num_parameters() == model.num_parameters()


# -- checkpoints

EIGHT_STEPS = (*QUICK, "--learning_rate_scaling", "none", "--learning_rate", "1e-3", "--max_steps", "8",
               "--report_share", "0.25", "--warmup_share", "0")  # fmt: skip
TWO_RANKS = ("--batch_size", "6")


@pytest.fixture(scope="module")
def first_part(tmp_path_factory: pytest.TempPathFactory, run_several: Callable[..., Runs]) -> Callable[[str], Path]:
    """Eight steps, and the checkpoint that their best validation loss has kept."""
    folder = tmp_path_factory.mktemp("first")

    def checkpoint(way: str) -> Path:
        run = run_several(folder, {way: (SHARDED, (*EIGHT_STEPS, *TWO_RANKS, "--parallel", way))}, 2)[way]
        return run.results / "checkpoints" / run.record["checkpoints"]["best"]

    return checkpoint


def test_shards_of_two_ranks_go_on_with_three(first_part: Callable[[str], Path], run_several: Callable) -> None:
    checkpoint = first_part("fsdp")
    assert checkpoint.name == "checkpoint-8"
    more = (*EIGHT_STEPS, "--max_steps", "12", "--resume_from", str(checkpoint))
    two = run_several(checkpoint.parent, {"two": (SHARDED, (*more, *TWO_RANKS))}, 2)["two"]
    three = run_several(checkpoint.parent, {"three": (SHARDED, (*more, "--batch_size", "4", "--devices", "3"))}, 3)[
        "three"
    ]
    assert two.record["steps"] == three.record["steps"] == 12
    assert two.record["training_losses"][0][0] == 2  # the history goes on, from the first part's
    for kind in ("training_losses", "validation_losses"):
        assert three.losses(kind) == pytest.approx(two.losses(kind), rel=1e-5)
    assert two.losses("validation_losses")[-1] < two.losses("validation_losses")[3]
    assert sum(share["samples"] for share in three.record["world"]) < 4 * 12 + 1  # of the last four steps alone


@needs_deepspeed
def test_deepspeed_goes_on_from_its_own_parts(first_part: Callable[[str], Path], run_several: Callable) -> None:
    """What follows a checkpoint is what follows without one: optimizer states and schedule are taken along."""
    checkpoint = first_part("zero3")
    more = (*EIGHT_STEPS, "--max_steps", "12", "--resume_from", str(checkpoint), "--parallel", "zero3")
    zero = run_several(checkpoint.parent, {"zero": (SHARDED, (*more, *TWO_RANKS))}, 2)["zero"]
    fsdp_checkpoint = first_part("fsdp")
    more = (*EIGHT_STEPS, "--max_steps", "12", "--resume_from", str(fsdp_checkpoint))
    fsdp = run_several(fsdp_checkpoint.parent, {"again": (SHARDED, (*more, *TWO_RANKS))}, 2)["again"]
    for kind in ("training_losses", "validation_losses"):
        assert zero.losses(kind) == pytest.approx(fsdp.losses(kind), rel=1e-4)


def test_half_the_way_and_the_rest_is_the_whole_way(tmp_path: Path, run_several: Callable) -> None:
    """The first part stops early by what its folder keeps: the checkpoint of a whole run's half."""
    whole = (*EIGHT_STEPS, *TWO_RANKS, "--scheduler", "constant")
    runs = {"half": (SHARDED, (*whole, "--max_steps", "4", "--report_share", "0.5")), "whole": (SHARDED, whole)}
    found = run_several(tmp_path, runs, 2)
    checkpoint = found["half"].results / "checkpoints" / "checkpoint-4"
    rest = run_several(tmp_path, {"rest": (SHARDED, (*whole, "--resume_from", str(checkpoint)))}, 2)["rest"]
    by_step = dict(found["whole"].record["validation_losses"])
    for step, loss in rest.record["validation_losses"]:
        assert loss == pytest.approx(by_step[step], rel=1e-5)
    assert rest.record["validation_losses"][-1][0] == 8
