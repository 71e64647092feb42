"""Several hosts on one Linux machine: network namespaces joined by a bridge, each with an address of its own.

What is sent between them goes over TCP as between machines: links can be slow, cut and mended, hosts can die. As root:
    python -m common.virtual_hosts --hosts 3 --mbit 100 -- python my_workflow.py --master {master} --machines {hosts} --machine_rank {rank}
runs the command on each host, with its {rank}, its own {address}, the number of {hosts} and the first's address
{master} filled in. Disk, memory and processors stay those of the one machine.
"""  # noqa: E501  # a command on one line

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import psutil

from common.base.errors import BadInputError

HOSTS = (2, 4)
"""So few and so many hosts."""
NAME = re.compile(r"virtual-(\d+)-")
"""How the namespaces' names begin: with the process that made them."""
SUBNET = "10.77.0"
"""It exists between the namespaces only."""
INTERFACE = "eth0"
"""A host's own, in its namespace."""
QUEUE_MS = 50
"""Packets that wait longer for a held link are dropped, as a switch with a full buffer does."""
BURST_MS = 5
"""What may pass at once on a held link, in milliseconds of its rate: a kernel's timer tick or more (tc-tbf(8))."""
LEAST_BURST_BYTES = 65_536
"""The largest segment that TCP hands to an interface at once."""
END_S = 5.0
"""How long processes and their namespace may take to go."""


@dataclass(frozen=True)
class VirtualHost:
    """One host, by its number from 0."""

    number: int
    namespace: str

    @property
    def address(self) -> str:
        """Its IPv4 address."""
        return f"{SUBNET}.{self.number + 1}"

    @property
    def port(self) -> str:
        """The bridge's end of its link."""
        return f"port{self.number}"

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """A command on this host, under the host's own name, in a process group of its own; it prints into `log`."""
        name_first = f'echo host{self.number} > /proc/sys/kernel/hostname; exec "$@"'
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", name_first, "sh"]
        with log.open("wb") as file:
            return subprocess.Popen(
                [*inside, *command],
                cwd=cwd,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> list[int]:
        """The numbers of all processes on this host."""
        return [int(number) for number in _ip("netns", "pids", self.namespace).split()]

    def kill(self) -> None:
        """End everything on this host at once, as a power cut would; the kernel still closes its connections."""
        deadline = time.monotonic() + END_S
        while (left := self.processes()) and time.monotonic() < deadline:
            for number in left:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.02)


@dataclass(frozen=True)
class VirtualNetwork:
    """Hosts, and the switch between them."""

    hosts: tuple[VirtualHost, ...]
    switch: str
    """The namespace that the bridge is in."""

    def cut(self, host: VirtualHost) -> None:
        """Take a host's link off the bridge: packets vanish, and neither side is told."""
        _ip("-n", self.switch, "link", "set", host.port, "nomaster")

    def mend(self, host: VirtualHost) -> None:
        """Put it back."""
        _ip("-n", self.switch, "link", "set", host.port, "master", "bridge")


def namespaces_refused() -> str:
    """Why no virtual hosts can be made here, in one sentence; empty where they can."""
    missing = [tool for tool in ("ip", "tc", "unshare") if not shutil.which(tool)]
    if missing:
        return f"{', '.join(missing)} is not installed: `apt-get install iproute2 util-linux`"
    try:
        with virtual_network(HOSTS[0]):
            return ""
    except BadInputError as refusal:
        return str(refusal)


@contextmanager
def virtual_network(count: int, mbit: float = 0.0, delay_ms: float = 0.0) -> Iterator[VirtualNetwork]:
    """So many hosts, each with its link to the bridge; processes and namespaces are gone afterwards in any case.

    `mbit`: what each link carries in each direction, in 10^6 bits per second; 0 = as much as the machine can.
    `delay_ms`: how much later each packet leaves its host; a round trip takes twice as much longer.

    Raises:
        BadInputError: this machine does not allow it, or its kernel cannot delay packets.
    """
    remove_leftovers()
    if not HOSTS[0] <= count <= HOSTS[1]:
        raise BadInputError(f"hosts is {count}: pass {HOSTS[0]} to {HOSTS[1]}.")
    prefix = f"virtual-{os.getpid()}-{time.monotonic_ns() % 10**9}-"
    hosts = tuple(VirtualHost(number, f"{prefix}host{number}") for number in range(count))
    network = VirtualNetwork(hosts, f"{prefix}switch")
    try:
        _make(network)
        for host in hosts:
            _hold(host, network, mbit, delay_ms)
        yield network
    finally:
        _remove([*(host.namespace for host in hosts), network.switch])


def remove_leftovers() -> None:
    """Remove what processes that are gone have left."""
    _remove([name for name in namespaces() if not psutil.pid_exists(int(NAME.match(name)[1]))])


def namespaces() -> list[str]:
    """The names of all virtual hosts and switches of this machine."""
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if NAME.match(line)]


