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
from common.planning.job import BatchShape
from common.planning.run_jobs import job_of_run
from common.planning.time_plan import traffic
from common.records.store import RECORD_NAME, Record, load_record
from common.runtime.virtual_hosts import virtual_network
from tests.network.virtual_links import sent_bytes
from tests.network.workers import RUN_S, START_S, Place, Worker, needs_hosts, torchrun, wait_until

LORA = REPOSITORY / "2.1_lora_finetuning" / "run_0_cpu_x1" / "my_workflow_lora_finetuning.py"
FULL = REPOSITORY / "2.4_full_finetuning" / "run_0_cpu_x1" / "my_workflow_full_finetuning.py"
DDP = REPOSITORY / "2.2_lora_finetuning_with_ddp" / "run_0_cpu_x2" / "my_workflow_lora_finetuning_with_ddp.py"
FSDP = REPOSITORY / "2.6_full_finetuning_with_fsdp" / "run_0_cpu_x2" / "my_workflow_full_finetuning_with_fsdp.py"
PP = REPOSITORY / "2.7_full_finetuning_with_pp" / "run_0_cpu_x2" / "my_workflow_full_finetuning_with_pp.py"

STEPS = 5
SAME = ("--train_rows", "33", "--validation_rows", "9", "--test_rows", "1", "--independent_judge", "none",
        "--max_new_tokens", "1", "--report_to", "none", "--learning_rate_scaling", "none", "--optimizer", "sgd",
        "--learning_rate", "0.003", "--warmup_steps", "0", "--max_steps", f"{STEPS}", "--eval_steps", "0.2",
        "--save_steps", "1", "--run_name", "test")  # fmt: skip
NO_DROPOUT = ("--lora_dropout", "0")
GLOBAL_BATCH = 8
pytestmark = needs_hosts
needs_deepspeed = pytest.mark.skipif(not find_spec("deepspeed"), reason="DeepSpeed is not installed: make deepspeed")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    """Make virtual hosts, and say what runs on them."""
    with ExitStack() as stack:

        def make(count: int, script: Path, *settings: str) -> Place:
            return Place(tmp_path, script, (*SAME, *settings), stack.enter_context(virtual_network(count)))

        yield make


def start_all(place: Place, ranks: int, *overrides: str, nodes: str = "", **settings: Any) -> list[Worker]:
    """So many ranks on each host, which share the global batch; `nodes`: the fewest and most hosts of torchrun."""
    return [start(place, host.number, ranks, *overrides, nodes=nodes, **settings) for host in place.network.hosts]


def start(
    place: Place, host: int, ranks: int, *overrides: str, nodes: str = "", max_restarts: int = 0, **environment: str
) -> Worker:
    """The ranks of one host."""
    hosts = place.network.hosts
    world = len(hosts) * ranks
    size = ("--devices", f"{world}", "--nodes", f"{len(hosts)}", "--batch_size", f"{GLOBAL_BATCH // world}")
    launcher = torchrun(hosts[host], nodes or len(hosts), ranks, max_restarts)
    return place.start(host, *size, *overrides, launcher=launcher, **environment)


def one_device(folder: Path, script: Path, *settings: str) -> Worker:
    """The same steps on one device."""
    place = Place(folder, script, (*SAME, *settings, "--batch_size", f"{GLOBAL_BATCH}"))
    worker = place.start(0)
    assert place.finish(START_S + RUN_S) == [0], worker.output
    return worker


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


def test_ddp_on_two_machines_with_a_disk_each_is_one_device(hosts: Callable[..., Place], tmp_path: Path) -> None:
    place = hosts(2, DDP, *NO_DROPOUT)
    first, second = start_all(place, 1)
    assert place.finish(START_S + RUN_S) == [0, 0], [worker.output for worker in place.workers]
    assert first.has_said("results and checkpoints are on each machine's own disk")
    assert second.has_said("[host1:RANK1:CPU] memory: ")
    check_equal(first.results, first.record, one_device(tmp_path / "one", LORA, *NO_DROPOUT))
    assert [(share["rank"], share["host"]) for share in first.record["world"]] == [(0, "machine0"), (1, "machine1")]
    assert second.record["status"] == "completed"
    for path in (f"checkpoints/checkpoint-{STEPS}/optimizer.pt", "merged/model.safetensors", "adapter"):
        assert (second.results / path).exists()


