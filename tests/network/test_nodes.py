"""Runs of 2.2 and 2.6 over several machines, a torchrun on each: equal to one device, or refused on every machine."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.base.paths import REPOSITORY
from common.checks.folder_runs import run_of_folder
from common.planning.architectures import read_architecture
from common.planning.job import BatchShape, job_of_run
from common.planning.time_plan import traffic
from common.records.store import RECORD_NAME, Record, load_record
from common.runtime.disks import MARK
from tests.network.virtual_hosts import virtual_network
from tests.network.virtual_links import sent_bytes
from tests.network.workers import GLOBAL_BATCH, RUN_S, SAME, START_S, STEPS, Place, Worker, needs_hosts, wait_until

LORA = REPOSITORY / "2.1_lora_finetuning" / "run_0_cpu_x1" / "my_workflow_lora_finetuning.py"
FULL = REPOSITORY / "2.4_full_finetuning" / "run_0_cpu_x1" / "my_workflow_full_finetuning.py"
DDP = REPOSITORY / "2.2_lora_finetuning_with_ddp" / "run_0_cpu_x2" / "my_workflow_lora_finetuning_with_ddp.py"
FSDP = REPOSITORY / "2.6_full_finetuning_with_fsdp" / "run_0_cpu_x2" / "my_workflow_full_finetuning_with_fsdp.py"
PP = REPOSITORY / "2.7_full_finetuning_with_pp" / "run_0_cpu_x2" / "my_workflow_full_finetuning_with_pp.py"

NO_DROPOUT = ("--lora_dropout", "0")
LONGER_STEPS = 12
LONGER = ("--eval_steps", "1", "--max_steps", f"{LONGER_STEPS}")
ELASTIC: dict[str, Any] = {"nodes": "1:2", "max_restarts": 3, "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}
"""torchrun's own store, where it shares it, takes in no machine that is added."""
pytestmark = needs_hosts
needs_deepspeed = pytest.mark.skipif(not find_spec("deepspeed"), reason="DeepSpeed is not installed: make deepspeed")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A disk that all machines share."""
    return tmp_path / "shared"


def results_on(disk: Path) -> Path:
    return disk / "results" / "test"


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    """Make two virtual hosts, and say what runs on them: so many ranks on each, which share the global batch."""
    with ExitStack() as stack:

        def make(script: Path, ranks: int, *settings: str, disk: Path | None = None) -> Place:
            batch = ("--batch_size", f"{GLOBAL_BATCH // (2 * ranks)}")
            network = stack.enter_context(virtual_network(2))
            return Place(tmp_path, script, (*SAME, *batch, *settings), network, ranks, disk)

        yield make


def check_equal(results: Path, record: Record, one: Worker, steps: Sequence[int] = range(1, STEPS + 1)) -> None:
    """Losses of these steps and their validations, and the weights that were saved."""
    for kind in ("training_losses", "validation_losses"):
        expected = [[step, pytest.approx(loss, rel=1e-5)] for step, loss in one.record[kind]]
        assert [step for step, _ in record[kind][-len(steps) :]] == list(steps)
        assert record[kind][-len(steps) :] == expected[-len(steps) :]
    assert record["effective_batch_size"] == one.record["effective_batch_size"] == GLOBAL_BATCH
    assert record["checkpoints"]["best"] == one.record["checkpoints"]["best"]
    folder = "adapter" if (one.results / "adapter").is_dir() else "model"
    learnt, expected_weights = weights_in(results / folder), weights_in(one.results / folder)
    assert learnt.keys() == expected_weights.keys()
    for weight in learnt:
        assert (learnt[weight] - expected_weights[weight]).abs().max() < 1e-5


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of all of a model's files: a pipeline writes one for each stage."""
    return {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}


def names_in(results: Path) -> set[str]:
    """Return the files of checkpoints and models."""
    kept = (path.relative_to(results) for path in results.rglob("*") if path.is_file())
    return {str(path) for path in kept if path.parts[0] in ("checkpoints", "adapter", "merged")}


# -- equal to one device


