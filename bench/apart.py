"""Calls a function in a process of its own, with one thread, so that nothing that was measured before is in its way."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from common.base.paths import REPOSITORY
from common.records.store import write_json
from common.runtime.torchrun import nodes_command


def measured_apart(call: Callable[..., Any], ranks: int = 1, **arguments: Any) -> Any:
    """Return what a function finds, called in another process, or by that many ranks, whose rank 0 tells.

    Arguments and result are what JSON can hold. What the process says goes to standard error.

    Raises:
        subprocess.CalledProcessError: it failed, and said why.
    """
    launcher = ["-m", "torch.distributed.run", *nodes_command(1, ranks)[1:]] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        task = {"call": f"{call.__module__}:{call.__name__}", "arguments": arguments, "out": str(out)}
        command = [sys.executable, *launcher, "-m", "bench.apart", json.dumps(task)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        subprocess.run(command, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, stdout=2, check=True)
        return json.loads(out.read_text(encoding="utf-8"))


def main() -> None:
    """Do the task of the command line: JSON with `call`, `arguments`, and `out`, the file for what is found.

    With `waits` the call is imported, and begins once standard input says `go`.
    """
    task = json.loads(sys.argv[1])
    module, _, name = task["call"].partition(":")
    measure = getattr(import_module(module), name)
    if "waits" in task and sys.stdin.readline() != "go\n":  # the lease has gone, or has no time for this any more
        return
    found = measure(**task["arguments"])
    if os.environ.get("RANK", "0") == "0":
        write_json(found, Path(task["out"]))


if __name__ == "__main__":
    main()