@pytest.mark.slow
def test_a_rank_that_is_lost_is_started_again_on_all_machines(hosts: Callable[..., Place], tmp_path: Path) -> None:
    """After the newest checkpoint; and what was trained to its end is trained longer where one disk has lost it."""
    steps = ("--eval_steps", "1", "--max_steps")
    place = hosts(2, DDP, *NO_DROPOUT, *steps, "12")
    fault = f"kill rank=3 step=7 point=batch once={tmp_path / 'once'}"
    first, second = start_all(place, 2, max_restarts=1, FAULT=fault)
    assert place.finish(START_S + RUN_S) == [0, 0], [worker.output for worker in place.workers]
    assert first.has_said("resumes after step 6, from checkpoint-6")
    one = one_device(tmp_path / "one", LORA, *NO_DROPOUT, *steps, "12")
    check_equal(first.results, first.record, one, range(7, 13))
    assert first.record["command"].startswith("torchrun --nnodes 2 --nproc_per_node 2 ")
    assert names_in(first.results) == names_in(second.results)

    shutil.rmtree(second.results / "checkpoints")
    longer = (*steps, "14", "--resume_from_checkpoint", "last", "--results_root")
    for host, disk in zip(place.network.hosts, (first.disk, second.disk), strict=True):
        size = ("--devices", "4", "--nodes", "2", "--batch_size", "2")
        place.start(host.number, *size, *longer, str(disk), launcher=torchrun(host, 2, 2))
    assert place.finish(START_S + RUN_S) == [0] * 4, [worker.output for worker in place.workers]
    assert place.workers[2].has_said("resumes after step 12, from checkpoint-12")
    assert names_in(first.results) == names_in(second.results)


LONGER = ("--eval_steps", "1", "--max_steps", "12")
ELASTIC: dict[str, Any] = {"nodes": "1:2", "max_restarts": 3, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""torchrun's own store, where it shares it, takes in no machine that is added."""


def wait_for_checkpoint(step: int, results: Path, workers: Sequence[Worker]) -> None:
    folder = results / "checkpoints" / f"checkpoint-{step}"
    wait_until(folder.is_dir, START_S + RUN_S, workers)


def test_one_machine_goes_on_when_the_other_is_lost(hosts: Callable[..., Place], tmp_path: Path) -> None:
    """With more micro-batches, so that the steps stay those of one device."""
    place = hosts(2, DDP, *NO_DROPOUT, *LONGER)
    first, second = start_all(place, 1, **ELASTIC)
    wait_for_checkpoint(4, first.results, [first, second])
    place.network.hosts[1].kill()
    wait_until(lambda: first.has_said("resumes after step "), 60, [first])
    assert place.finish(START_S + RUN_S)[0] == 0, first.output
    assert first.has_said("1 of 2 ranks started: each takes 4 rows at once, 2 times")
    after = first.resumed_after
    assert 4 <= after < 12
    one = one_device(tmp_path / "one", LORA, *NO_DROPOUT, *LONGER)
    check_equal(first.results, first.record, one, range(after + 1, 13))


@pytest.mark.slow
def test_a_machine_that_is_added_takes_its_share(hosts: Callable[..., Place], tmp_path: Path) -> None:
    place = hosts(2, DDP, *NO_DROPOUT, *LONGER)
    first = start(place, 0, 1, **ELASTIC)
    wait_for_checkpoint(4, first.results, [first])
    stale = tmp_path / "disk1" / "results" / "test" / "checkpoints"  # of another run of this name, and further on
    shutil.copytree(first.results / "checkpoints" / "checkpoint-4", stale / "checkpoint-400")
    second = start(place, 1, 1, **ELASTIC)
    assert place.finish(START_S + RUN_S) == [0, 0], [worker.output for worker in place.workers]
    assert first.has_said("1 of 2 ranks started")
    after = first.resumed_after
    assert 4 <= after < 12
    assert [share["host"] for share in first.record["world"]] == ["machine0", "machine1"]
    one = one_device(tmp_path / "one", LORA, *NO_DROPOUT, *LONGER)
    check_equal(first.results, first.record, one, range(after + 1, 13))
    assert second.record["status"] == "completed"


@pytest.mark.slow
def test_shards_go_on_when_a_machine_is_lost(hosts: Callable[..., Place], tmp_path: Path) -> None:
    """With a copy of the model on each of them, of which one is left."""
    shared = ("--results_root", str(tmp_path / "shared"))
    place = hosts(2, FSDP, *LONGER)
    workers = start_all(place, 2, *shared, "--dp_replicate_size", "2", **ELASTIC)
    results = tmp_path / "shared" / "results" / "test"
    wait_for_checkpoint(4, results, workers)
    place.network.hosts[1].kill()
    assert place.finish(START_S + RUN_S)[0] == 0, workers[0].output
    after = workers[0].resumed_after
    assert 4 <= after < 12
    one = one_device(tmp_path / "one", FULL, *LONGER)
    check_equal(results, load_record(results / RECORD_NAME), one, range(after + 1, 13))


def names_in(results: Path) -> set[str]:
    """Return the files of checkpoints and models."""
    kept = (path.relative_to(results) for path in results.rglob("*") if path.is_file())
    return {str(path) for path in kept if path.parts[0] in ("checkpoints", "adapter", "merged")}


@pytest.mark.parametrize(
    "copies", [pytest.param("1", marks=pytest.mark.slow), "2"], ids=["one model", "a copy on each machine"]
)
def test_shards_on_two_machines_of_two_are_one_device(hosts: Callable[..., Place], tmp_path: Path, copies: str) -> None:
    place = hosts(2, FSDP, "--results_root", str(tmp_path / "shared"))
    workers = start_all(place, 2, "--dp_replicate_size", copies, "--results_root", str(tmp_path / "shared"))
    assert place.finish(START_S + RUN_S) == [0, 0], [worker.output for worker in place.workers]
    assert workers[0].has_said("results and checkpoints are on one disk, which all machines share")
    results = tmp_path / "shared" / "results" / "test"
    record = load_record(results / RECORD_NAME)
    check_equal(results, record, one_device(tmp_path / "one", FULL))
    assert [share["host"] for share in record["world"]] == ["machine0"] * 2 + ["machine1"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "settings", "alike"),
    [
        pytest.param(FSDP, ("--parallel", "zero3"), (), id="zero3", marks=needs_deepspeed),
        # a pipeline pads its rows, and so takes them in another order
        pytest.param(
            PP, ("--micro_batches", "4", "--batch_size", f"{GLOBAL_BATCH}"), ("--padding_free", "no"), id="pp"
        ),
    ],
)
def test_other_parallelisms_on_two_machines_are_one_device(
    hosts: Callable[..., Place], tmp_path: Path, script: Path, settings: tuple[str, ...], alike: tuple[str, ...]
) -> None:
    shared = ("--results_root", str(tmp_path / "shared"))
    place = hosts(2, script)
    workers = start_all(place, 1, *settings, *shared)
    assert place.finish(START_S + RUN_S) == [0, 0], [worker.output for worker in workers]
    results = tmp_path / "shared" / "results" / "test"
    check_equal(results, load_record(results / RECORD_NAME), one_device(tmp_path / "one", FULL, *alike))


