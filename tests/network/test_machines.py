"""The machines workflow over TCP between hosts of their own: it finishes, or ends and says why, and never hangs.

Hosts are network namespaces (`virtual_hosts.py`), each with its own folder for results, as with a disk of its own.
Where these are not allowed, two ranks on loopback train one model.
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

from common.base.paths import REPOSITORY
from common.runtime.torchrun import nodes_command
from common.runtime.watch import SLOW_FACTOR
from tests.fixtures import trained_weights
from tests.network.virtual_hosts import namespaces, virtual_network
from tests.network.virtual_links import cut, join
from tests.network.workers import END_S, RUN_S, START_S, Place, Worker, needs_hosts, wait_until
from tests.pace import patient

SCRIPT = REPOSITORY / "3.2_summarization" / "run_0_cpu_x2" / "my_workflow_summarization_machines.py"
DATA = REPOSITORY / "assets" / "chat_summaries"
STEPS, PARTITIONS = 20, 3
RUN = ("--train_rows", "65", "--validation_rows", "17", "--test_rows", "5", "--report_to", "none", "--batch_size", "4",
       "--max_new_tokens", "8", "--num_beams", "1", "--max_steps", f"{STEPS}", "--eval_steps", f"{1 / STEPS}",
       "--save_steps", "1", "--partitions", f"{PARTITIONS}", "--run_name", "test")  # fmt: skip
OTHER_LIBRARY = """
import os, runpy, sys
from importlib import metadata
real = metadata.version
metadata.version = lambda name: "5.99.0" if name == "transformers" else real(name)
del sys.argv[0]
sys.path[0] = os.getcwd()
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def weights(worker: Worker) -> dict[str, torch.Tensor]:
    """Those that it has kept itself, after the last step."""
    return trained_weights(worker.results / "checkpoints" / f"checkpoint-{STEPS}")


def wait_for_step(step: int, worker: Worker) -> None:
    wait_until(lambda: worker.has_said(f"step {step}/{STEPS}:"), START_S + RUN_S, [worker])


@pytest.fixture
def hosts(tmp_path: Path, tiny_summarizer: str) -> Iterator[Callable[..., Place]]:
    """Make virtual hosts; afterwards none is left."""
    with ExitStack() as stack:

        def make(count: int) -> Place:
            return Place(
                tmp_path, SCRIPT, (*RUN, "--model", tiny_summarizer), stack.enter_context(virtual_network(count))
            )

        yield make
    assert not [name for name in namespaces() if f"-{os.getpid()}-" in name]


@pytest.fixture(scope="module")
def loopback(tmp_path_factory: pytest.TempPathFactory, tiny_summarizer: str) -> list[Worker]:
    """Two torchruns on this machine, each with a disk of its own, with the rows of three; they have finished."""
    place, address = Place(tmp_path_factory.mktemp("loopback"), SCRIPT, (*RUN, "--model", tiny_summarizer)), "127.0.0.1"
    own = [*nodes_command(2, 1, address)[1:-1], f"{address}:{get_free_port()}", "--local_addr", address]
    for _ in range(2):
        launcher = [sys.executable, "-m", "torch.distributed.run", *own]
        place.start(0, "--devices", "2", "--nodes", "2", launcher=launcher)
    return place.finish_well()


def check_finished(workers: Sequence[Worker], like: Worker) -> None:
    """All have one model, each on its own disk, and the steps were those of another run, whoever took them."""
    first, reference = workers[0].record, like.record
    for kind, first_step in (("training_losses", 1), ("validation_losses", 0)):
        assert [step for step, _ in first[kind]] == list(range(first_step, STEPS + 1))
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


def check_refused(place: Place, *said: str) -> None:
    """Each ended, said all this, and wrote nothing."""
    assert all(place.finish(START_S + END_S))
    for worker in place.workers:
        for text in said:
            assert text in worker.output
        assert not worker.results.exists()


# -- who finishes


def test_two_ranks_on_loopback_train_one_model(loopback: list[Worker]) -> None:
    check_finished(loopback, like=loopback[0])
    shares = [worker.output.partition("this rank trains on ")[2].split()[0] for worker in loopback]
    assert sorted(shares) == ["22", "43"]  # of three parts with 22, 22 and 21 rows the second, and the others


@needs_hosts
@pytest.mark.slow
def test_three_hosts_train_the_model_of_one_though_one_is_late_and_a_link_is_away(
    hosts: Callable[..., Place], loopback: list[Worker]
) -> None:
    place = hosts(3)
    for number, comes_after_s in enumerate((0, 0, 5)):
        time.sleep(comes_after_s)
        place.start_ranks(number)
    wait_for_step(3, place.workers[0])
    cut(place.network, place.network.hosts[1])
    time.sleep(10)  # torchrun looks for it after 3 s
    assert [worker.process.poll() for worker in place.workers] == [None] * 3
    assert not place.workers[0].has_said(f"step {STEPS}/{STEPS}")
    join(place.network, place.network.hosts[1])
    check_finished(place.finish_well(RUN_S), like=loopback[0])
    assert [share["host"] for share in place.workers[1].record["world"]] == ["machine0", "machine1", "machine2"]


