"""Whether this machine can make virtual hosts, and their links, which a test cuts and joins again."""

import json
import subprocess

from common.base.errors import BadInputError
from tests.network.virtual_hosts import INTERFACE, VirtualHost, VirtualNetwork, virtual_network


def namespaces_refused() -> str:
    """Why no virtual hosts can be made here, in one sentence; empty where they can."""
    try:
        with virtual_network(2):
            return ""
    except BadInputError as refusal:
        return str(refusal)


def cut(network: VirtualNetwork, host: VirtualHost) -> None:
    """Take a host's link off the bridge: packets vanish, and neither side is told."""
    subprocess.run(["ip", "-n", network.switch, "link", "set", host.port, "nomaster"], check=True)


def sent_bytes(host: VirtualHost) -> int:
    """Return what a host has sent over its link so far, headers included."""
    command = ["ip", "-n", host.namespace, "-s", "-j", "link", "show", INTERFACE]
    (link,) = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return link["stats64"]["tx"]["bytes"]


def join(network: VirtualNetwork, host: VirtualHost) -> None:
    """Put it back."""
    subprocess.run(["ip", "-n", network.switch, "link", "set", host.port, "master", "bridge"], check=True)
