"""Virtual hosts reach each other and nobody else, at the rate they are held to, and nothing is left of them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.network import virtual_hosts
from tests.network.virtual_hosts import VirtualHost, VirtualNetwork, namespaces, virtual_network
from tests.network.virtual_links import cut, join
from tests.network.workers import needs_hosts
from tests.pace import patient

pytestmark = needs_hosts

LISTEN = "import socket, sys; s = socket.create_server(('', 5000)).accept()[0]; s.send(b'x' * int(sys.argv[1]))"
READ = """
import socket, sys
def reach():
    while True:
        try:
            return socket.create_connection(("10.77.0.1", 5000), timeout=1)
        except OSError:
            pass
way, got = reach(), 0
while part := way.recv(65536):
    got += len(part)
print(socket.gethostname(), got)
"""
WITHIN_S = patient(20)


def send(network: VirtualNetwork, folder: Path, size: int) -> tuple[subprocess.Popen[bytes], Path]:
    """The first host sends to the second, which says in the end how much came."""
    first, second = network.hosts[:2]
    first.start([sys.executable, "-c", LISTEN, str(size)], folder / "sender")
    return second.start([sys.executable, "-c", READ], folder / "reader"), folder / "reader"


def test_a_link_is_held_to_its_rate(tmp_path: Path) -> None:
    with virtual_network(2, mbit=20) as network:
        start_s = time.perf_counter()
        reader, log = send(network, tmp_path, 5_000_000)
        assert reader.wait(WITHIN_S) == 0
        took_s = time.perf_counter() - start_s
        assert log.read_text() == "host1 5000000\n"
        assert took_s > 0.9 * 5 * 8 / 20  # and not much longer, but for a busy machine


def test_hosts_reach_each_other_unless_a_link_is_cut_until_it_is_joined(tmp_path: Path) -> None:
    with virtual_network(3) as network:
        assert [host.address for host in network.hosts] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
        cut(network, network.hosts[1])
        reader, log = send(network, tmp_path, 1000)
        time.sleep(1)
        assert reader.poll() is None
        join(network, network.hosts[1])
        assert reader.wait(WITHIN_S) == 0
        assert log.read_text() == "host1 1000\n"


def test_a_killed_host_has_no_process_and_the_others_have(tmp_path: Path) -> None:
    with virtual_network(2) as network:
        sleepers = [host.start(["sh", "-c", "sleep 99 & sleep 99"], tmp_path / "log") for host in network.hosts]
        while [len(host.processes()) for host in network.hosts] != [3, 3]:
            time.sleep(0.02)
        network.hosts[0].kill()
        assert [len(host.processes()) for host in network.hosts] == [0, 3]
    assert sleepers[1].wait(WITHIN_S) == -9


def test_nothing_is_left_also_where_something_failed(tmp_path: Path) -> None:
    def fail() -> None:
        with virtual_network(2) as network:
            network.hosts[0].start(["sleep", "99"], tmp_path / "log")
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert not [name for name in namespaces() if f"-{os.getpid()}-" in name]


def test_what_a_crashed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    crash = "import os, signal; from tests.network.virtual_hosts import virtual_network\n"
    crash += "with virtual_network(2) as network: network.hosts[1].start(['sleep', '99'], __import__('pathlib').Path("
    crash += f"{str(tmp_path / 'log')!r})); os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.Popen([sys.executable, "-c", crash])
    done.wait(WITHIN_S)
    left = [name for name in namespaces() if f"-{done.pid}-" in name]
    assert len(left) == 3
    assert any(VirtualHost(0, name).processes() for name in left)
    with virtual_network(2):
        assert not [name for name in namespaces() if f"-{done.pid}-" in name]


def test_the_command_line_fills_in_marks_lines_and_ends_with_the_worst_code() -> None:
    command = ["sh", "-c", "echo {rank} with {master} {other}; exit {rank}"]
    options = [sys.executable, virtual_hosts.__file__, "--hosts", "3", "--", *command]
    done = subprocess.run(options, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 2
    assert sorted(done.stdout.splitlines()) == [f"host{rank} | {rank} with 10.77.0.1 {{other}}" for rank in range(3)]
