"""The same workflows on GPUs. They skip, visibly, where there are none or too few."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.planner_points import Point, watched_steps
from common.base.paths import REPOSITORY
from common.checks import preflight
from common.checks.dry_run import dry_run
from common.hardware.devices import gpu_of_device, gpus
from common.planning.architectures import read_architecture
from common.planning.job import job_of_run
from common.planning.memory_plan import device_memory
from common.planning.shares import whole_model
from tests.gpu.conftest import folder_with, losses_of, needs_4_bits
from tests.recipes.folders import (
    CLASSIFICATION,
    DDP,
    FULL,
    LORA,
    MP,
    PICTURES,
    PREFERENCES,
    QLORA,
    SUMMARIZATION,
)

SHARDED, ZERO = (
    REPOSITORY / "2.6_full_finetuning_with_fsdp" / name for name in ("run_1_a100_80g_x2", "run_3_a100_80g_x2_zero")
)
DDP_ON_GPUS = REPOSITORY / "2.2_lora_finetuning_with_ddp" / "run_1_a6000_48g_x2"
needs_two_gpus = pytest.mark.usefixtures("two_gpus")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lora_trains_on_one_gpu_and_reports_its_memory(trained: Callable, device: str, precision: str) -> None:
    done = trained("--precision", precision, "--max_steps", "4")
    (memory,), mfu = done.record["memory"], done.record["mfu"]
    assert [share["device"] for share in done.record["world"]] == [memory["device"]]
    if device == "cpu":
        assert (memory["device"], memory["peak_allocated_gib"], mfu) == ("cpu", None, None)
        return
    assert memory["device"] == "cuda:0"
    assert 0 < memory["peak_allocated_gib"] <= memory["peak_reserved_gib"]
    assert (mfu is None) == (gpu_of_device(gpus()[1][0]) is None)
    assert "[RANK0:GPU0]" in done.output


@pytest.mark.usefixtures("gpu")
def test_fp16_trains_to_its_end_whatever_steps_overflow(trained: Callable) -> None:
    record = trained("--precision", "fp16-mixed", "--max_steps", "4").record
    assert record["skipped_steps"] <= record["steps"] == 4


@needs_two_gpus
def test_one_gpu_of_several_is_used_where_one_is_asked_for(trained: Callable) -> None:
    assert [entry["device"] for entry in trained("--max_steps", "2").record["memory"]] == ["cuda:0"]


@needs_two_gpus
def test_layers_on_two_gpus_compute_the_losses_of_one(trained: Callable) -> None:
    one = trained("--max_steps", "4", folder=FULL, name="one")
    two = trained("--max_steps", "4", "--devices", "2", "--stages", "0", folder=MP, name="two")
    assert losses_of(two) == pytest.approx(losses_of(one), rel=1e-4)
    assert all(entry["peak_allocated_gib"] > 0 for entry in two.record["memory"])


def check_losses_are_the_cpus(trained: Callable, device: str, folder: Path, *recipe: str) -> None:
    """In fp32 rows are padded on a GPU, and packed on a CPU: by themselves their orders differ."""
    same = (*recipe, "--train_sampling_strategy", "random")
    cpu, found = (
        losses_of(trained(*same, "--device", on, folder=folder, name=f"{number}-on-{on}"))
        for number, on in enumerate(("cpu", device))
    )
    assert found == pytest.approx(cpu, rel=1e-3)
    assert max(cpu) > 1.01 * min(cpu), "the losses stay, and would tell nothing"


def test_a_gpu_computes_the_losses_of_the_cpu(trained: Callable, device: str) -> None:
    recipe = ("--batch_size", "16", "--max_steps", "6", "--eval_steps", "0.16", "--train_rows", "819")
    check_losses_are_the_cpus(trained, device, LORA, *recipe, "--lora_dropout", "0")


@needs_4_bits
def test_a_gpu_computes_the_qlora_losses_of_the_cpu(trained: Callable, device: str) -> None:
    check_losses_are_the_cpus(trained, device, QLORA, "--lora_dropout", "0")


OTHER_TASKS = {
    "3.1": (CLASSIFICATION, ("--technique", "full", "--learning_rate", "3e-3")),
    "3.2": (SUMMARIZATION, ("--learning_rate", "1e-3", "--num_beams", "1")),
    "3.3 in full": (PICTURES, ("--technique", "full")),
    "3.3": (PICTURES, ("--technique", "lora")),
    "3.4 in full": (PREFERENCES, ("--technique", "full", "--learning_rate", "1e-3")),
    "3.4": (PREFERENCES, ("--technique", "lora", "--learning_rate", "1e-3")),
}


@pytest.mark.parametrize("task", OTHER_TASKS)
def test_a_gpu_computes_the_losses_of_the_cpu_in_other_tasks(
    trained: Callable, device: str, tmp_path: Path, task: str
) -> None:
    """Of 3.2's three loops Accelerate's, which needs no process group on one device."""
    folder, settings = OTHER_TASKS[task]
    if folder == SUMMARIZATION:
        folder = folder_with(SUMMARIZATION / "my_workflow_summarization_accelerate.py", tmp_path / "accelerate")
    steps = ("--batch_size", "8", "--max_steps", "4", "--eval_steps", "0.25", "--max_new_tokens", "1")
    check_losses_are_the_cpus(trained, device, folder, "--parallel", "single", "--devices", "1", *settings, *steps)


def test_a_real_shape_trains_with_random_weights(trained: Callable, shape: Callable, device: str) -> None:
    real = ("--precision", "bf16", "--weights", "random", "--model", shape("llama-3.2-1b"))
    (memory,) = trained(*real, "--max_steps", "2", "--batch_size", "4").record["memory"]
    assert device == "cpu" or memory["peak_allocated_gib"] > 2.3  # 1.24 billion weights of two bytes


@pytest.mark.parametrize("technique", ["full", "lora"])
def test_a_classifier_of_roberta_large_s_shape_trains(
    trained: Callable, shape: Callable, device: str, technique: str
) -> None:
    real = ("--model", shape("roberta-large"), "--weights", "random", "--precision", "bf16-mixed", "--max_steps", "4")
    record = trained(*real, "--technique", technique, "--parallel", "single", folder=CLASSIFICATION).record
    (memory,) = record["memory"]
    assert device == "cpu" or memory["peak_allocated_gib"] > 1.3  # 354 million weights of four bytes
    assert record["quality"]["after"]["rows"] == 9


@needs_4_bits
@pytest.mark.parametrize("quantization", ["nf4", "nf4-double"])
def test_qlora_trains_in_4_bits_and_merges(trained: Callable, device: str, quantization: str) -> None:
    optimizer = "paged_adamw_8bit" if device == "cuda" else "adamw_torch"
    settings = ("--precision", "bf16", "--quantization", quantization, "--optimizer", optimizer)
    record = trained(*settings, folder=QLORA).record
    assert record["quantization"]["stored_dtype"] == "uint8"
    assert record["best_validation_loss"] < record["validation_losses"][0][1]
    assert record["quality"]["after_original_base"] is not None


@pytest.mark.usefixtures("gpu")
def test_more_gpus_than_there_are_are_refused(run_workflow: Callable) -> None:
    count = torch.cuda.device_count()
    done = run_workflow("make run", "--device", "cuda", "--devices", str(count + 1), folder=DDP)
    assert done.exit_code == 2
    assert f"{count} can be seen: use `" in done.output


def check_ddp_on_both_gpus(record: Any) -> None:
    assert [share["device"] for share in record["world"]] == ["cuda:0", "cuda:1"]
    assert all(entry["peak_allocated_gib"] > 0 for entry in record["memory"])


@needs_4_bits
@needs_two_gpus
def test_qlora_with_ddp_has_a_whole_model_on_each_gpu(trained: Callable) -> None:
    settings = ("--parallel", "ddp", "--devices", "2", "--batch_size", "8")
    check_ddp_on_both_gpus(trained(*settings, launcher="torchrun", folder=QLORA).record)


@needs_two_gpus
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_ddp_uses_both_gpus(trained: Callable, launcher: str) -> None:
    settings = ("--model", "assets/embedded_base", "--precision", "fp32", "--max_steps", "4")
    check_ddp_on_both_gpus(trained(*settings, launcher=launcher, folder=DDP_ON_GPUS).record)


@needs_two_gpus
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_fsdp_divides_between_both_gpus(trained: Callable, launcher: str) -> None:
    """By the workflow's own `fully_shard`, and by Accelerate's file: the run fails where a weight stays whole."""
    done = trained("--model", "assets/embedded_base", "--max_steps", "4", launcher=launcher, folder=SHARDED)
    held, whole = done.record["held"]["per_rank"], done.record["held"]["whole"]
    assert [each["weights_bytes"] for each in held] == pytest.approx([whole["weights_bytes"] / 2] * 2, rel=0.05)


@needs_two_gpus
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_each_zero_stage_trains_on_both_gpus(trained: Callable, stage: str) -> None:
    pytest.importorskip("deepspeed")
    settings = ("--model", "assets/embedded_base", "--max_steps", "4", "--parallel", stage)
    assert trained(*settings, launcher="torchrun", folder=ZERO).record["held"] is not None


def planned_and_found_gib(point: Point) -> tuple[float, float]:
    """Peak allocated memory of a step, by the closed form and on the GPU."""
    found_gib = watched_steps(point.step.run, point.step.batch, "cuda").peak_gib
    architecture = read_architecture(point.model)
    closed = device_memory(architecture, job_of_run(point.step.run, point.step.batch), whole_model(architecture))
    return closed.allocated_gib, found_gib


@pytest.mark.usefixtures("gpu", "emptied_gpu")
@pytest.mark.parametrize("technique", ["lora", "full"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_gpu_takes_what_was_planned_and_what_the_dry_run_says(technique: str, checkpointing: str) -> None:
    """For a real shape; `python -m bench.lease --only point` has the whole grid."""
    point = Point(technique, "llama-3.2-1b", rows=2, length=1024, gradient_checkpointing=checkpointing)
    planned_gib, found_gib = planned_and_found_gib(point)
    assert planned_gib == pytest.approx(found_gib, rel=0.08)
    assert dry_run(point.step.run, point.step.batch).peak_gib == pytest.approx(found_gib, rel=0.08)


@pytest.mark.usefixtures("gpu", "emptied_gpu")
@needs_4_bits
@pytest.mark.parametrize("quantization", ["nf4", "nf4-double"])
def test_a_gpu_takes_what_was_planned_of_weights_in_4_bits(quantization: str) -> None:
    planned_gib, found_gib = planned_and_found_gib(
        Point("qlora", "llama-3.2-1b", 2, 1024, True, quantization=quantization)
    )
    assert planned_gib == pytest.approx(found_gib, rel=0.08)


def test_a_preflight_passes_on_a_gpu(
    device: str, first_device: str, shape: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = "2.1_lora_finetuning/run_0_cpu_x1"
    real = ("--precision", "bf16", "--model", shape("llama-3.2-1b"), "--independent_judge", "none")
    with pytest.raises(SystemExit) as ended:
        preflight.main([folder, "--device", device, *real])
    assert ended.value.code in (0, None)
    assert first_device in capsys.readouterr().out
