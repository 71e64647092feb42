"""A part of a lease, in its own process: imports what measures, waits for `go`, measures, and writes what was found."""

import json
import sys
from importlib import import_module
from pathlib import Path

from common.records.store import write_json


def main() -> None:
    """Do the task of the command line: JSON with `call`, `arguments`, and `out`, the file for what is found."""
    task = json.loads(sys.argv[1])
    module, _, name = task["call"].partition(":")
    measure = getattr(import_module(module), name)
    if sys.stdin.readline() != "go\n":  # the lease has gone, or has no time for this part any more
        return
    write_json(measure(**task["arguments"]), Path(task["out"]))


if __name__ == "__main__":
    main()
