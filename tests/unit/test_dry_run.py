"""The dry run counts what a real step allocates, whatever the depth, and the closed form says the same."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from common import dry_run as dry_run_room
from common.architectures import read_architecture
from common.dry_run import (
    batch_inputs,
    build_model,
    dry_run,
    fake_step,
    take_step,
    tracked_steps,
)
from common.memory_plan import PARTS, BatchShape, device_memory, whole_model
from common.models import any_shape_config
from common.planner import job_of_run
from common.run_config import REPOSITORY, BadInputError, RunConfig

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}
BATCH = BatchShape(rows=4, length=64, labelled=40)
NO_ROUNDING = 1


@pytest.fixture
def shape(tmp_path: Path) -> Callable[..., str]:
    def write(**changes: object) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**SHAPE, **changes}))
        return str(path)

    return write


def total(parts: dict[str, float]) -> float:
    return sum(parts.values())


@pytest.mark.parametrize("technique", ["lora", "full"])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_fake_tensors_take_what_real_ones_take(
    technique: str, checkpointing: str, shape: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tracker sees the same in a real step as in a fake one, and PyTorch's own profiler the same peak."""
    run = RunConfig(technique=technique, model=shape(), weights="random", gradient_checkpointing=checkpointing)
    config = any_shape_config(run.model)
    fake = fake_step(run, config, BATCH, as_on_gpu=False)

    profiled: list[float] = []

    def profiled_step(*args: object) -> None:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            take_step(*args)
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        alive, highest = 0, 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            alive += event.nbytes()
            highest = max(highest, alive)
        profiled.append(highest)

    monkeypatch.setattr(dry_run_room, "take_step", profiled_step)
    model = build_model(run, config)
    real = tracked_steps(run, model, batch_inputs(BATCH, model), as_on_gpu=False)
    assert real.keys() == fake.keys()
    for segment in real:
        assert total(real[segment]) == pytest.approx(total(fake[segment]), rel=0.01), segment
    counted = max(map(total, real.values())) - total(real["load"])
    assert profiled[-1] == pytest.approx(counted, rel=0.05)  # the tracker rounds each block up to 512 bytes


@pytest.mark.parametrize("technique", ["lora", "full"])
def test_two_small_depths_tell_a_larger_one(technique: str, shape: Callable[..., str]) -> None:
    run = RunConfig(technique=technique, model=shape(), weights="random", precision="bf16")
    whole = fake_step(run, any_shape_config(run.model), BATCH, as_on_gpu=True)
    told = dry_run(run, BATCH)
    for segment, parts in told.timeline.items():
        for part in PARTS:
            assert parts[part] == pytest.approx(whole[segment][part], rel=0.002, abs=2_000), (segment, part)
    assert told.peak_segment == max(whole, key=lambda segment: total(whole[segment]))


def test_the_extrapolation_depends_on_the_layers(shape: Callable[..., str]) -> None:
    run = RunConfig(technique="full", model=shape(), weights="random")
    six = dry_run(run, BATCH).peak_gib
    twelve = dry_run(RunConfig(technique="full", model=shape(num_hidden_layers=12), weights="random"), BATCH).peak_gib
    assert 1.6 < twelve / six < 2


GRID = [
    (model, technique, targets, precision, checkpointing, batch)
    for model in ("llama-3.1-8b", "roberta-large", "bart-large-cnn")
    for technique, targets in (("lora", "all-linear"), ("full", "all"), ("full", "all-linear"))
    for precision, checkpointing, batch in (
        ("bf16", "none", BatchShape(2, 512, 511)),
        ("bf16-mixed", "non-reentrant", BatchShape(4, 256, 100, padded=True)),
    )
]
GRID += [
    ("llama-3.1-8b", "full", "q_proj,v_proj", "bf16", "none", BatchShape(2, 512, 511)),
    ("llama-3.1-8b", "full", "gate_proj,up_proj,down_proj", "bf16-mixed", "none", BatchShape(2, 512, 511)),
]


