"""A run that its disk has no room for is refused before anything is loaded."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.checks import inputs
from common.checks.inputs import check_disk, check_inputs, check_room_to_save, disk_need
from common.hardware.devices import GIB
from common.models.loading import EMBEDDED_BASE


@pytest.fixture
def full(run_config: RunConfig, tmp_path: Path) -> RunConfig:
    return replace(run_config, technique="full", target_modules="all", results_root=str(tmp_path))


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(inputs.shutil, "disk_usage", lambda _: SimpleNamespace(total=free, used=0, free=free))


@pytest.mark.parametrize("technique", ["full", "lora"])
def test_target_modules_that_are_not_there_are_refused_before_anything_is_loaded(
    run_config: RunConfig, technique: str
) -> None:
    with pytest.raises(BadInputError, match="nonsense"):
        check_inputs(run_config.changed_to(technique=technique, target_modules="nonsense", run_folder=""))


def test_a_checkpoint_has_the_weights_and_both_of_adams_states(full: RunConfig) -> None:
    need, bf16 = disk_need(full), disk_need(replace(full, precision="bf16"))
    saved_bytes = sum(path.stat().st_size for path in EMBEDDED_BASE.glob("*.safetensors"))
    assert need.models_bytes == pytest.approx(saved_bytes, rel=0.01)
    assert need.checkpoint.weights_bytes == need.models_bytes
    assert need.checkpoint.state_bytes == pytest.approx(3 * need.models_bytes)
    assert disk_need(replace(full, optim="sgd")).checkpoint.state_bytes == need.models_bytes
    assert bf16.total_bytes == need.total_bytes / 2
    assert disk_need(replace(full, precision="bf16", parallel="zero2", devices=2)).checkpoint.state_bytes == (
        bf16.models_bytes + 6 * bf16.models_bytes  # DeepSpeed keeps three numbers in fp32 for each weight
    )


CHECKPOINTS = [  # save_steps, max_steps, full states
    (0.2, -1, 3), (0.5, -1, 2), (0.9, -1, 2), (10, -1, 3), (10, 20, 2), (10, 9, 1),
]  # fmt: skip


def test_how_many_checkpoints_there_are_at_the_same_time_follows_the_settings(full: RunConfig) -> None:
    need = disk_need(full)
    assert (need.full_states, need.best_weights) == (3, 2)  # two full states, and the one that is being written
    assert need.total_bytes == 3 * need.checkpoint.state_bytes + 3 * need.models_bytes
    for save_steps, max_steps, states in CHECKPOINTS:
        settings = {"save_steps": save_steps, "max_steps": max_steps}
        assert disk_need(replace(full, **settings)).full_states == states, settings
    assert disk_need(replace(full, eval_steps=5, max_steps=5)).best_weights == 1


def test_adapters_need_room_for_checkpoints_of_their_own_and_for_merged_models(full: RunConfig) -> None:
    whole = disk_need(full).models_bytes
    adapters = replace(full, technique="lora", target_modules="all-linear")
    need, in_4_bits = disk_need(adapters), disk_need(replace(adapters, technique="qlora"))
    adapter_bytes = need.checkpoint.state_bytes / 3  # and both of Adam's states
    assert 0 < adapter_bytes < whole / 10
    assert need.models_bytes == whole + adapter_bytes
    assert in_4_bits.models_bytes == 2 * whole + adapter_bytes


@pytest.fixture
def of_7b(full: RunConfig) -> RunConfig:
    return replace(full, model="qwen2.5-7b", precision="bf16")


def test_the_shape_of_a_7b_model_is_counted_without_loading_it(of_7b: RunConfig) -> None:
    need = disk_need(of_7b)
    assert need.models_bytes / GIB == pytest.approx(14.2, abs=0.1)
    assert need.total_bytes / GIB == pytest.approx(12 * 14.2, rel=0.01)


def test_too_little_room_is_refused_with_both_sizes(of_7b: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 100 * GIB)
    with pytest.raises(BadInputError, match=r"up to 170\.\d GiB .*but 100\.0 GiB are free in .*--results_root"):
        check_disk(of_7b)
    with_free(monkeypatch, 200 * GIB)
    check_disk(of_7b)


def test_a_preflight_that_cannot_save_its_model_is_refused(of_7b: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 10 * GIB)
    with pytest.raises(BadInputError, match=r"14\.2 GiB, but 10\.0 GiB are free .* TMPDIR"):
        check_room_to_save(of_7b)
    check_room_to_save(replace(of_7b, technique="lora", target_modules="all-linear"))


@pytest.mark.parametrize("technique", ["full", "lora"])
def test_counting_draws_no_random_numbers(full: RunConfig, technique: str) -> None:
    """Adapters start from those that the run's seed gives."""
    before = torch.get_rng_state()
    disk_need(replace(full, technique=technique, target_modules="all-linear"))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_that_goes_on_counts_not_what_it_wrote_before(full: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own checkpoints take the room; each is looked at when it is written."""
    run = replace(full, run_folder="2.4_full_finetuning/run_0_cpu_x1")
    with_free(monkeypatch, 0)
    with pytest.raises(BadInputError, match="This run would write"):
        check_inputs(run)
    check_inputs(replace(run, resume_from_checkpoint="last"))
