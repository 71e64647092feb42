"""Where the repository is."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def is_embedded(source: str) -> bool:
    """Return whether a file or folder is one of the repository's own data or models."""
    return any(Path(place).resolve().is_relative_to(REPOSITORY / "assets") for place in (source, REPOSITORY / source))