def test_ddp_on_two_machines_with_a_disk_each_is_one_device(two_hosts: Callable, one_device: Callable) -> None:
    place = two_hosts(DDP, 1, *NO_DROPOUT)
    place.start_all()
    first, second = place.finish_well()
    assert first.has_said("results and checkpoints are on each machine's own disk")
    assert second.has_said("[host1:RANK1:CPU] memory: ")
    check_equal(first.results, first.record, one_device(LORA, *NO_DROPOUT))
    assert [(share["rank"], share["host"]) for share in first.record["world"]] == [(0, "machine0"), (1, "machine1")]
    assert second.record["status"] == "completed"
    for path in (f"checkpoints/checkpoint-{STEPS}/shards/.metadata", "merged/model.safetensors", "adapter"):
        assert (second.results / path).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "ranks", "settings", "alike"),
    [
        pytest.param(FSDP, 2, ("--dp_replicate_size", "1"), (), id="one model"),
        pytest.param(FSDP, 2, ("--dp_replicate_size", "2"), (), id="a copy on each machine"),
        pytest.param(FSDP, 1, ("--parallel", "zero3"), (), id="zero3", marks=needs_deepspeed),
        # a pipeline pads its rows, and so takes them in another order
        pytest.param(
            PP, 1, ("--micro_batches", "4", "--batch_size", f"{GLOBAL_BATCH}"), ("--padding_free", "no"), id="pp"
        ),
    ],
)
def test_parts_of_a_model_on_two_machines_are_one_device(
    two_hosts: Callable,
    one_device: Callable,
    shared: Path,
    script: Path,
    ranks: int,
    settings: tuple[str, ...],
    alike: tuple[str, ...],
) -> None:
    place = two_hosts(script, ranks, *settings, disk=shared)
    place.start_all()
    first = place.finish_well()[0]
    assert first.has_said("results and checkpoints are on one disk, which all machines share")
    results = results_on(shared)
    record = load_record(results / RECORD_NAME)
    check_equal(results, record, one_device(FULL, *alike))
    assert [share["host"] for share in record["world"]] == ["machine0"] * ranks + ["machine1"] * ranks


# -- ranks and machines that are lost, and added


@pytest.mark.slow
def test_a_rank_that_is_lost_is_started_again_on_all_machines(
    two_hosts: Callable, one_device: Callable, tmp_path: Path
) -> None:
    """After the newest checkpoint; and what was trained to its end is trained longer where one disk has lost it."""
    place = two_hosts(DDP, 2, *NO_DROPOUT, *LONGER)
    place.start_all(max_restarts=1, env={"FAULT": f"kill rank=3 step=5 point=batch once={tmp_path / 'once'}"})
    first, second = place.finish_well()
    assert first.has_said("resumes after step 4, from checkpoint-4")
    check_equal(first.results, first.record, one_device(LORA, *NO_DROPOUT, *LONGER), range(5, LONGER_STEPS + 1))
    assert first.record["command"].startswith("torchrun --nnodes 2 --nproc_per_node 2 ")
    assert names_in(first.results) == names_in(second.results)

    shutil.rmtree(second.results / "checkpoints")
    longer = ("--max_steps", f"{LONGER_STEPS + 2}", "--resume_from_checkpoint", "last", "--results_root")
    for host, disk in enumerate((first.disk, second.disk)):
        place.start_ranks(host, *longer, str(disk))
    assert place.finish_well()[2].has_said(f"resumes after step {LONGER_STEPS}, from checkpoint-{LONGER_STEPS}")
    assert names_in(first.results) == names_in(second.results)


def wait_for_checkpoint(step: int, results: Path, workers: Sequence[Worker]) -> None:
    folder = results / "checkpoints" / f"checkpoint-{step}"
    wait_until(folder.is_dir, START_S + RUN_S, workers)


def check_resumed(results: Path, first: Worker, one: Worker, steps: int = LONGER_STEPS) -> None:
    """After a checkpoint that was complete, with the steps of one device."""
    after = first.resumed_after
    assert 4 <= after < steps
    check_equal(results, load_record(results / RECORD_NAME), one, range(after + 1, steps + 1))


@pytest.mark.slow
def test_one_machine_goes_on_when_the_other_is_lost(two_hosts: Callable, one_device: Callable) -> None:
    """With more micro-batches, so that the steps stay those of one device."""
    place = two_hosts(DDP, 1, *NO_DROPOUT, *LONGER)
    first, second = place.start_all(**ELASTIC)
    wait_for_checkpoint(4, first.results, [first, second])
    place.network.hosts[1].kill()
    wait_until(lambda: first.has_said("resumes after step "), 60, [first])
    assert place.finish()[0] == 0, first.output
    assert first.has_said("1 of 2 ranks started: each takes 4 rows at once, 2 times")
    check_resumed(first.results, first, one_device(LORA, *NO_DROPOUT, *LONGER))


