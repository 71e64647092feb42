"""The machines workflow over TCP between hosts of their own: it finishes, or ends with one sentence, and never hangs.

Hosts are network namespaces (`common.virtual_hosts`), each with its own folder for results, as with a disk of its own.
Where these are not allowed, two processes on loopback stand in for them.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from accelerate.utils.other import get_free_port

from common.base.command_line import BAD_INPUT_EXIT_CODE
from common.base.paths import REPOSITORY
from common.runtime.membership import LOST_MEMBER_EXIT_CODE
from common.runtime.rendezvous import PORT
from common.runtime.virtual_hosts import VirtualHost, VirtualNetwork, namespaces, virtual_network
from common.training.replicas import WEIGHTS_FILE
from tests.network.virtual_links import cut, join
from tests.network.workers import END_S, RUN_S, START_S, Place, Worker, needs_hosts, wait_until

SCRIPT = REPOSITORY / "3.2_summarization" / "run_0_cpu_x2" / "my_workflow_summarization_machines.py"
DATA = REPOSITORY / "assets" / "chat_summaries"
MASTER = f"10.77.0.1:{PORT}"
STEPS, PARTITIONS = 30, 3
RUN = ("--train_rows", "65", "--validation_rows", "17", "--test_rows", "5", "--report_to", "none", "--batch_size", "4",
       "--max_new_tokens", "8", "--num_beams", "1", "--max_steps", f"{STEPS}", "--eval_steps", f"{1 / STEPS}",
       "--save_steps", "1", "--partitions", f"{PARTITIONS}", "--run_name", "test")  # fmt: skip
JOIN_S = 30
"""How long members wait for each other, unless a test says otherwise: they come some seconds apart."""


def summarizing(folder: Path, model: str, network: VirtualNetwork | None = None) -> Place:
    """Where the workflow of machines runs, with the tiny model."""
    return Place(folder, SCRIPT, (*RUN, "--model", model), network)


def start_all(place: Place, count: int, *overrides: str) -> list[Worker]:
    """One member on each host, which meet at the first one."""
    return [place.start(rank, *static(rank, count), *overrides) for rank in range(count)]


def weights(worker: Worker) -> dict[str, torch.Tensor]:
    """Those that it has kept itself, after the last step."""
    folder = worker.results / "checkpoints" / f"checkpoint-{STEPS}"
    return torch.load(folder / WEIGHTS_FILE, weights_only=True)["model"]


def static(rank: int, count: int, master: str = MASTER, join_s: float = JOIN_S) -> tuple[str, ...]:
    """The options of a static address."""
    return ("--master", master, "--machines", str(count), "--machine_rank", str(rank), "--join_timeout_s", str(join_s))


def wait_for_step(step: int, worker: Worker) -> None:
    wait_until(lambda: worker.has_said(f"step {step}/{STEPS}:"), START_S + RUN_S, [worker])


@pytest.fixture
def hosts(tmp_path: Path, tiny_summarizer: str) -> Iterator[Callable[..., Place]]:
    """Make virtual hosts; afterwards none is left."""
    with ExitStack() as stack:

        def make(count: int, **link: float) -> Place:
            return summarizing(tmp_path, tiny_summarizer, stack.enter_context(virtual_network(count, **link)))

        yield make
    assert not [name for name in namespaces() if f"-{os.getpid()}-" in name]


@pytest.fixture(scope="module")
def loopback(tmp_path_factory: pytest.TempPathFactory, tiny_summarizer: str) -> list[Worker]:
    """Two processes of this machine with the rows of three, which have finished."""
    place, master = summarizing(tmp_path_factory.mktemp("loopback"), tiny_summarizer), f"127.0.0.1:{get_free_port()}"
    for rank in range(2):
        place.start(0, *static(rank, 2, master))
    assert place.finish(START_S + RUN_S) == [0, 0], [worker.output for worker in place.workers]
    return place.workers


def check_finished(workers: Sequence[Worker], like: Worker) -> None:
    """All have one model, each on its own disk, and the steps were those of another run, whoever took them."""
    first, reference = workers[0].record, like.record
    for kind in ("training_losses", "validation_losses"):
        assert [step for step, _ in first[kind]] == list(range(1, STEPS + 1))
        assert first[kind] == [[step, pytest.approx(loss, rel=1e-5)] for step, loss in reference[kind]]
    assert first["effective_batch_size"] == reference["effective_batch_size"] == 4 * PARTITIONS
    learnt, expected = weights(workers[0]), weights(like)
    for worker in workers:
        assert worker.record["status"] == "completed"
        assert (worker.results / "model" / "model.safetensors").is_file()
        own = weights(worker)
        assert own.keys() == learnt.keys() == expected.keys()
        for name, weight in learnt.items():
            assert torch.equal(own[name], weight)
            assert (expected[name] - weight).abs().max() < 1e-4


def check_refused(workers: Sequence[Worker], *said: str) -> None:
    """Each ended with one sentence that says all this, and wrote nothing."""
    for worker in workers:
        assert worker.process.returncode == BAD_INPUT_EXIT_CODE
        for text in said:
            assert text in worker.error
        assert not worker.results.exists()


# -- who finishes


def test_two_processes_on_loopback_train_one_model(loopback: list[Worker]) -> None:
    check_finished(loopback, like=loopback[0])
    shares = [worker.output.partition("this rank trains on ")[2].split()[0] for worker in loopback]
    assert shares == ["43", "22"]  # of three parts with 22, 22 and 21 rows the first and the third, and the second
    assert loopback[0].has_said("2/2 members after")


@needs_hosts
@pytest.mark.slow
def test_three_hosts_train_the_model_of_one(hosts: Callable[..., Place], loopback: list[Worker]) -> None:
    place = hosts(3)
    start_all(place, 3)
    assert place.finish(START_S + RUN_S) == [0, 0, 0], [worker.output for worker in place.workers]
    check_finished(place.workers, like=loopback[0])
    assert [share["host"] for share in place.workers[1].record["world"]] == ["machine0", "machine1", "machine2"]


@needs_hosts
@pytest.mark.slow
def test_a_link_that_is_away_for_20_s_delays_the_run(hosts: Callable[..., Place], loopback: list[Worker]) -> None:
    place = hosts(2)
    first, second = start_all(place, 2)
    wait_for_step(5, first)
    cut(place.network, place.network.hosts[1])
    time.sleep(20)
    assert first.process.poll() is second.process.poll() is None
    assert not first.has_said(f"step {STEPS}/{STEPS}")
    join(place.network, place.network.hosts[1])
    assert place.finish(RUN_S) == [0, 0], [worker.output for worker in place.workers]
    check_finished(place.workers, like=loopback[0])


@needs_hosts
@pytest.mark.slow
def test_a_host_that_comes_10_s_late_is_waited_for(hosts: Callable[..., Place], loopback: list[Worker]) -> None:
    place = hosts(2)
    first = place.start(0, *static(0, 2, join_s=60))
    wait_until(lambda: first.has_said("1/2 members"), START_S, [first])
    time.sleep(10)
    place.start(1, *static(1, 2, join_s=60))
    assert place.finish(START_S + RUN_S) == [0, 0], [worker.output for worker in place.workers]
    check_finished(place.workers, like=loopback[0])


def torchrun(host: VirtualHost) -> list[str]:
    """One host's agent, which goes on with two hosts where three began."""
    settings = f"is_host={int(host.number == 0)},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:3", "--nproc_per_node", "1",
        "--max_restarts", "1", "--rdzv_backend", "c10d", "--rdzv_endpoint", "10.77.0.1:29400", "--rdzv_id", "test",
        "--rdzv_conf", settings, "--local_addr", host.address,
    ]  # fmt: skip


