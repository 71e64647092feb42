"""A DPO step in closed form: its memory as the dry run has it, and its operations as PyTorch counts them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.base.run_config import RunConfig
from common.checks.dry_run import dry_run, with_depth
from common.checks.fake_steps import batch_inputs, build_model, fake_step, tracked_step
from common.models.loading import any_shape_config
from common.planning.architectures import read_architecture
from common.planning.job import BatchShape, job_of_run
from common.planning.memory_plan import device_memory
from common.planning.pair_terms import BACKWARD_BESIDE, TILE_POSITIONS
from common.planning.plans import plan_run
from common.planning.shares import whole_model
from common.planning.step_speed import step_flops
from common.records.store import PLAN_TOLERANCE
from common.runtime.memory_tracker import Timeline
from common.runtime.world import Rank
from common.training.part import Part

EMBEDDED, SMALL = "assets/embedded_labeller", "llama-27m"
DDP = {"parallel": "ddp", "devices": 4}
CHECKPOINTED = {"gradient_checkpointing": True}


def pairs(rows: int, length: int, labelled: int) -> BatchShape:
    return BatchShape(rows, length, labelled, padded=True, task="preferences")


def preferring(model: str, technique: str, on_gpu: bool, **settings: object) -> RunConfig:
    targets = "all" if technique == "full" else "all-linear"
    device = {"device": "cuda", "gpu": "A100 80GB SXM"} if on_gpu else {}
    run = {"task": "preferences", "technique": technique, "model": model, "weights": "random", **device}
    return RunConfig(**{**run, "target_modules": targets, **settings})


GRID = [  # technique, model, pairs, on a GPU, settings
    ("full", EMBEDDED, pairs(4, 96, 40), False, {"precision": "bf16-mixed"}),
    ("lora", EMBEDDED, pairs(4, 96, 40), True, {"precision": "bf16", **CHECKPOINTED}),
    ("lora", SMALL, pairs(16, 256, 150), True, {"precision": "bf16-mixed"}),
]
GRID_TOO = [
    ("full", EMBEDDED, pairs(16, 256, 100), False, {"precision": "bf16"}),
    ("lora", "llama-3.2-1b", pairs(4, 512, 200), True, {"precision": "bf16"}),
    ("full", "llama-3.2-1b", pairs(16, 512, 300), True, {"precision": "bf16-mixed", **CHECKPOINTED, **DDP}),
    *(
        (technique, EMBEDDED, pairs(4, 96, 40), on_gpu, {"precision": precision, "gradient_checkpointing": again})
        for technique in ("lora", "full")
        for on_gpu in (False, True)
        for precision in ("fp32", "bf16", "bf16-mixed")
        for again in (False, True)
    ),
    ("lora", "llama-3.2-1b", pairs(4, 512, 200), True, {"precision": "bf16", **CHECKPOINTED}),
    ("lora", "llama-3.2-1b", pairs(8, 1024, 400), True, {"precision": "bf16-mixed"}),
    ("lora", "llama-3.2-1b", pairs(8, 1024, 16), True, {"precision": "bf16-mixed", **CHECKPOINTED, **DDP}),
    ("full", "llama-3.2-1b", pairs(4, 512, 200), True, {"precision": "bf16", **CHECKPOINTED}),
    ("full", "llama-3.2-1b", pairs(1, 64, 16), False, {"precision": "fp32", **DDP}),
    ("full", "llama-3.2-1b", pairs(2, 1024, 16), False, {"precision": "bf16"}),
    ("lora", "llama-3.2-3b", pairs(2, 2048, 1024), True, {"precision": "bf16", **CHECKPOINTED}),
    ("full", "llama-3.2-3b", pairs(2, 2048, 1024), True, {"precision": "bf16"}),
    ("lora", "qwen2.5-7b", pairs(1, 256, 100), False, {"precision": "bf16-mixed", **CHECKPOINTED}),
    ("full", "qwen2.5-7b", pairs(4, 1024, 700), True, {"precision": "bf16-mixed", **CHECKPOINTED, **DDP}),
    ("lora", "llama-3.1-8b", pairs(8, 512, 300), True, {"precision": "bf16"}),
    ("full", "llama-3.1-8b", pairs(1, 512, 300), True, {"precision": "bf16", "target_modules": "all-linear"}),
    ("full", SMALL, pairs(1, 512, 100), False, {"precision": "bf16"}),
    ("full", SMALL, pairs(16, 256, 150), False, {"precision": "fp32", **DDP}),
    ("lora", SMALL, pairs(16, 256, 150), False, {"precision": "bf16-mixed", **DDP}),
    ("lora", SMALL, pairs(16, 256, 150), True, {"precision": "fp32", **CHECKPOINTED}),
]  # fmt: skip
"""In `make test-all`."""


def error(technique: str, model: str, batch: BatchShape, on_gpu: bool, settings: dict) -> float:
    run, architecture = preferring(model, technique, on_gpu, **settings), read_architecture(model)
    closed = device_memory(architecture, job_of_run(run, batch), whole_model(architecture))
    return closed.allocated_gib / dry_run(run, batch, as_on_gpu=run.device != "cpu").peak_gib - 1


@pytest.mark.parametrize(("technique", "model", "batch", "on_gpu", "settings"), GRID)
def test_the_closed_form_says_the_same(
    technique: str, model: str, batch: BatchShape, on_gpu: bool, settings: dict
) -> None:
    assert error(technique, model, batch, on_gpu, settings) == pytest.approx(0, abs=0.05)


@pytest.mark.slow
def test_on_average_the_closed_form_is_near() -> None:
    """Within 2 % of the dry run, and never off by more than 5 %."""
    errors = {(*point[:2], str(point[2]), point[3], str(point[4])): error(*point) for point in [*GRID, *GRID_TOO]}
    for point, off in errors.items():
        print(f"{off:+.2%} {point}")
    assert {point: off for point, off in errors.items() if abs(off) > 0.05} == {}
    assert sum(map(abs, errors.values())) / len(errors) < 0.02
    assert {point[2].sequences * point[2].labelled > TILE_POSITIONS for point in GRID_TOO} == {True, False}


def step(run: RunConfig, batch: BatchShape, on_gpu: bool) -> Timeline:
    return fake_step(run, with_depth(any_shape_config(run.model), 1), batch, on_gpu)


@pytest.mark.parametrize("technique", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_fake_pairs_take_what_real_ones_take(technique: str) -> None:
    run, batch = preferring(EMBEDDED, technique, on_gpu=False, precision="bf16-mixed"), pairs(2, 64, 20)
    fake = step(run, batch, on_gpu=False)
    model = build_model(run, with_depth(any_shape_config(run.model), 1))
    real = tracked_step(run, model, batch_inputs(batch, model), as_on_gpu=False)
    assert real.keys() == fake.keys()
    for segment in real:
        assert sum(real[segment].values()) == pytest.approx(sum(fake[segment].values()), rel=0.01), segment


def test_a_gpu_s_head_reads_answers_alone() -> None:
    """Its tile is as long as the answers of all sequences; on a CPU all positions are read, and worked on beside it."""
    run, batch = preferring(EMBEDDED, "full", on_gpu=True, precision="fp32"), pairs(4, 96, 40)
    of_gpu, of_cpu = (max(parts["logits"] for parts in step(run, batch, on_gpu).values()) for on_gpu in (True, False))
    vocab = read_architecture(EMBEDDED).vocab
    assert of_gpu == pytest.approx(8 * 40 * vocab * 4, rel=0.01)
    assert of_cpu == pytest.approx(8 * 95 * vocab * (4 + BACKWARD_BESIDE), rel=0.01)


def test_trl_switches_dropout_off() -> None:
    batch = pairs(2, 64, 20)
    runs = [preferring(EMBEDDED, "lora", on_gpu=False, lora_dropout=share, precision="fp32") for share in (0.1, 0.0)]
    with_dropout, without = ((job_of_run(run, batch), step(run, batch, on_gpu=False)) for run in runs)
    assert with_dropout == without


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("technique", ["lora", "full"])
def test_a_step_s_operations_are_those_that_pytorch_counts(technique: str, checkpointing: bool) -> None:
    """Without attention's, which PyTorch does not count on a CPU, where all positions go through the head.

    Of a checkpointed layer that is computed again PyTorch leaves out the last matrix, whose result nothing needs.
    """
    run = preferring(EMBEDDED, technique, on_gpu=False, precision="fp32", gradient_checkpointing=checkpointing)
    batch, architecture = pairs(2, 64, 20), read_architecture(EMBEDDED)
    model = build_model(run, any_shape_config(EMBEDDED))
    part = Part(model, run, Rank(0, 1, "cpu", "python"))
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}  # PyTorch has no formula for it
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        part.loss(batch_inputs(batch, model), batch.rows).backward()
    planned = step_flops(architecture, job_of_run(run, batch), whole_model(architecture))
    counted, tolerance = counter.get_total_flops(), 0.06 if checkpointing else 0.03
    assert planned.total - planned.attention == pytest.approx(counted, rel=tolerance)


def test_evaluations_are_planned_with_the_given_answers() -> None:
    """Counted in a run of 3.4's folder: 0.104 GiB, where answers alone would take 0.039."""
    batch = pairs(16, 57, 18)
    run = preferring(EMBEDDED, "lora", on_gpu=False, precision="fp32", per_device_eval_batch_size=60)
    planned = {phase.name: phase.memory.allocated_gib for phase in plan_run(run, batch).phases[0]}
    assert planned["baseline evaluation"] == pytest.approx(0.104, rel=0.1)
    assert planned["validation"] == pytest.approx(0.1114, rel=0.1)
    assert planned["training"] == pytest.approx(0.164, rel=0.02)


def test_a_process_that_keeps_freed_tiles_is_planned_within_what_warns() -> None:
    """Three runs of 3.4's folder on a CPU peaked at 0.89, 0.90 and 0.94 GiB."""
    run = preferring(EMBEDDED, "lora", on_gpu=False, precision="fp32", lora_dropout=0.0)
    planned = plan_run(run, pairs(16, 57, 18)).devices[0].peak_gib
    assert all(abs(peak / planned - 1) < PLAN_TOLERANCE for peak in (0.89, 0.90, 0.94))
