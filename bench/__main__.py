"""The benchmark: `python -m bench [PART ...]` measures all, or some parts, and puts their figures into `bench.json`."""

import argparse
import json
import os
import sys
from dataclasses import asdict
from importlib import import_module

from bench.entries import save

# A part is a module of that name with a function `entries`
PARTS = ("training", "real", "vocabulary", "scaling", "planner", "gpu")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all where none is named")
    parser.add_argument("--quick", action="store_true", help="a little of each, to see that it works: nothing is kept")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}.")
    os.environ["HF_HUB_OFFLINE"] = "1"  # before a library reads it: what is measured needs no network
    for part in options.parts or PARTS:
        print(f"== {part}", file=sys.stderr, flush=True)
        entries = import_module(f"bench.{part}").entries(options.quick)
        if not options.quick:
            save(part, entries)
        print(json.dumps([asdict(entry) for entry in entries], indent=2), flush=True)


if __name__ == "__main__":
    main()