@pytest.mark.parametrize(("model", "technique", "targets", "precision", "checkpointing", "batch"), GRID)
def test_the_closed_form_says_the_same(
    model: str, technique: str, targets: str, precision: str, checkpointing: str, batch: BatchShape
) -> None:
    """At most 5 % apart, part by part at most 3 % of the whole; `make bench` has the whole grid."""
    run = RunConfig(
        technique=technique,
        target_modules=targets,
        model=model,
        precision=precision,
        gradient_checkpointing=checkpointing,
        weights="random",
    )
    architecture = read_architecture(model)
    closed = device_memory(architecture, job_of_run(run, batch), whole_model(architecture))
    assert closed.allocated_gib == pytest.approx(dry_run(run, batch).peak_gib, rel=0.05)


def test_ddp_keeps_every_gradient_twice() -> None:
    alone = RunConfig(technique="full", target_modules="all", model="llama-3.2-1b", precision="bf16", weights="random")
    shared = replace(alone, parallel="ddp", devices=4)
    batch = BatchShape(2, 256, 255)
    one, many = dry_run(alone, batch), dry_run(shared, batch)
    weights = one.timeline["load"]["weights"]
    assert many.timeline["load"]["buffers"] == pytest.approx(weights, rel=0.01)
    architecture = read_architecture("llama-3.2-1b")
    closed = device_memory(architecture, job_of_run(shared, batch), whole_model(architecture))
    assert closed.allocated_gib == pytest.approx(many.peak_gib, rel=0.05)


def test_a_divided_model_is_refused_but_not_stages_that_one_device_holds(shape: Callable[..., str]) -> None:
    run = RunConfig(model=shape(), weights="random")
    marked = replace(run, parallel="mp", stages=2)
    assert dry_run(marked, BATCH).peak_gib == dry_run(run, BATCH).peak_gib
    for divided in (
        replace(run, parallel="pp", devices=2, micro_batches=2),
        replace(run, parallel="mp", devices=2, device="cuda", gpu="RTX A6000 48GB"),
    ):
        with pytest.raises(BadInputError, match=f"parallel is {divided.parallel}, but the dry run knows no divided"):
            dry_run(divided, BATCH)


def test_dropout_and_attention_are_as_on_a_gpu(shape: Callable[..., str]) -> None:
    """A CPU keeps a mask as wide as its input, a GPU one byte per element."""
    run = RunConfig(technique="lora", model=shape(), weights="random", lora_dropout=0.1)
    config = any_shape_config(run.model)
    gpu, cpu = (fake_step(run, config, BATCH, as_on_gpu=on_gpu) for on_gpu in (True, False))
    segment = "backward: head and loss"
    assert gpu[segment]["activations"] < 0.95 * cpu[segment]["activations"]


def test_a_run_folder_s_dry_run() -> None:
    command = [sys.executable, "-m", "common.dry_run", "2.1_lora_finetuning/run_0_cpu_x1", "--batch_size", "8"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "8 rows of 39 tokens" in done.stdout
    assert "peak of allocated memory: 0.0" in done.stdout
    assert "on CPU, 1 thread: fits" in done.stdout


def test_what_is_no_run_folder_ends_in_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "common.dry_run", "nowhere"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: nowhere is no run folder, as it has 0 files my_workflow_*.py")
    assert "Traceback" not in done.stderr


def test_stacks_of_unequal_depth_are_refused(shape: Callable[..., str]) -> None:
    bart = json.loads((REPOSITORY / "assets/model_configs/bart-large-cnn.json").read_text())
    path = shape(**{**bart, "encoder_layers": 6, "num_hidden_layers": 6})
    with pytest.raises(BadInputError, match=r"\[6, 12\] layers"):
        dry_run(RunConfig(technique="full", model=path, weights="random"), BATCH)


def test_the_tracker_forgets_what_is_freed() -> None:
    tracker = dry_run_room.MemoryTracker(vocab_size=7, rounded_to=NO_ROUNDING)
    with tracker:
        kept = torch.ones(10)
        torch.ones(1000).sum()
    assert tracker.live["activations"] == kept.untyped_storage().nbytes()
    assert max(map(total, tracker.timeline.values())) >= 4000
