"""The same workflows on GPUs. They skip, visibly, where there are none or too few."""

import gc
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch

from bench.planner_points import Point, watched_steps
from common.base.paths import REPOSITORY
from common.checks import preflight
from common.checks.dry_run import dry_run
from common.hardware.devices import gpu_of_device, gpus
from common.models.separate_rows import attend_within_rows
from common.planning.architectures import read_architecture
from common.planning.memory_plan import device_memory
from common.planning.plans import job_of_run
from common.planning.shares import whole_model

GPU_COUNT = torch.cuda.device_count()
MP = REPOSITORY / "2.5_full_finetuning_with_mp" / "run_0_cpu_x1"
FULL = REPOSITORY / "2.4_full_finetuning" / "run_0_cpu_x1"
QLORA = REPOSITORY / "2.3_qlora_finetuning" / "run_0_cpu_x1"
CLASSIFICATION = REPOSITORY / "3.1_text_classification" / "run_0_cpu_x2"
SAME_ORDER = ("--train_sampling_strategy", "random")
needs_gpu = pytest.mark.skipif(GPU_COUNT < 1, reason="needs an NVIDIA GPU")
needs_two_gpus = pytest.mark.skipif(GPU_COUNT < 2, reason=f"needs two NVIDIA GPUs, {GPU_COUNT} found")


@pytest.fixture
def run_workflow(run_workflow: Callable) -> Callable:
    """Without the independent judge, a package of 90 MB: these tests ask what a GPU does, not how good answers are."""

    def run(launcher: str, *overrides: str, **options: object) -> object:
        return run_workflow(launcher, "--independent_judge", "none", *overrides, **options)

    return run


