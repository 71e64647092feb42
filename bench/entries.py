"""A figure of the benchmark with its bar, and the files that keep all of them."""

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig

BENCH_PATH = REPOSITORY / "bench" / "bench.json"
ENVIRONMENT_PATH = REPOSITORY / "bench" / "environment.json"


@dataclass(frozen=True)
class Entry:
    """One figure and its bar."""

    name: str
    value: float | None
    """None: not reached, or not run; the name says which."""
    unit: str
    bar: float | None
    holds: bool | None
    """None where there is no bar."""
    command: str
    """What measures this figure alone, from the repository's root."""
    bar_is: Literal["at least", "at most"] = "at least"


def measured(
    name: str,
    value: float | None,
    unit: str,
    command: str,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Entry:
    """An entry, judged by its bar where it has one (one of the two); what was not reached does not hold."""
    if at_most is not None:
        return Entry(name, value, unit, at_most, value is not None and value <= at_most, command, "at most")
    holds = None if at_least is None else value is not None and value >= at_least
    return Entry(name, value, unit, at_least, holds, command)


def update(part: str, entries: list[Entry], folder: Path = BENCH_PATH.parent, is_whole: bool = True) -> None:
    """Put one part's entries into `bench.json` in place of its older ones, and say in `environment.json` when.

    The names of a part's entries begin with its own. Where it was not measured whole, older entries stay but those of
    the same tools and ratios: names that are equal before the colon.
    """
    from common.records.store import environment

    bench, around = (json.loads((folder / path.name).read_text("utf-8")) for path in (BENCH_PATH, ENVIRONMENT_PATH))
    measured_now = {_subject(entry.name) for entry in entries}
    kept = [
        entry
        for entry in bench
        if not (entry["name"].startswith(part) if is_whole else _subject(entry["name"]) in measured_now)
    ]
    date = datetime.now(UTC).isoformat(timespec="seconds")
    around.setdefault("measured_later", {})[part] = {**environment(RunConfig()), "date": date}
    _write(kept + [asdict(entry) for entry in entries], around, folder)


def _subject(name: str) -> str:
    return name.partition(":")[0]


def save(entries: list[Entry], folder: Path = BENCH_PATH.parent) -> None:
    """Write `bench.json`, and `environment.json` beside it."""
    from common.records.store import environment

    folder.mkdir(parents=True, exist_ok=True)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    _write([asdict(entry) for entry in entries], {**environment(RunConfig()), "date": date}, folder)


def _write(entries: list[dict[str, Any]], around: dict[str, Any], folder: Path) -> None:
    for path, content in ((BENCH_PATH, entries), (ENVIRONMENT_PATH, around)):
        (folder / path.name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
