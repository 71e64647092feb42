"""`[RANK1:GPU1]`, `[RANK1:CPU]` or, of several machines, `[machine2:RANK9:GPU1]` before every printed line."""

import builtins
import io
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from common.base.secrets import without_secrets

Print = Callable[..., None]


def print_figures(figures: Mapping[str, float]) -> None:
    """Print metrics as one line of JSON, as Valohai plots them: without a rank's prefix, and without `nan`."""
    numbers = {name: value for name, value in figures.items() if math.isfinite(value)}
    sys.stdout.write(json.dumps(numbers) + "\n")  # `print` puts the prefix before it
    sys.stdout.flush()


def rank_prefix(rank: int, device: str, host: str = "") -> str:
    """Return the prefix of a rank on `device` (`cpu`, `cuda:1`); `host`: its machine, where there are several."""
    kind, _, index = device.partition(":")
    where = "CPU" if kind == "cpu" else f"GPU{index or 0}"
    return f"[{host}:RANK{rank}:{where}]" if host else f"[RANK{rank}:{where}]"


def prefixed_print(prefix: str, original: Print, is_quiet: bool = False) -> Print:
    """Return `original` (a `print`) with `prefix` before each line; `is_quiet`: to stdout warnings alone."""
    at_line_start: dict[int, bool] = {}

    def print_with_prefix(*objects: object, sep: str | None = None, end: str | None = None,
                          file: object = None, flush: bool = False) -> None:  # fmt: skip
        target = sys.stdout if file is None else file
        if target is None or target not in (sys.stdout, sys.stderr):
            original(*objects, sep=sep, end=end, file=file, flush=flush)
            return
        plain = io.StringIO()
        original(*objects, sep=sep, end=end, file=plain)
        said = without_secrets(plain.getvalue()).splitlines(keepends=True)
        if is_quiet and target is sys.stdout:
            said = [line for line in said if line.startswith("WARNING")]
        lines = "".join(f"{prefix} {line}" for line in said)
        if not at_line_start.get(id(target), True):
            lines = lines.removeprefix(f"{prefix} ")
        if lines:
            at_line_start[id(target)] = lines.endswith("\n")
        original(lines, end="", file=target, flush=flush)

    return print_with_prefix


@contextmanager
def printing_with_prefix(prefix: str, is_quiet: bool = False) -> Iterator[None]:
    """Replace the built-in `print` by `prefixed_print` while the block runs."""
    original = builtins.print
    builtins.print = prefixed_print(prefix, original, is_quiet)
    try:
        yield
    finally:
        builtins.print = original