@pytest.mark.slow
def test_a_machine_that_is_added_takes_its_share(two_hosts: Callable, one_device: Callable, tmp_path: Path) -> None:
    steps = 40  # so many that the second machine comes before the first has done them alone
    settings = (*NO_DROPOUT, "--eval_steps", "1", "--max_steps", f"{steps}")
    place = two_hosts(DDP, 1, *settings)
    first = place.start_ranks(0, **ELASTIC)
    wait_for_checkpoint(4, first.results, [first])
    stale = tmp_path / "disk1" / "results" / "test" / "checkpoints"  # of another run of this name, and further on
    shutil.copytree(first.results / "checkpoints" / "checkpoint-4", stale / "checkpoint-400")
    shutil.copyfile(first.results / MARK, stale.parent / MARK)
    second = place.start_ranks(1, **ELASTIC)
    place.finish_well()
    assert first.has_said("1 of 2 ranks started")
    assert [share["host"] for share in first.record["world"]] == ["machine0", "machine1"]
    check_resumed(first.results, first, one_device(LORA, *settings), steps)
    assert second.record["status"] == "completed"


@pytest.mark.slow
def test_shards_go_on_when_a_machine_is_lost(two_hosts: Callable, one_device: Callable, shared: Path) -> None:
    """With a copy of the model on each of them, of which one is left."""
    place = two_hosts(FSDP, 2, *LONGER, "--dp_replicate_size", "2", disk=shared)
    workers = place.start_all(**ELASTIC)
    wait_for_checkpoint(4, results_on(shared), workers)
    place.network.hosts[1].kill()
    assert place.finish()[0] == 0, workers[0].output
    check_resumed(results_on(shared), workers[0], one_device(FULL, *LONGER))


# -- refused


@pytest.mark.parametrize(
    ("script", "settings", "of_second", "said"),
    [
        (
            DDP,
            (),
            ("--learning_rate", "0.004"),
            "rank 0 (host0) has settings learning_rate 0.003, but rank 1 (host1) has learning_rate 0.004",
        ),
        pytest.param(
            FSDP,
            (),
            (),
            "With fsdp a checkpoint has a part of every rank, but host0 and host1 each see another disk",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["machines that differ", "shards on a disk each"],
)
def test_what_cannot_be_is_refused_on_every_machine(
    two_hosts: Callable, script: Path, settings: tuple[str, ...], of_second: tuple[str, ...], said: str
) -> None:
    place = two_hosts(script, 1, *settings)
    place.start_ranks(0)
    place.start_ranks(1, *of_second)
    assert all(place.finish(START_S))
    for worker in place.workers:
        assert said in worker.output
        assert not list(worker.disk.glob("results/test*"))


# -- what is sent


@pytest.mark.slow
def test_between_copies_gradients_alone_cross_the_network(tmp_path: Path) -> None:
    """What hosts send in five steps: the difference of a longer and a shorter run, which start and end alike."""
    plain_bytes, hybrid_bytes = (sent_per_step(tmp_path / copies, copies) for copies in ("1", "2"))
    run = replace(run_of_folder(FSDP.parent, []), devices=4, dp_replicate_size=2, nodes=2)
    _, of_rank = traffic(read_architecture(run.model), job_of_run(run, BatchShape(2, 64, 63)))
    assert hybrid_bytes == pytest.approx(2 * of_rank, rel=0.05)  # two ranks on each host, and TCP's own bytes
    assert hybrid_bytes < 0.5 * plain_bytes


def sent_per_step(folder: Path, copies: str) -> float:
    """Return the bytes that the fuller link carries per step away from its host."""
    sent = []
    for steps in (3, 8):
        with virtual_network(2) as network:
            root = folder / f"{steps}"
            counts = ("--max_steps", f"{steps}", "--eval_steps", "1.0", "--save_steps", "0", "--train_rows", "200")
            copied = ("--dp_replicate_size", copies, "--batch_size", "2")
            place = Place(root, FSDP, (*SAME, *counts, *copied), network, 2, root / "shared")
            place.start_all()
            place.finish_well()
            sent.append([sent_bytes(host) for host in network.hosts])
    return max((more - fewer) / 5 for fewer, more in zip(*sent, strict=True))