@needs_hosts
@pytest.mark.slow
def test_two_hosts_go_on_when_torchrun_loses_the_third(hosts: Callable[..., Place], loopback: list[Worker]) -> None:
    """From the last checkpoint, and with the same steps: one takes over the lost one's part of the rows."""
    place = hosts(3)
    members = [place.start(host.number, launcher=torchrun(host)) for host in place.network.hosts]
    kept = [worker.results / "checkpoints" / "checkpoint-8" for worker in members[:2]]
    wait_until(lambda: all(folder.is_dir() for folder in kept), START_S + RUN_S, members)
    place.network.hosts[2].kill()
    time.sleep(0.5)  # without the third nobody ends a step, or writes
    shutil.rmtree(members[1].results / "checkpoints")  # its disk was lost: it gets all from the other
    assert place.finish(START_S + RUN_S)[:2] == [0, 0], [worker.output for worker in members]
    check_finished(members[:2], like=loopback[0])
    after = int(members[0].output.partition("resumes after step ")[2].split()[0])
    assert 8 <= after < STEPS
    assert [share["rank"] for share in members[0].record["world"]] == [0, 1]


# -- who ends, with one sentence


@needs_hosts
@pytest.mark.parametrize(("count", "lost"), [(2, 0), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_a_killed_host_ends_the_others(hosts: Callable[..., Place], count: int, lost: int) -> None:
    place = hosts(count)
    members = start_all(place, count)
    wait_for_step(5, members[0])
    place.network.hosts[lost].kill()
    place.finish(END_S)
    for worker in set(members) - {members[lost]}:
        assert worker.process.returncode == LOST_MEMBER_EXIT_CODE
        assert f"Another of {count} members went away" in worker.error
        assert "--resume_from_checkpoint" in worker.error
        assert worker.record["status"] == "failed"


@needs_hosts
@pytest.mark.slow
def test_a_host_that_falls_silent_ends_the_others_in_time(hosts: Callable[..., Place]) -> None:
    place = hosts(2)
    members = start_all(place, 2, "--step_timeout_s", "5")
    wait_for_step(5, members[0])
    cut(place.network, place.network.hosts[1])  # for good
    assert place.finish(5 + END_S) == [LOST_MEMBER_EXIT_CODE] * 2
    for worker in members:
        assert "waited 5 s for it" in worker.error


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize(
    ("master", "reason"),
    [("10.77.0.9", "No route to host"), ("10.77.0.2", "Connection refused")],
    ids=["nobody has it", "of another host"],
)
def test_a_wrong_master_is_refused_on_every_host(hosts: Callable[..., Place], master: str, reason: str) -> None:
    place = hosts(2)
    for rank in range(2):
        place.start(rank, *static(rank, 2, f"{master}:{PORT}", join_s=4))
    place.finish(START_S)
    said = f"did not reach the first machine at {master}:{PORT} (--master) within 4 s"
    check_refused(place.workers, said, reason, "start rank 0 there, correct the address, or open the port")


@needs_hosts
@pytest.mark.slow
def test_a_port_that_is_taken_is_refused_on_every_host(hosts: Callable[..., Place], tmp_path: Path) -> None:
    """By somebody who listens, and never answers."""
    place = hosts(2)
    silent = f"import socket, time; s = socket.create_server(('', {PORT})); time.sleep(999)"
    stranger = place.network.hosts[0].start([sys.executable, "-c", silent], tmp_path / "stranger")
    for rank in range(2):
        place.start(rank, *static(rank, 2, join_s=4))
    wait_until(lambda: all(worker.process.poll() is not None for worker in place.workers), START_S, place.workers)
    stranger.kill()
    check_refused(place.workers)
    assert f"Rank 0 cannot listen on port {PORT} (Address already in use)" in place.workers[0].error
    assert "who listens there is not the first member" in place.workers[1].error


@needs_hosts
@pytest.mark.slow
def test_a_host_that_never_comes_is_named_on_every_host(hosts: Callable[..., Place]) -> None:
    place = hosts(2)
    for rank in range(2):
        place.start(rank, *static(rank, 3, join_s=8))
    place.finish(START_S + 8)
    check_refused(place.workers, "2 of 3 members came in time; missing: rank 2", "--join_timeout_s")


@needs_hosts
@pytest.mark.slow
def test_two_hosts_with_one_rank_are_refused(hosts: Callable[..., Place]) -> None:
    place = hosts(3)
    for host, rank in enumerate((0, 1, 1)):
        place.start(host, *static(rank, 3, join_s=8))
    place.finish(START_S + 8)
    missing = [worker for worker in place.workers if "missing: rank 2" in worker.error]
    check_refused(missing, "2 of 3 members came in time")
    (second,) = set(place.workers) - set(missing)
    check_refused([second], "Two machines have one rank: rank 1 (host", "came second")


@needs_hosts
@pytest.mark.slow
def test_a_host_with_fewer_rows_is_refused_on_every_host(hosts: Callable[..., Place], tmp_path: Path) -> None:
    other = tmp_path / "data"
    shutil.copytree(DATA, other)
    rows = json.loads((other / "train.json").read_text())
    (other / "train.json").write_text(json.dumps(rows[:64]))
    place = hosts(2)
    place.start(0, *static(0, 2))
    place.start(1, *static(1, 2), "--data", str(other))
    place.finish(START_S)
    check_refused(place.workers, "Machines differ: rank 0 (host0) has rows 65, but rank 1 (host1) has 64")
    assert place.workers[0].error == place.workers[1].error


@needs_hosts
@pytest.mark.slow
def test_a_host_with_another_library_is_refused_on_every_host(hosts: Callable[..., Place], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib import metadata\n"
        "real = metadata.version\n"
        "metadata.version = lambda name: '5.99.0' if name == 'transformers' else real(name)\n"
    )
    place = hosts(2)
    place.start(0, *static(0, 2), is_forked=False)
    place.start(1, *static(1, 2), is_forked=False, PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    place.finish(START_S)
    check_refused(place.workers, "has versions transformers 5.", "but rank 1 (host1) has transformers 5.99.0")


def test_a_world_of_one_has_nobody_to_average_with(tmp_path: Path, tiny_summarizer: str) -> None:
    place = summarizing(tmp_path, tiny_summarizer)
    place.start(0, *static(0, 1))
    place.finish(START_S)
    check_refused(place.workers, "There is a world of 1 (--master)", "start more machines")
