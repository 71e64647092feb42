"""Two ranks on one GPU, by NCCL: each parallelism's losses beside one device's.

Neither speed nor the links of two cards are seen so.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from common.base.run_folders import workflows_of
from common.records.store import Record
from tests.gpu.conftest import folder_with, needs_4_bits
from tests.recipes.folders import CLASSIFICATION, DDP, FULL, LORA, PP, QLORA, SHARDED, SUMMARIZATION

# NCCL refuses two ranks of a host on one GPU (`Duplicate GPU detected` in its init.cc), and knows a host by
# NCCL_HOSTID: here each rank is alone on a host of another name, and they talk through sockets. From 2.30 on NCCL has a
# switch of its own for it, which older versions ignore
RANK = """import os
os.environ |= {
    "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "NCCL_HOSTID": "h" + os.environ["RANK"],
    "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket",
    "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple",
}"""
TWO = ("--devices=2", "--nodes=2")
# with which two ranks take the steps of one device: the same rows in the same order, nothing drawn by chance, and an
# optimizer that does not hide a gradient's scale. Of 33 rows one is left for the last step, where one rank has none
SAME = (
    "--train_rows=33", "--per_device_eval_batch_size=4", "--test_rows=2", "--max_new_tokens=1", "--max_steps=5",
    "--eval_steps=0.2", "--warmup_steps=0", "--optimizer=sgd", "--learning_rate_scaling=none", "--precision=fp32",
    "--train_sampling_strategy=group_by_length", "--report_to=none",
)  # fmt: skip
OF_RANK, WHOLE, ALONE = "--batch_size=4", "--batch_size=8", ("--parallel=single", "--devices=1")
# at these rates losses fall clearly within five steps; some of the gradients are longer than the norm, others are not
ALL_WEIGHTS = ("--learning_rate=0.05", "--max_grad_norm=6.5")
ADAPTERS = ("--learning_rate=0.001", "--max_grad_norm=46", "--lora_dropout=0")
TOLERANCE, TOLERANCE_IN_BF16 = 1e-4, 5e-3
"""The largest relative difference of a loss. In fp32 sums differ in their order alone. bf16 rounds to 8 bits, FSDP also
between the layers: on a CPU the difference was up to 2e-3."""
BF16 = ("--precision=bf16-mixed",)
PAIRS = {
    # by name: what the ranks run, what the one device runs, and settings of both
    "2.2 DDP": (DDP, (OF_RANK,), LORA, (WHOLE,), ADAPTERS),
    "2.3 DDP": (QLORA, ("--parallel=ddp", OF_RANK), QLORA, (WHOLE,), ADAPTERS),
    "2.6 DDP": (SHARDED, ("--parallel=ddp", OF_RANK), FULL, (WHOLE,), ALL_WEIGHTS),
    "2.6 FSDP": (SHARDED, (OF_RANK,), FULL, (WHOLE,), ALL_WEIGHTS),
    "2.6 FSDP, bf16": (SHARDED, (OF_RANK,), FULL, (WHOLE,), (*ALL_WEIGHTS, *BF16)),
    "2.6 QLoRA": (SHARDED, ("--technique=qlora", OF_RANK), QLORA, (WHOLE,), ADAPTERS),
    "2.6 ZeRO-3": (SHARDED, ("--parallel=zero3", OF_RANK), FULL, (WHOLE,), ALL_WEIGHTS),
    "2.7 PP": (PP, (WHOLE, "--micro_batches=4"), FULL, (WHOLE,), ALL_WEIGHTS),
    "3.1 TP": (
        CLASSIFICATION, ("--parallel=tp", WHOLE), CLASSIFICATION, (*ALONE, WHOLE),
        ("--learning_rate=0.03", "--max_grad_norm=4.3"),
    ),
    "3.2 DDP": (
        SUMMARIZATION / "my_workflow_summarization_machines.py", (OF_RANK,),
        SUMMARIZATION / "my_workflow_summarization_torchrun.py", (*ALONE, "--partitions=2", OF_RANK),
        ("--learning_rate=0.1", "--max_grad_norm=0.92"),
    ),
}  # fmt: skip
MARKS = {"2.3 DDP": needs_4_bits, "2.6 QLoRA": needs_4_bits}


def script_of(place: Path) -> Path:
    """The workflow itself, or that of a run folder."""
    return place if place.is_file() else workflows_of(place)[0]


def check_same_losses(record: Record, reference: Record, tolerance: float) -> None:
    """In the same steps, of training and of validation."""
    for kind in ("training_losses", "validation_losses"):
        (steps, losses), (expected_steps, expected) = (zip(*each[kind], strict=True) for each in (record, reference))
        assert steps == expected_steps
        assert losses == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in PAIRS])
def test_two_ranks_share_a_gpu(name: str, trained: Callable, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    two, of_two, one, of_one, both = PAIRS[name]
    if name == "2.6 ZeRO-3":
        request.getfixturevalue("needs_deepspeed")
    if name == "3.1 TP":  # a small encoder without dropout
        both = (*both, "--model", request.getfixturevalue("encoders")["bert"])
    ranks = folder_with(script_of(two), tmp_path / "ranks", RANK)
    found = trained(*SAME, *both, *of_two, *TWO, launcher="torchrun", folder=ranks, name="two")
    alone = folder_with(script_of(one), tmp_path / "alone")
    expected = trained(*SAME, *both, *of_one, folder=alone, name="one")
    check_same_losses(found.record, expected.record, TOLERANCE_IN_BF16 if "bf16" in name else TOLERANCE)


def test_a_rank_that_is_killed_starts_again(trained: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both resume after the newest checkpoint, and end with the losses of a pair that nothing happened to."""
    ranks, once = folder_with(script_of(DDP), tmp_path / "ranks", RANK), tmp_path / "once"
    settings = (*SAME, *ADAPTERS, OF_RANK, *TWO, "--save_steps=1")
    whole = trained(*settings, launcher="torchrun", folder=ranks, name="whole")
    monkeypatch.setenv("FAULT", f"kill rank=1 step=3 once={once}")
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")
    killed = trained(*settings, launcher="torchrun", folder=ranks, name="killed")
    assert once.exists()
    check_same_losses(killed.record, whole.record, TOLERANCE)