def _make(network: VirtualNetwork) -> None:
    for namespace in (network.switch, *(host.namespace for host in network.hosts)):
        _ip("netns", "add", namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
    _ip("-n", network.switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", network.switch, "link", "set", "bridge", "up")
    for host in network.hosts:
        pair = ("type", "veth", "peer", "name", INTERFACE, "netns", host.namespace)
        _ip("-n", network.switch, "link", "add", host.port, *pair)
        _ip("-n", network.switch, "link", "set", host.port, "master", "bridge", "up")
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
        _ip("-n", host.namespace, "link", "set", INTERFACE, "up")


def _hold(host: VirtualHost, network: VirtualNetwork, mbit: float, delay_ms: float) -> None:
    """Hold a host's link to a rate at both ends, each of which limits what it sends, and delay what the host sends."""
    ends = {host.namespace: INTERFACE, network.switch: host.port}
    if mbit:
        burst = max(LEAST_BURST_BYTES, round(mbit * 1e3 / 8 * BURST_MS))
        held = ("tbf", "rate", f"{mbit:g}mbit", "burst", f"{burst}", "latency", f"{QUEUE_MS}ms")
        for namespace, interface in ends.items():
            _tc(namespace, interface, "root", "handle", "1:", *held)
    if delay_ms:
        place = ("parent", "1:1") if mbit else ("root",)
        late = ("netem", "delay", f"{delay_ms:g}ms", "limit", "100000")
        _tc(host.namespace, INTERFACE, *place, *late, advice="a kernel without netem delays nothing; pass --delay_ms 0")


def _remove(names: Sequence[str]) -> None:
    """End what runs in namespaces, then remove them: their interfaces go with them."""
    there = set(namespaces()) & set(names)
    for name in there:
        VirtualHost(0, name).kill()
        _ip("netns", "delete", name)


def _tc(namespace: str, interface: str, *arguments: str, **advice: str) -> None:
    _command("tc", "-n", namespace, "qdisc", "add", "dev", interface, *arguments, **advice)


def _ip(*arguments: str) -> str:
    return _command("ip", *arguments)


def _command(*words: str, advice: str = "virtual hosts need root, on Linux") -> str:
    """What a command of iproute2 prints.

    Raises:
        BadInputError: it refuses, with its own reason.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().replace("\n", "; ") or f"exit code {done.returncode}"
        raise BadInputError(f"`{' '.join(words)}` was refused ({reason.rstrip('.')}): {advice}.")
    return done.stdout


# -- on the command line


def run_on_each(network: VirtualNetwork, command: Sequence[str]) -> int:
    """Run a command on each host, with its places filled in; prints `host1 | ` before a line; the worst exit code."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"host{host.number}.log" for host in network.hosts]
        started = [
            host.start([filled(word, host, network) for word in command], log)
            for host, log in zip(network.hosts, logs, strict=True)
        ]
        readers = [
            Thread(target=_follow, args=(log, process, f"host{number} | "))
            for number, (log, process) in enumerate(zip(logs, started, strict=True))
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        codes = [process.returncode for process in started]
        return max(code if code >= 0 else 128 - code for code in codes)  # as a shell says which signal it was


def filled(word: str, host: VirtualHost, network: VirtualNetwork) -> str:
    """A word of a command, with what it says of a host filled in; other braces stay."""
    values = {
        "rank": host.number, "hosts": len(network.hosts), "master": network.hosts[0].address, "address": host.address,
    }  # fmt: skip
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", str(value))
    return word


def _follow(log: Path, process: subprocess.Popen[bytes], prefix: str) -> None:
    """Print a log's lines as they come, until the process has ended."""
    with log.open(encoding="utf-8", errors="replace") as file:
        while True:
            ended = process.poll() is not None  # before the last look
            for line in file:
                sys.stdout.write(prefix + line.rstrip("\n") + "\n")  # at once, as threads print side by side
                sys.stdout.flush()
            if ended:
                return
            time.sleep(0.1)


def main() -> None:
    """`python -m common.virtual_hosts --hosts 3 --mbit 100 -- COMMAND`: run a command on virtual hosts."""
    parser = argparse.ArgumentParser(description="Run a command on each of several virtual hosts.", allow_abbrev=False)
    parser.add_argument("--hosts", type=int, default=2, help=f"how many: {HOSTS[0]} to {HOSTS[1]}")
    parser.add_argument("--mbit", type=float, default=0.0, help="what each link carries, in Mbit/s; 0 = not limited")
    parser.add_argument("--delay_ms", type=float, default=0.0, help="how much later each packet leaves its host, in ms")
    parser.add_argument("command", nargs="+", help="after --, with {rank}, {hosts}, {master}, {address} to fill in")
    options = parser.parse_args()
    try:
        with virtual_network(options.hosts, options.mbit, options.delay_ms) as network:
            code = run_on_each(network, options.command)
    except BadInputError as mistake:
        parser.exit(2, f"error: {mistake}\n")
    sys.exit(code)
