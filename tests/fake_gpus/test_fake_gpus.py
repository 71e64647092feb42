"""Workflows on several devices, without a GPU: tensors are where they belong, or an operation on them is an error."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from common.base.paths import REPOSITORY
from common.hardware.devices import GIB
from common.planning.phases import PHASES
from tests.fake_gpus.run import WAITS
from tests.fixtures import Trained
from tests.forked import run_forked
from tests.recipes.deep import save_deep_decoder
from tests.recipes.folders import DDP, FULL, LORA, MP, PP

FOLDERS = {"LoRA": LORA, "DDP": DDP, "full": FULL, "MP": MP, "PP": PP}
SMALL = (
    "--train_rows", "65", "--validation_rows", "9", "--test_rows", "9", "--max_new_tokens", "8", "--max_steps", "2",
    "--eval_steps", "0.5", "--attention", "eager", "--independent_judge", "none", "--report_to", "none",
    "--learning_rate", "1e-3", "--per_device_eval_batch_size", "9",
)  # fmt: skip
"""PyTorch's fused attention does not know the fake GPUs."""
ON_GPUS = (*SMALL, "--device", "cuda")
OF_ADAPTERS = ("--lora_dropout", "0")
OF_32_ROWS = ("--batch_size", "32", "--eval_steps", "2")
OWN = {
    "LoRA": OF_ADAPTERS,
    "DDP": OF_ADAPTERS,
    "PP": (*OF_32_ROWS, "--pad_to_multiple_of", "128"),
    "full": (),
    "MP": (),
}
"""Settings of a folder's technique. A pipeline's stages agree on each new shape of a batch, and wait for it: both of
its steps have one, and no validation is between them."""
ONE_ROW = ("--test_rows", "2", "--validation_rows", "2", "--per_device_eval_batch_size", "1", "--max_new_tokens", "1",
           "--batch_size", "2", "--micro_batches", "2")  # fmt: skip
"""At a time, of each micro-batch, too."""
ALONE = ("loading", "baseline evaluation", "final evaluation")
"""Phases in which a model is alone, without gradients and optimizer states."""
MOST_OF_WHOLE = 0.8
"""Of the whole model's weights: what a device may have then, with what its rows take."""
STARTER = "tests.fake_gpus.run"
DEVICES = {"MP, two": 2, "MP, four": 4}
Runs = dict[str, Trained]