@pytest.fixture
def emptied_gpu() -> None:
    """Free what earlier tests of this process left in cycles: peaks are of all that is allocated."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lora_trains_on_one_gpu_and_reports_its_memory(run_workflow: Callable, precision: str) -> None:
    done = run_workflow("python", "--device", "cuda", "--precision", precision, "--max_steps", "4")
    assert done.exit_code == 0, done.output
    record = done.record
    assert record["world"][0]["device"] == "cuda:0"
    assert 0 < record["memory"][0]["peak_allocated_gib"] <= record["memory"][0]["peak_reserved_gib"]
    assert (record["mfu"] is None) == (gpu_of_device(gpus()[1][0]) is None)
    assert "[RANK0:GPU0]" in done.output


@needs_gpu
def test_fp16_trains_to_its_end_whatever_steps_overflow(run_workflow: Callable) -> None:
    done = run_workflow("python", "--device", "cuda", "--precision", "fp16-mixed", "--max_steps", "4")
    assert done.exit_code == 0, done.output
    assert done.record["skipped_steps"] <= done.record["steps"] == 4


@needs_two_gpus
def test_one_gpu_of_several_is_used_where_one_is_asked_for(run_workflow: Callable) -> None:
    done = run_workflow("python", "--device", "cuda", "--max_steps", "2")
    assert done.exit_code == 0, done.output
    assert [entry["device"] for entry in done.record["memory"]] == ["cuda:0"]


@needs_two_gpus
def test_layers_on_two_gpus_compute_the_losses_of_one(run_workflow: Callable) -> None:
    settings = ("--device", "cuda", "--max_steps", "4")
    one = run_workflow("python", *settings, folder=FULL, name="one")
    two = run_workflow("python", *settings, "--devices", "2", "--stages", "0", folder=MP, name="two")
    for done in (one, two):
        assert done.exit_code == 0, done.output
    losses = [[loss for _, loss in done.record["training_losses"]] for done in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert all(entry["peak_allocated_gib"] > 0 for entry in two.record["memory"])


@needs_gpu
def test_a_gpu_computes_the_losses_of_the_cpu(run_workflow: Callable) -> None:
    # in fp32 rows are padded on a GPU, and laid end to end on a CPU: by themselves their orders differ
    recipe = ("--batch_size", "16", "--lora_dropout", "0", "--max_steps", "6", "--eval_steps", "0.16", *SAME_ORDER)
    losses = {}
    for device in ("cpu", "cuda"):
        done = run_workflow("python", "--device", device, *recipe, "--train_rows", "819", name=device)
        assert done.exit_code == 0, done.output
        losses[device] = [loss for _, loss in done.record["training_losses"]]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-3)


@needs_gpu
def test_a_real_shape_trains_with_random_weights(run_workflow: Callable) -> None:
    settings = ("--device", "cuda", "--precision", "bf16", "--weights", "random", "--model", "llama-3.2-1b")
    done = run_workflow("python", *settings, "--max_steps", "2", "--batch_size", "4")
    assert done.exit_code == 0, done.output
    assert done.record["memory"][0]["peak_allocated_gib"] > 2.3  # 1.24 billion weights of two bytes


@needs_gpu
@pytest.mark.parametrize("technique", ["full", "lora"])
def test_a_classifier_of_roberta_large_s_shape_trains(run_workflow: Callable, technique: str) -> None:
    shape = ("--model", "roberta-large", "--weights", "random", "--device", "cuda", "--precision", "bf16-mixed")
    way = ("--technique", technique, "--parallel", "single")
    done = run_workflow("python", *shape, *way, "--max_steps", "4", folder=CLASSIFICATION)
    assert done.exit_code == 0, done.output
    assert done.record["memory"][0]["peak_allocated_gib"] > 1.3  # 354 million weights of four bytes
    assert done.record["quality"]["after"]["rows"] == 9


@needs_gpu
@pytest.mark.parametrize("quantization", ["nf4", "nf4-double"])
def test_qlora_trains_in_4_bits_and_merges(run_workflow: Callable, quantization: str) -> None:
    settings = ("--device", "cuda", "--precision", "bf16", "--quantization", quantization)
    done = run_workflow("python", *settings, "--optimizer", "paged_adamw_8bit", folder=QLORA)
    assert done.exit_code == 0, done.output
    record = done.record
    assert record["quantization"]["stored_dtype"] == "uint8"
    assert record["best_validation_loss"] < record["validation_losses"][0][1]
    assert record["quality"]["after_original_base"] is not None


@needs_gpu
def test_a_gpu_computes_the_qlora_losses_of_the_cpu(run_workflow: Callable) -> None:
    losses = {}
    for device in ("cpu", "cuda"):
        settings = ("--device", device, "--lora_dropout", "0", *SAME_ORDER)
        done = run_workflow("python", *settings, folder=QLORA, name=device)
        assert done.exit_code == 0, done.output
        losses[device] = [loss for _, loss in done.record["training_losses"]]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-3)


@needs_gpu
@pytest.mark.usefixtures("emptied_gpu")
@pytest.mark.parametrize("quantization", ["nf4", "nf4-double"])
def test_a_gpu_takes_what_was_planned_of_weights_in_4_bits(quantization: str) -> None:
    point = Point("qlora", "llama-3.2-1b", 2, 1024, True, quantization=quantization)
    found_gib = max(watched_steps(point.run, point.batch, "cuda").segments_gib.values())
    architecture = read_architecture(point.model)
    closed = device_memory(architecture, job_of_run(point.run, point.batch), whole_model(architecture))
    assert closed.allocated_gib == pytest.approx(found_gib, rel=0.08)


@needs_two_gpus
def test_qlora_with_ddp_has_a_whole_model_on_each_gpu(run_workflow: Callable) -> None:
    settings = ("--device", "cuda", "--parallel", "ddp", "--devices", "2", "--batch_size", "8")
    done = run_workflow("torchrun", *settings, folder=QLORA)
    assert done.exit_code == 0, done.output
    assert [share["device"] for share in done.record["world"]] == ["cuda:0", "cuda:1"]


@needs_gpu
def test_more_gpus_than_there_are_are_refused(run_workflow: Callable) -> None:
    settings = ("--device", "cuda", "--devices", str(GPU_COUNT + 1))
    done = run_workflow("make run", *settings, folder=REPOSITORY / "2.2_lora_finetuning_with_ddp" / "run_0_cpu_x2")
    assert done.exit_code == 2
    assert f"{GPU_COUNT} can be seen: use `" in done.output


@needs_two_gpus
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_ddp_uses_both_gpus(run_workflow: Callable, launcher: str) -> None:
    settings = ("--model", "assets/embedded_base", "--precision", "fp32", "--max_steps", "4")
    done = run_workflow(launcher, *settings, folder=REPOSITORY / "2.2_lora_finetuning_with_ddp" / "run_1_a6000_48g_x2")
    assert done.exit_code == 0, done.output
    assert [share["device"] for share in done.record["world"]] == ["cuda:0", "cuda:1"]
    assert all(entry["peak_allocated_gib"] > 0 for entry in done.record["memory"])


@needs_two_gpus
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_fsdp_divides_between_both_gpus(run_workflow: Callable, launcher: str) -> None:
    """By the workflow's own `fully_shard`, and by Accelerate's file: the run fails where a weight stays whole."""
    settings = ("--model", "assets/embedded_base", "--max_steps", "4")
    done = run_workflow(launcher, *settings, folder=REPOSITORY / "2.6_full_finetuning_with_fsdp" / "run_1_a100_80g_x2")
    assert done.exit_code == 0, done.output
    held, whole = done.record["held"]["per_rank"], done.record["held"]["whole"]
    assert [each["weights_bytes"] for each in held] == pytest.approx([whole["weights_bytes"] / 2] * 2, rel=0.05)


@needs_two_gpus
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_each_zero_stage_trains_on_both_gpus(run_workflow: Callable, stage: str) -> None:
    pytest.importorskip("deepspeed")
    settings = ("--model", "assets/embedded_base", "--max_steps", "4", "--parallel", stage)
    folder = REPOSITORY / "2.6_full_finetuning_with_fsdp" / "run_3_a100_80g_x2_zero"
    done = run_workflow("torchrun", *settings, folder=folder)
    assert done.exit_code == 0, done.output
    assert done.record["held"] is not None


@needs_gpu
@pytest.mark.parametrize("lengths", [(512, 512, 512), (100, 800, 300)])
def test_the_kernel_attends_as_row_by_row(lengths: tuple[int, ...]) -> None:
    """Outputs and gradients in bf16, of heads that share keys."""
    borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    given = [
        torch.randn(1, heads, sum(lengths), 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    ]
    settings = {"cu_seq_lens_q": borders, "max_length_q": max(lengths)}
    found, _ = attend_within_rows(None, *given, None, **settings)
    expected, _ = attend_within_rows(None, *(each.float() for each in given), None, **settings)
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)
    ours, exact = (torch.autograd.grad(each.square().sum(), given) for each in (found, expected))
    for gradient, other in zip(ours, exact, strict=True):
        assert (gradient - other).norm() < 0.02 * other.norm()


@needs_gpu
@pytest.mark.usefixtures("emptied_gpu")
@pytest.mark.parametrize("technique", ["lora", "full"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_gpu_takes_what_was_planned_and_what_the_dry_run_says(technique: str, checkpointing: str) -> None:
    """Peak allocated memory of a real shape; `python -m bench.planner_points` has the whole grid."""
    point = Point(technique, "llama-3.2-1b", rows=2, length=1024, gradient_checkpointing=checkpointing)
    found_gib = max(watched_steps(point.run, point.batch, "cuda").segments_gib.values())
    architecture = read_architecture(point.model)
    closed = device_memory(architecture, job_of_run(point.run, point.batch), whole_model(architecture))
    assert closed.allocated_gib == pytest.approx(found_gib, rel=0.08)
    assert dry_run(point.run, point.batch).peak_gib == pytest.approx(found_gib, rel=0.08)


@needs_gpu
def test_a_preflight_passes_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    folder = "2.1_lora_finetuning/run_0_cpu_x1"
    shape = ("--precision", "bf16", "--model", "llama-3.2-1b", "--independent_judge", "none")
    with pytest.raises(SystemExit) as ended:
        preflight.main([folder, "--device", "cuda", *shape])
    assert ended.value.code in (0, None)
    assert "cuda:0" in capsys.readouterr().out
