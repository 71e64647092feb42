"""Several machines that work on one run: what each says of itself, whether all agree, and the network between them."""

import json
import os
import platform
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY, find_here
from common.base.run_config import RunConfig
from common.planning.model_configs import cached_commit

COMPARED_PACKAGES = ("torch", "transformers", "accelerate")
LOOPBACK = "127.0.0.1"
LOOPBACKS = ("127.", "::1")
LAST_BYTES = 2**16
READ_WHOLE = ("config.json", "*.index.json", "tokenizer*", "chat_template*", "additional_chat_templates/*", "vocab.*",
              "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model")  # fmt: skip
ELSEWHERE = "192.0.2.1"  # an address that no machine has (RFC 5737): the default route leads to it
OWN_COLUMNS = ("where", "picture")  # of a row: where it stands, and its picture's file (of which it has a digest)
OWN_SETTINGS = ("model", "data", "resume_from_checkpoint", "results_root")  # paths may differ between machines


def member_of(rank: int, run: RunConfig, rows: Sequence[Mapping[str, object]]) -> dict[str, Any]:
    """Return what this process says of its machine: all but `who` must be the same everywhere.

    `data` is a digest of the training `rows` before they are divided, `code` one of the modules that the run executes.
    """
    code = sorted([*REPOSITORY.glob("common/**/*.py"), *(REPOSITORY / run.run_folder).glob("*.py")])
    return {
        "who": f"rank {rank} ({socket.gethostname()})",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in COMPARED_PACKAGES}},
        "code": _digest(
            str(path.relative_to(REPOSITORY)).encode() + b"\0" + path.read_bytes() + b"\0" for path in code
        ),
        "settings": {name: value for name, value in run.to_dict().items() if name not in OWN_SETTINGS},
        "rows": len(rows),
        "data": digest_of_rows(rows),
        "model": digest_of_model(run),
    }


def digest_of_rows(rows: Iterable[Mapping[str, object]]) -> str:
    """Return 12 hexadecimal digits of what rows hold, wherever their files are."""
    contents = ({name: value for name, value in row.items() if name not in OWN_COLUMNS} for row in rows)
    return _digest(json.dumps(content, sort_keys=True, default=str).encode() for content in contents)


def _digest(parts: Iterable[bytes]) -> str:
    digest = sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:12]


def digest_of_model(run: RunConfig) -> str:
    """Return the commit of a model of the Hub, or 12 digits of a folder's configuration, tokenizer and weights.

    Of files of weights the index, names, sizes and last bytes: to read all of a large model takes minutes.
    """
    folder = find_here(run.model, os.path.isdir)
    if folder is None:
        return cached_commit(run.model, run.model_revision) or "not in the cache"
    return _digest(_parts_of_model(folder))


def _parts_of_model(folder: Path) -> Iterator[bytes]:
    for pattern in READ_WHOLE:
        for path in filter(Path.is_file, sorted(folder.glob(pattern))):
            yield path.name.encode() + path.read_bytes()
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    yield json.dumps([(path.name, path.stat().st_size) for path in files]).encode()
    for path in files:
        with path.open("rb") as file:
            file.seek(-min(path.stat().st_size, LAST_BYTES), os.SEEK_END)
            yield file.read()


def check_members_agree(members: Sequence[Mapping[str, Any]]) -> None:
    """Refuse machines that would not train one model on one set of rows; everyone sees the same list."""
    first, *others = members
    for other, what in product(others, ("versions", "code", "settings", "rows", "data", "model")):
        mine, theirs = _different(first[what], other[what])
        if mine != theirs:
            raise BadInputError(
                f"Machines differ: {first['who']} has {what} {mine}, but {other['who']} has {theirs}; give all the "
                "same."
            )


def _different(mine: object, theirs: object) -> tuple[object, object]:
    """Return of two dictionaries what differs, and other values as they are."""
    if not isinstance(mine, Mapping) or not isinstance(theirs, Mapping):
        return mine, theirs
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    return tuple(", ".join(f"{name} {side.get(name, 'missing')}" for name in names) for side in (mine, theirs))


def use_interface_to(address: str, port: int) -> None:
    """Let gloo and NCCL use the network interface by which `address` is reached: gloo would take the host name's.

    A machine's own name may lead to its loopback (Debian's 127.0.1.1), where nobody else reaches it: then the interface
    of the default route is used, or none is named.
    """
    variables = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ]
    own = own_address_towards(address, port)
    if own.startswith(LOOPBACKS) and not address.startswith((*LOOPBACKS, "localhost")):
        own = own_address_towards(ELSEWHERE, port)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == own for each in addresses):
            os.environ |= dict.fromkeys(variables, name)
            return


def own_address_towards(address: str, port: int) -> str:
    """Return this machine's address on the route to another; empty where there is no route."""
    family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(place)  # sends nothing, but chooses the route
        except OSError:
            return ""
        return probe.getsockname()[0].partition("%")[0]
