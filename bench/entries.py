"""A figure of the benchmark with its bar, and the files that keep all of them."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.records.store import environment, write_json

FOLDER = REPOSITORY / "bench"


@dataclass(frozen=True)
class Entry:
    """One figure and its bar.

    Attributes:
        name: Begins with the part of the benchmark that measures it.
        value: None: not reached, or not run; the name says which.
        holds: None where there is no bar.
        command: What measures this figure, from the repository's root.
    """

    name: str
    value: float | None
    unit: str
    bar: float | None
    holds: bool | None
    command: str
    bar_is: Literal["at least", "at most"] = "at least"


def measured(
    name: str, value: float | None, unit: str, command: str, at_least: float | None = None, at_most: float | None = None
) -> Entry:
    """An entry, judged by its bar where it has one (one of the two); what was not reached does not hold."""
    if at_most is not None:
        return Entry(name, value, unit, at_most, value is not None and value <= at_most, command, "at most")
    holds = None if at_least is None else value is not None and value >= at_least
    return Entry(name, value, unit, at_least, holds, command)


def save(part: str, entries: Iterable[Entry], folder: Path = FOLDER) -> None:
    """Put a part's entries into `bench.json` in place of its older ones, and where it was measured beside it."""
    bench, around = folder / "bench.json", folder / "environment.json"
    others = [entry for entry in read_kept(bench) if entry["name"].partition(",")[0] != part]
    write_json([*others, *map(asdict, entries)], bench)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(read_kept(around, {}) | {part: {**environment(RunConfig()), "date": date}}, around)


def read_kept(path: Path, nothing: Any = ()) -> Any:
    """Return what is in a file of kept figures; `nothing` if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else nothing


def keep(records: Sequence[Any], path: Path, key: Callable[[Any], object]) -> None:
    """Put records into the list of a file, in place of older ones with the same key."""
    write_json(list({key(each): each for each in [*read_kept(path), *records]}.values()), path)