@pytest.mark.slow
def test_ddp_that_writes_parts_on_a_disk_each_is_refused(hosts: Callable[..., Place]) -> None:
    """2.6's own, whose checkpoints are written by all ranks together."""
    place = hosts(2, FSDP, "--parallel", "ddp")
    workers = start_all(place, 1)
    assert all(place.finish(START_S))
    for worker in workers:
        assert "These checkpoints have a part of every rank, but host0 and host1 each see another disk" in worker.output
        assert not list(worker.disk.glob("results/test*"))


@pytest.mark.slow
def test_shards_on_a_disk_each_are_refused_on_every_machine(hosts: Callable[..., Place]) -> None:
    place = hosts(2, FSDP)
    workers = start_all(place, 1)
    codes = place.finish(START_S)
    for worker, code in zip(workers, codes, strict=True):
        assert code
        assert "With fsdp a checkpoint has a part of every rank, but host0 and host1 each see another disk" in (
            worker.output
        )
        assert not list(worker.disk.glob("results/test*"))


def test_machines_that_differ_are_refused_on_every_machine(hosts: Callable[..., Place]) -> None:
    place = hosts(2, DDP)
    first, second = place.network.hosts
    size = ("--devices", "2", "--nodes", "2")
    place.start(0, *size, launcher=torchrun(first, 2, 1))
    place.start(1, *size, "--learning_rate", "0.004", launcher=torchrun(second, 2, 1))
    assert all(place.finish(START_S))
    for worker in place.workers:
        assert "rank 0 (host0) has settings learning_rate 0.003, but rank 1 (host1) has learning_rate 0.004" in (
            worker.output
        )


@pytest.mark.slow
def test_between_copies_gradients_alone_cross_the_network(tmp_path: Path) -> None:
    """What hosts send in ten steps: the difference of a longer and a shorter run, which start and end alike."""
    plain_bytes, hybrid_bytes = (sent_per_step(tmp_path / copies, copies) for copies in ("1", "2"))
    run = replace(run_of_folder(FSDP.parent, []), devices=4, dp_replicate_size=2, nodes=2)
    _, of_rank = traffic(read_architecture(run.model), job_of_run(run, BatchShape(2, 64, 63)))
    assert hybrid_bytes == pytest.approx(2 * of_rank, rel=0.05)  # two ranks on each host, and TCP's own bytes
    assert hybrid_bytes < 0.5 * plain_bytes


def sent_per_step(folder: Path, copies: str) -> float:
    """Return the bytes that the fuller link carries per step away from its host."""
    sent = []
    for steps in (4, 14):
        with virtual_network(2) as network:
            root = folder / f"{steps}"
            place = Place(root, FSDP, SAME, network)
            counts = ("--max_steps", f"{steps}", "--eval_steps", "1.0", "--save_steps", "0", "--train_rows", "200")
            start_all(place, 2, "--dp_replicate_size", copies, "--results_root", str(root / "shared"), *counts)
            assert place.finish(START_S + RUN_S) == [0, 0], [worker.output for worker in place.workers]
            sent.append([sent_bytes(host) for host in network.hosts])
    return max((more - fewer) / 10 for fewer, more in zip(*sent, strict=True))
