"""torchrun: the words that start ranks, and where ranks of one machine meet."""

import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from common.base.errors import RunStoppedError

KEPT_S = 24 * 60 * 60  # how long what a killed process has left where ranks meet stays at least


def nodes_command(nodes: int, ranks_per_node: int, address: str = "ADDRESS") -> list[str]:
    """Return what starts the ranks of one machine, without the script: of several the same on each of them.

    Several machines meet at `address`, the first one's. On one machine they meet in a file of this user's alone:
    torchrun unpickles what it finds there, so that whoever reached a port of it could have code run.
    """
    words = ["--nnodes", str(nodes)] if nodes > 1 else []
    place = ["--rdzv_endpoint", f"{address}:29400"] if nodes > 1 else ["--rdzv_conf", "store_type=file"]
    return ["torchrun", *words, "--nproc_per_node", str(ranks_per_node), "--rdzv_backend", "c10d", *place]


def meeting_file() -> str:
    """Return a new file for torchruns of one machine to meet in, after those of killed processes are removed."""
    import psutil  # here: few commands start ranks

    folder = folder_of_user()
    for path in folder.glob("[0-9]*-*"):
        process = path.name.partition("-")[0]
        with suppress(FileNotFoundError):
            is_old = time.time() - path.stat().st_mtime > KEPT_S  # where machines share the folder, others' go on
            if is_old and process.isdigit() and not psutil.pid_exists(int(process)):
                path.unlink()
    descriptor, path = tempfile.mkstemp(prefix=f"{os.getpid()}-", dir=folder)
    os.close(descriptor)
    return path


def folder_of_user() -> Path:
    """Return the folder where this user's launchers and ranks meet; RunStoppedError if others can write into it."""
    folder = Path(tempfile.gettempdir(), f"ranks-of-user-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise RunStoppedError(f"{folder}, where ranks meet, can be written by others: remove it, or set TMPDIR.")
    return folder
