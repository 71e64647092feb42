"""A run that was stopped and goes on ends where a straight one does: the largest difference is 0, dropout on."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers.trainer_pt_utils import safe_globals

from common.checkpoints import MANIFEST_FILE, read_manifest
from common.launch import free_port, torchrun_command
from common.run_config import REPOSITORY
from common.sharded_training import SHARDS

STEPS = 10
STOPS = {
    "at an epoch's end": "raise step=6 point=batch",
    "within an epoch": "raise step=8 point=batch",
    "within an accumulation": "raise step=8 point=batch times=2",
}
"""An epoch has five steps, of two accumulated batches each."""
CHAT = ("--train_rows", "65", "--validation_rows", "8", "--test_rows", "1", "--epochs", "2", "--report_share", "0.1",
        "--independent_judge", "none", "--report_to", "none", "--max_new_tokens", "1")  # fmt: skip
SUMMARIES = ("--train_rows", "65", "--validation_rows", "4", "--test_rows", "2", "--epochs", "2", "--report_share",
             "0.1", "--report_to", "none", "--beams", "1", "--max_new_tokens", "2")  # fmt: skip
HISTORY = {"trainer_state.json", "training_args.bin"}
"""Of a checkpoint: what has times and names of its run in it."""


@dataclass
class Job:
    place: str
    name: str
    overrides: tuple[str, ...]
    faults: list[str] = field(default_factory=lambda: list(STOPS.values()))
    forgets: str = ""
    ports: list[int] = field(default_factory=lambda: [free_port() for _ in range(2 * len(STOPS) + 1)])


LORA = "2.1_lora_finetuning/run_0_cpu_x1/my_workflow_lora_finetuning.py"
ONE_RANK = [
    Job(LORA, "single", (*CHAT, "--batch_size", "8", "--accumulation_steps", "2")),
    Job(LORA, "forgetful", (*CHAT, "--batch_size", "8", "--accumulation_steps", "2"), [STOPS["within an epoch"]],
        forgets="_load_rng_state"),
]  # fmt: skip
TWO_RANKS = [
    Job("2.2_lora_finetuning_with_ddp/run_0_cpu_x2/my_workflow_lora_finetuning_with_ddp.py", "ddp",
        (*CHAT, "--batch_size", "4", "--accumulation_steps", "2")),
    Job("2.6_full_finetuning_with_fsdp/run_0_cpu_x2/my_workflow_full_finetuning_with_fsdp.py", "fsdp",
        (*CHAT, "--technique", "lora", "--batch_size", "4", "--accumulation_steps", "2")),
    Job("2.7_full_finetuning_with_pp/run_0_cpu_x2/my_workflow_full_finetuning_with_pp.py", "pp",
        (*CHAT, "--technique", "lora", "--batch_size", "8", "--micro_batches", "2", "--accumulation_steps", "2")),
    Job("3.2_summarization/run_0_cpu_x2/my_workflow_summarization_machines.py", "machines",
        (*SUMMARIES, "--batch_size", "4", "--accumulation_steps", "2")),
]  # fmt: skip


def _work(folder: Path, jobs: list[Job], ranks: int) -> None:
    (folder / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]))
    script = str(REPOSITORY / "tests" / "faults" / "resume_worker.py")
    command = [sys.executable, script] if ranks == 1 else torchrun_command(script, ranks)
    places = [str(REPOSITORY / Path(job.place).parent) for job in jobs]
    done = subprocess.run(
        [*command, str(folder / "jobs.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *places])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    _work(folder, ONE_RANK, 1)
    _work(folder, TWO_RANKS, 2)
    return folder / "results"


def _tensors(content: object, name: str = "") -> dict[str, torch.Tensor]:
    if torch.is_tensor(content):
        return {name: content.float()}
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return {inner: tensor for key, value in items for inner, tensor in _tensors(value, f"{name}.{key}").items()}


def _part(name: str) -> str:
    """A file, or the folder of shards that make up one state."""
    return SHARDS if name.startswith(f"{SHARDS}/") else name


def _read(path: Path) -> object:
    if path.is_dir():
        whole = path.parent.parent / f"{path.parent.name}.pt"
        dcp_to_torch_save(path, whole)
        return torch.load(whole, weights_only=True)
    with safe_globals():  # numpy's, of the random numbers
        return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def largest_difference(one: Path, other: Path) -> float:
    """Between two checkpoints' weights, optimizers, schedules and random numbers; bytes that are equal are 0."""
    files, others = (read_manifest(folder)["files"] for folder in (one, other))
    assert files.keys() == others.keys()
    largest = 0.0
    for name in {_part(name) for name in files.keys() - HISTORY}:
        if files.get(name, one) == others.get(name, other):
            continue
        mine, theirs = (_tensors(_read(folder / name)) for folder in (one, other))
        assert mine, name
        assert mine.keys() == theirs.keys(), name
        largest = max([largest, *(float((mine[key] - theirs[key]).abs().max()) for key in mine)])
    return largest


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("technique", ["single", "ddp", "fsdp", "pp", "machines"])
def test_a_run_that_goes_on_ends_where_a_straight_one_does(results: Path, technique: str, stop: str) -> None:
    number = list(STOPS).index(stop)
    folders = [results / f"{technique}-{name}" / "checkpoints" / f"checkpoint-{STEPS}" for name in ("straight", number)]
    assert (folders[0] / MANIFEST_FILE).exists()
    assert largest_difference(*folders) == 0
    record = json.loads((results / f"{technique}-{number}" / "run_record.json").read_text())
    assert record["status"] == "completed"
    assert record["checkpoints"]["went_on_from"] == f"checkpoint-{5 if number == 0 else 7}"


def test_without_the_random_numbers_it_would_not(results: Path) -> None:
    folders = [results / f"forgetful-{name}" / "checkpoints" / f"checkpoint-{STEPS}" for name in ("straight", 0)]
    assert largest_difference(*folders) > 1e-6
