"""Whether this machine can make virtual hosts, and their links, which a test cuts and joins again."""

import subprocess

from common.base.errors import BadInputError
from common.runtime.virtual_hosts import HOSTS, VirtualHost, VirtualNetwork, virtual_network


def namespaces_refused() -> str:
    """Why no virtual hosts can be made here, in one sentence; empty where they can."""
    try:
        with virtual_network(HOSTS[0]):
            return ""
    except BadInputError as refusal:
        return str(refusal)


def cut(network: VirtualNetwork, host: VirtualHost) -> None:
    """Take a host's link off the bridge: packets vanish, and neither side is told."""
    subprocess.run(["ip", "-n", network.switch, "link", "set", host.port, "nomaster"], check=True)


def join(network: VirtualNetwork, host: VirtualHost) -> None:
    """Put it back."""
    subprocess.run(["ip", "-n", network.switch, "link", "set", host.port, "master", "bridge"], check=True)
