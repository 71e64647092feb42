"""Two ranks on one GPU: every parallelism that can is tried, NCCL is told what it needs, and other losses are seen."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO, Any
from unittest import mock

import psutil
import pytest

from common.base.paths import REPOSITORY
from common.base.specs import PARALLELISMS
from common.checks import processes, shared_gpu
from common.checks.folder_runs import run_of_folder
from common.checks.processes import FAILS, LEFT_OUT, WORKS
from common.checks.shared_gpu import PAIRS, SMOKE, Pair
from tests.forked import Forked
from tests.pace import patient

NOT_TRIED = {
    "single": "it has one rank",
    "mp": "one process works on two devices, and there is one",
    "zero1": "stage 3 sends what the other stages send, and more",
    "zero2": "as stage 1",
}
LOSSES = {"training_losses": [[1, 8.0], [2, 6.0]], "validation_losses": [[1, 7.0], [2, 5.0]]}


def runs_of(pair: Pair, folder: Path) -> list[Any]:
    """The ranks' run, and that of one device, from their commands."""
    (command, _) = shared_gpu.ranks_of(pair, "cpu", folder, "two")
    ranks = command[command.index(pair.script) + 1 :]
    one = [*pair.one_settings, *shared_gpu.common_settings(pair, "cpu", folder, "one")]
    return [
        run_of_folder(Path(script).parent, settings) for script, settings in ((pair.script, ranks), (pair.one, one))
    ]


# -- the table


def test_every_parallelism_is_tried_or_it_is_said_why_not() -> None:
    tried = {pair.parallel for pair in PAIRS.values()}
    assert tried | NOT_TRIED.keys() == PARALLELISMS.keys()
    assert not tried & NOT_TRIED.keys()


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_a_pairs_two_ranks_are_to_take_the_steps_of_one_device(pair: Pair, tmp_path: Path) -> None:
    with mock.patch.object(shared_gpu, "encoder_in", return_value="all-minilm-l6-v2"):
        ranks, one = runs_of(pair, tmp_path)
    assert (ranks.world_size, ranks.nodes, ranks.parallel, one.world_size) == (2, 2, pair.parallel, 1)
    alike = (
        "technique", "task", "model", "data", "precision", "effective_batch_size", "max_steps", "peak_learning_rate",
        "max_grad_norm", "optim", "seed", "train_rows", "groups_by_length", "target_modules", "max_length",
        "quantization", "lora_r", "lora_alpha", "partition_count", "weight_decay", "lr_scheduler_type",
    )  # fmt: skip
    differ = [name for name in alike if getattr(ranks, name) != getattr(one, name)]
    assert [name for name in differ if name != "partition_count" or pair.name == "3.2 DDP"] == []
    assert (ranks.lora_dropout, ranks.optim) == (0.0 if ranks.method.has_adapters else type(ranks).lora_dropout, "sgd")


# -- two ranks


def test_nccl_takes_two_ranks_on_the_gpu_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows a host by NCCL_HOSTID, refuses two ranks of one host on one GPU, and finds sockets by the interface."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    first, second = (shared_gpu.environment_of(rank, "cuda") for rank in range(2))
    assert {name for name in first if first[name] != second[name]} == {"NCCL_HOSTID"}
    expected = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "3"}
    assert expected.items() <= first.items()
    assert not any(name.startswith(("NCCL", "CUDA")) for name in shared_gpu.environment_of(0, "cpu"))


def test_pairs_that_run_at_once_meet_on_ports_of_their_own() -> None:
    first, second = (shared_gpu.torchruns(["-c", "pass"]) for _ in range(2))
    endpoints = [[each for each in command if "rdzv_endpoint" in each] for command in (*first, *second)]
    assert endpoints[0] == endpoints[1]
    assert endpoints[2] == endpoints[3] != endpoints[0]


# -- what is found


@pytest.mark.parametrize(
    ("losses", "status"),
    [
        ([[1, 8.0], [2, 6.0]], WORKS),
        ([[1, 8.0], [2, 6.0005]], WORKS),
        ([[1, 8.0], [2, 6.01]], FAILS),
        ([[1, 8.0], [2, float("nan")]], FAILS),
        ([[1, 8.0]], FAILS),
        ([[1, 8.0], [3, 6.0]], FAILS),
    ],
)
@pytest.mark.parametrize("kind", ["training_losses", "validation_losses"])
def test_other_losses_do_not_work(kind: str, losses: list[list[float]], status: str) -> None:
    reference = {**LOSSES, kind: [[1, 8.0], [2, 6.0]]}
    found = shared_gpu.compared({**reference, kind: losses}, reference, 1e-3)
    assert found["status"] == status, found


def test_a_rank_that_fails_ends_the_others_and_says_why() -> None:
    start_s = time.monotonic()
    programs = ("raise ValueError('the seventh row')", "import time; print('x', flush=True); time.sleep(99)")
    found = shared_gpu.run_all([["-c", program] for program in programs], [{}, {}], patient(60))
    assert (found["status"], found["why"]) == (FAILS, "ValueError: the seventh row")
    assert time.monotonic() - start_s < patient(20)


def test_ranks_that_hang_end_with_all_that_they_started() -> None:
    program = "import subprocess; p = subprocess.Popen(['sleep', '99']); print(p.pid, flush=True); p.wait()"
    ended = processes.run_processes([["-c", program]] * 2, [{}, {}], patient(0.7))
    assert [each.returncode for each in ended] == [None, None]
    for child in (int(each.stdout.split()[0]) for each in ended):
        deadline_s = time.monotonic() + patient(10)
        while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    with mock.patch.object(shared_gpu, "run_processes", return_value=[CompletedProcess([], None, "step 2\n")]):
        found = shared_gpu.run_all([], [], 7.0)
    assert (found["status"], "7 s" in found["why"], "step 2" in found["why"]) == (FAILS, True, True)


def test_what_lacks_a_package_is_left_out() -> None:
    with mock.patch.object(processes, "find_spec", return_value=None):
        found = shared_gpu.find_out("2.6 ZeRO-3", "cpu")
    assert (found["status"], "make deepspeed" in found["why"]) == (LEFT_OUT, True)


def start_forked(command: list[str], log: IO, environment: dict[str, str]) -> Forked:
    """As `start_process`, without the seconds in which each torchrun and rank imports PyTorch."""
    file = Path(f"/proc/{os.getpid()}/fd/{log.fileno()}")
    return Forked([sys.executable, *command], REPOSITORY, {**os.environ, **environment}, file)


@mock.patch.object(processes, "start_process", start_forked)
def test_two_ranks_send_what_they_should() -> None:
    found = shared_gpu.find_out(SMOKE, "cpu", patient(100))
    assert found["status"] == WORKS, found
    assert all(0 < each < 1000 for each in found["milliseconds"].values())
    assert len(found["milliseconds"]) == 7


@pytest.mark.slow
@mock.patch.object(processes, "start_process", start_forked)
def test_in_bf16_too_ranks_with_another_rate_do_not_work() -> None:
    """A fifth more is seen, as is a gradient that is wrong by so much."""
    name = "2.6 FSDP, bf16"
    pair = replace(PAIRS[name], settings=(*PAIRS[name].settings, "--learning_rate=0.06"))
    with mock.patch.dict(PAIRS, {name: pair}):
        found = shared_gpu.find_out(name, "cpu", patient(100))
    assert found["status"] == FAILS, found
    assert found["worst_relative"] > shared_gpu.TOLERANCES[pair.precision]
