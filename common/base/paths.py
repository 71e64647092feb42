"""Where the repository is, and what is named from there."""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def find_here(name: str | Path, is_it: Callable[[str | Path], bool] = os.path.exists) -> Path | None:
    """Return the file or folder that is named from here, or else from the repository's root; None = there is none."""
    return next((Path(place) for place in (os.path.expanduser(name), REPOSITORY / name) if is_it(place)), None)


def from_repository(path: Path) -> Path:
    """Return an absolute path as it is named from the repository's root, where it is below it."""
    return path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path


def command_here(module: str) -> str:
    """Return how `python -m common.MODULE` is called from where the user stands, such as by `.venv/bin/python`."""
    python = Path(sys.executable)
    called = shlex.quote(os.path.relpath(python)) if python.is_relative_to(REPOSITORY) else "python"
    return f"{called} -m common.{module}"


def is_embedded(source: str) -> bool:
    """Return whether a file or folder is one of the repository's own data or models."""
    return any(Path(place).resolve().is_relative_to(REPOSITORY / "assets") for place in (source, REPOSITORY / source))
