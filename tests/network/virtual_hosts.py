r"""Several hosts on one Linux machine: network namespaces joined by a bridge, each with an address of its own.

What is sent between them goes over TCP as between machines: links can be slow, hosts can die. As root, in a run folder:
    python ../../tests/network/virtual_hosts.py --mbit 100 -- torchrun --nnodes 2 --nproc_per_node 1 \
        --rdzv_backend c10d --rdzv_endpoint {master}:29400 my_workflow.py --devices 2 --nodes 2
runs the command on each host, with its {rank} and the first host's address {master} filled in. Disk, memory and
processors stay those of the one machine.
"""

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

import psutil
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from common.base.command_line import refused_in_one_sentence
from common.base.errors import BadInputError
from common.base.parsing import OneSentenceParser

NAME = re.compile(r"virtual-(\d+)-")  # how the namespaces' names begin: with the process that made them
SUBNET = "10.77.0"  # it exists between the namespaces only
NAMED_FILES = Path("/etc/netns")  # where `ip netns exec` finds files that stand for those in /etc (ip-netns(8))
INTERFACE = "eth0"  # a host's own, in its namespace
QUEUE_MS = 50  # packets that wait longer for a limited link are dropped, as a switch with a full buffer does
BURST_MS = 5  # what may pass at once on a limited link, in ms of its rate: a kernel's timer tick or more (tc-tbf(8))
LEAST_BURST_BYTES = 65_536  # the largest segment that TCP hands to an interface at once
END_S = 5.0  # how long processes and their namespace may take to end
# a bridge in a namespace of its own, and for each host a namespace with a link to the bridge
SWITCH_SETUP = (
    "ip netns add {switch}",
    "ip -n {switch} link set lo up",
    "ip -n {switch} link add bridge type bridge",
    "ip -n {switch} link set bridge up",
)
HOST_SETUP = (
    "ip netns add {host.namespace}",
    "ip -n {host.namespace} link set lo up",
    "ip -n {switch} link add {host.port} type veth peer name {interface} netns {host.namespace}",
    "ip -n {switch} link set {host.port} master bridge up",
    "ip -n {host.namespace} address add {host.address}/24 dev {interface}",
    "ip -n {host.namespace} link set {interface} up",
)


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
        """Start a command on this host, under the host's own name, in a session of its own; it prints into `log`."""
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
        """Return the numbers of all processes on this host."""
        return [int(number) for number in _command(f"ip netns pids {self.namespace}").split()]

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
    """Hosts, and the namespace of the switch (a bridge) between them."""

    hosts: tuple[VirtualHost, ...]
    switch: str


@contextmanager
def virtual_network(count: int, mbit: float = 0.0) -> Iterator[VirtualNetwork]:
    """Make `count` hosts, each with its link to the bridge; their processes and namespaces always end with the block.

    `mbit`: what each link carries in each direction, in 10^6 bits per second; 0 = as much as the machine can.

    Raises:
        BadInputError: If this machine does not allow it.
    """
    _remove([name for name in namespaces() if not psutil.pid_exists(int(NAME.match(name)[1]))])  # of crashed processes
    for folder in NAMED_FILES.glob("virtual-*"):  # and of a machine that was started anew
        if folder.name not in namespaces():
            shutil.rmtree(folder, ignore_errors=True)  # another process may be removing it as well
    prefix = f"virtual-{os.getpid()}-{time.monotonic_ns() % 10**9}-"
    hosts = tuple(VirtualHost(number, f"{prefix}host{number}") for number in range(count))
    network = VirtualNetwork(hosts, f"{prefix}switch")
    try:
        for command in SWITCH_SETUP:
            _command(command.format(switch=network.switch))
        for host in hosts:
            for command in HOST_SETUP:
                _command(command.format(switch=network.switch, host=host, interface=INTERFACE))
            if mbit:
                _limit(host, network, mbit)
        names = ["127.0.0.1 localhost", *(f"{host.address} host{host.number}" for host in hosts)]
        for host in hosts:  # each finds all by name, as machines of one network do
            folder = NAMED_FILES / host.namespace
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("\n".join(names) + "\n")
        yield network
    finally:
        _remove([*(host.namespace for host in hosts), network.switch])


def namespaces() -> list[str]:
    """Return the names of all virtual hosts and switches of this machine."""
    return [line.split()[0] for line in _command("ip netns list").splitlines() if NAME.match(line)]


def _limit(host: VirtualHost, network: VirtualNetwork, mbit: float) -> None:
    """Limit a host's link to a rate at both ends, each of which limits what it sends."""
    burst = max(LEAST_BURST_BYTES, round(mbit * 1e3 / 8 * BURST_MS))
    rate = f"root tbf rate {mbit:g}mbit burst {burst} latency {QUEUE_MS}ms"
    _command(f"tc -n {host.namespace} qdisc add dev {INTERFACE} {rate}")
    _command(f"tc -n {network.switch} qdisc add dev {host.port} {rate}")


def _remove(names: Sequence[str]) -> None:
    """End what runs in namespaces, then remove them: their interfaces go with them."""
    there = set(namespaces()) & set(names)
    for name in there:
        VirtualHost(0, name).kill()
        _command(f"ip netns delete {name}")
        shutil.rmtree(NAMED_FILES / name, ignore_errors=True)


def _command(command: str) -> str:
    """Return what a command of iproute2 prints.

    Raises:
        BadInputError: If it is not installed, or refuses, with its own reason.
    """
    words = command.split()
    if not shutil.which(words[0]):
        raise BadInputError(f"{words[0]} is not installed: `apt-get install iproute2`.")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().replace("\n", "; ") or f"exit code {done.returncode}"
        raise BadInputError(f"`{command}` was refused ({reason.rstrip('.')}): virtual hosts need root, on Linux.")
    return done.stdout


# -- on the command line


def run_on_each(network: VirtualNetwork, command: Sequence[str]) -> int:
    """Run a command on each host, its placeholders filled in, with `host1 | ` before lines; return the worst code."""
    with tempfile.TemporaryDirectory() as folder:
        logs = {host.number: Path(folder) / f"host{host.number}.log" for host in network.hosts}
        started = [
            host.start([filled(word, host, network) for word in command], logs[host.number]) for host in network.hosts
        ]
        printed = TailLog("host", logs, sys.stdout, {number: f"host{number} | " for number in logs}).start()
        try:
            codes = [process.wait() for process in started]
        finally:
            printed.stop()  # once all is printed
    return max(code if code >= 0 else 128 - code for code in codes)  # as a shell says which signal it was


def filled(word: str, host: VirtualHost, network: VirtualNetwork) -> str:
    """Return a word of a command with its placeholders filled in for a host; other braces stay."""
    return word.replace("{rank}", str(host.number)).replace("{master}", network.hosts[0].address)


@refused_in_one_sentence()
def main() -> None:
    """Run a command on virtual hosts."""
    parser = OneSentenceParser(description="Run a command on each of several virtual hosts.")
    parser.add_argument("--hosts", type=int, default=2, help="how many")
    parser.add_argument("--mbit", type=float, default=0.0, help="what each link carries, in Mbit/s; 0 = not limited")
    parser.add_argument("command", nargs="+", help="after --, with {rank} and {master} to fill in")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # TailLog does not flush what it prints
    with virtual_network(options.hosts, options.mbit) as network:
        sys.exit(run_on_each(network, options.command))


if __name__ == "__main__":
    main()