@pytest.fixture(scope="module")
def on_cpu(run_several: Callable[..., Runs], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = {name: (FOLDERS[name], (*SMALL, *OWN[name])) for name in ("LoRA", "full")}
    runs["full, 32 rows"] = (FOLDERS["full"], (*SMALL, *OF_32_ROWS))  # as the pipeline has
    return run_several(tmp_path_factory.mktemp("cpu"), runs, 1)


@pytest.fixture(scope="module")
def one_process(run_several: Callable[..., Runs], tmp_path_factory: pytest.TempPathFactory, fake_gpus: None) -> Runs:
    """On a machine with four GPUs."""
    runs = {name: (FOLDERS[name], (*ON_GPUS, *OWN[name])) for name in ("LoRA", "full")}
    runs |= {
        name: (FOLDERS["MP"], (*ON_GPUS, "--devices", str(count), "--stages", "0")) for name, count in DEVICES.items()
    }
    return run_several(tmp_path_factory.mktemp("one"), runs, 1, STARTER)


@pytest.fixture(scope="module")
def two_ranks(run_several: Callable[..., Runs], tmp_path_factory: pytest.TempPathFactory, fake_gpus: None) -> Runs:
    """On the same machine."""
    runs = {name: (FOLDERS[name], (*ON_GPUS, *OWN[name], "--learning_rate_scaling", "none")) for name in ("DDP", "PP")}
    return run_several(tmp_path_factory.mktemp("two"), runs, 2, STARTER)


@pytest.mark.usefixtures("fake_gpus")
def test_the_machine_computes_counts_bytes_and_catches_a_tensor_on_the_wrong_device(tmp_path: Path) -> None:
    """The control: what the other tests would see of a mistake. Bytes are counted until the last view is gone."""
    command = [sys.executable, "-m", "tests.fake_gpus.probe"]
    code = run_forked(command, REPOSITORY, os.environ, tmp_path / "log", timeout=60)
    said = (tmp_path / "log").read_text()
    assert code == 0, said
    answers = json.loads(said.splitlines()[-1])
    for mistake in ("two devices", "device and CPU", "weight on the wrong device"):
        assert "Expected all tensors to be on the same device" in answers.pop(mistake)
    assert answers == {
        "devices": 4,
        "gradients on": ["fgpu:0", "fgpu:1"],
        "moved back": [[3.0, 3.0]] * 2,
        "bytes": [2**20, 2**20, 0],
        "peak": 2**20,
    }


def check_equal_losses(run: Trained, expected: Trained) -> None:
    for kind in ("training_losses", "validation_losses"):
        assert run.losses(kind) == pytest.approx(expected.losses(kind), rel=1e-6)


@pytest.mark.parametrize("technique", ["LoRA", "full"])
def test_one_device_of_four_trains_as_the_cpu(one_process: Runs, on_cpu: Runs, technique: str) -> None:
    """On a machine with several GPUs the Trainer would take them all."""
    run = one_process[technique]
    assert run.record["world"][0]["device"] == "fgpu:0"
    assert [entry["device"] for entry in run.record["memory"]] == ["fgpu:0"]
    check_equal_losses(run, on_cpu[technique])


@pytest.mark.parametrize("name", DEVICES)
def test_layers_on_several_devices_train_as_on_one(one_process: Runs, on_cpu: Runs, name: str) -> None:
    """Load, hooks, passes, optimizer, validation, answers, save and reload."""
    run = one_process[name]
    check_equal_losses(run, on_cpu["full"])
    assert run.record["stages_seen"]["stages"] == DEVICES[name]
    assert run.record["largest_logit_differences"]["model"] < 1e-5
    assert [entry["device"] for entry in run.record["memory"]] == [f"fgpu:{at}" for at in range(DEVICES[name])]


@pytest.mark.parametrize("name", ["LoRA", "full", *DEVICES])
def test_each_device_takes_what_was_planned(one_process: Runs, name: str) -> None:
    """Of the tensors alone. Two steps need not have the largest batch; and as trained weights of a run before stay
    where they are on fake GPUs, only the process's first run is compared in all phases."""
    phases = PHASES if name == "LoRA" else ("validation", "saving")
    for entry in one_process[name].record["memory"]:
        assert 0.7 < entry["peak_training_gib"] / entry["planned_gib"] < 1.1
        measured, planned = entry["peak_gib_by_phase"], entry["planned_gib_by_phase"]
        shares = {phase: measured[phase] / planned[phase] for phase in phases}
        assert {phase: share for phase, share in shares.items() if not 0.9 < share < 1.1} == {}


@pytest.mark.parametrize(("name", "expected"), [("DDP", "LoRA"), ("PP", "full, 32 rows")])
def test_ranks_train_on_their_own_devices(two_ranks: Runs, on_cpu: Runs, name: str, expected: str) -> None:
    run = two_ranks[name]
    assert [share["device"] for share in run.record["world"]] == ["fgpu:0", "fgpu:1"]
    assert [entry["device"] for entry in run.record["memory"]] == ["fgpu:0", "fgpu:1"]
    assert all(entry["peak_training_gib"] > 0 for entry in run.record["memory"])
    check_equal_losses(run, on_cpu[expected])


@pytest.mark.parametrize(
    ("name", "rank"), [("LoRA", 0), ("full", 0), ("MP, two", 0), ("DDP", 0), ("DDP", 1), ("PP", 0), ("PP", 1)]
)
def test_a_step_waits_for_its_gpu_once(one_process: Runs, two_ranks: Runs, name: str, rank: int) -> None:
    """To learn whether the gradients are finite; in the first step libraries make what they need once."""
    results = {**one_process, **two_ranks}[name].results
    waits = json.loads((results / WAITS.format(rank)).read_text())["2"]
    if name == "DDP":  # its buckets are the host's here, and gradients are copied into them
        waits = [wait for wait in waits if wait != "aten.copy_.default"]
    assert waits == ["aten._local_scalar_dense.default"]


@pytest.mark.parametrize("technique", ["full", "lora"])
def test_no_device_holds_a_whole_model_that_is_divided(
    run_several: Callable[..., Runs], tmp_path: Path, fake_gpus: None, technique: str
) -> None:
    """Where a model is alone less than most of it; in training, with gradients and optimizer states, what is planned.

    Merging is left out: fake GPUs free what PEFT has merged, and what was trained, later than real ones.
    """
    save_deep_decoder(tmp_path / "deep", hidden_size=256, intermediate_size=512, num_attention_heads=4)
    settings = (*ON_GPUS, *OWN["PP"], *ONE_ROW, "--technique", technique, "--model", str(tmp_path / "deep"))
    run = run_several(tmp_path, {"PP": (PP, settings)}, 2, STARTER)["PP"]
    base = load_file(tmp_path / "deep" / "model.safetensors")
    whole_gib = sum(weight.nbytes for weight in base.values()) / GIB
    for entry in run.record["memory"]:
        measured, planned = entry["peak_gib_by_phase"], entry["planned_gib_by_phase"]
        shares = {phase: round(measured[phase] / planned[phase], 2) for phase in PHASES if phase != "merging"}
        assert {phase: share for phase, share in shares.items() if share > 1.1} == {}
        held = {phase: round(measured[phase] / whole_gib, 3) for phase in ALONE}
        assert {phase: share for phase, share in held.items() if share > MOST_OF_WHOLE} == {}