@needs_hosts
@pytest.mark.slow
def test_two_hosts_go_on_when_torchrun_loses_the_third(hosts: Callable[..., Place], loopback: list[Worker]) -> None:
    """From the last checkpoint, and with the same steps: one takes over the lost one's part of the rows."""
    place = hosts(3)
    members = place.start_all(nodes="2:3", max_restarts=1)
    kept = [worker.results / "checkpoints" / "checkpoint-4" for worker in members[:2]]
    wait_until(lambda: all(folder.is_dir() for folder in kept), START_S + RUN_S, members)
    place.network.hosts[2].kill()
    time.sleep(0.5)  # without the third nobody ends a step, or writes
    shutil.rmtree(members[1].results / "checkpoints")  # its disk was lost: it gets all from the other
    assert place.finish()[:2] == [0, 0], [worker.output for worker in members]
    check_finished(members[:2], like=loopback[0])
    assert 4 <= members[0].resumed_after < STEPS
    assert [share["rank"] for share in members[0].record["world"]] == [0, 1]


# -- who ends, and says why


@needs_hosts
@pytest.mark.parametrize(
    ("count", "lost", "max_restarts"),
    [(2, 0, 0), pytest.param(2, 0, 1, marks=pytest.mark.slow), pytest.param(3, 2, 0, marks=pytest.mark.slow)],
)
def test_a_killed_host_ends_the_others(hosts: Callable[..., Place], count: int, lost: int, max_restarts: int) -> None:
    """Also the one with the rendezvous, without which torchrun starts nobody again."""
    place = hosts(count)
    members = place.start_all(max_restarts=max_restarts)
    wait_for_step(3, members[0])
    place.network.hosts[lost].kill()
    assert all(place.finish(END_S))
    for worker in set(members) - {members[lost]}:
        said = "start the same command again on all machines with --resume_from_checkpoint last"
        assert worker.has_said(said), worker.output
        assert worker.record["status"] in ("failed", "interrupted")


@needs_hosts
@pytest.mark.slow
def test_a_host_that_falls_silent_ends_the_others_in_time(hosts: Callable[..., Place]) -> None:
    place, timeout_s = hosts(2), round(patient(5))
    members = place.start_all("--step_timeout_s", f"{timeout_s}", rdzv_conf="read_timeout=5")
    wait_for_step(3, members[0])
    cut(place.network, place.network.hosts[1])  # for good
    wait_until(lambda: members[0].process.poll() is not None, SLOW_FACTOR * 5 + END_S, members)  # at a checkpoint
    for worker in members:
        said = (f"(step_timeout_s is {timeout_s})", "as another rank is gone (Timed out")
        assert any(worker.has_said(text) for text in said)


@needs_hosts
@pytest.mark.slow
def test_an_address_that_nobody_has_is_named_on_every_host(hosts: Callable[..., Place]) -> None:
    place = hosts(2)
    place.start_all(address="10.77.0.9:29400", rdzv_conf="is_host=0,read_timeout=4")
    check_refused(place, "RendezvousConnectionError", "(10.77.0.9, 29400)")


@needs_hosts
@pytest.mark.slow
def test_a_host_that_never_comes_ends_the_others(hosts: Callable[..., Place]) -> None:
    place = hosts(3)
    for number in range(2):
        place.start_ranks(number, rdzv_conf="join_timeout=8")
    check_refused(place, "torch.distributed.elastic.rendezvous.api.Rendezvous")  # TimeoutError, or of the first's end


@needs_hosts
@pytest.mark.slow
def test_a_host_with_fewer_rows_is_refused_on_every_host(hosts: Callable[..., Place], tmp_path: Path) -> None:
    other = tmp_path / "data"
    shutil.copytree(DATA, other)
    rows = json.loads((other / "train.json").read_text())
    (other / "train.json").write_text(json.dumps(rows[:64]))
    place = hosts(2)
    place.start_ranks(0)
    place.start_ranks(1, "--data", str(other))
    check_refused(place, "Machines differ: rank 0 (host0) has rows 65, but rank 1 (host1) has 64")


@needs_hosts
@pytest.mark.slow
def test_a_host_with_another_library_is_refused_on_every_host(hosts: Callable[..., Place], tmp_path: Path) -> None:
    (tmp_path / "other_library.py").write_text(OTHER_LIBRARY)
    place = hosts(2)
    place.start_ranks(0)
    place.start_ranks(1, by=[str(tmp_path / "other_library.py")])
    check_refused(place, "has versions transformers 5.", "but rank 1 (host1) has transformers 5.99.0")
