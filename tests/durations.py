"""How long each test takes, and the slice of the slow tests that `.ci/run` has time for.

    python -m tests.durations FILE ...              add what runs with `--measured FILE` measured of slow tests
    python -m tests.durations --replace FILE ...    the same of all tests, instead of what was kept; say what was added
    python -m tests.durations --slice               which slow tests the slice has, and which it leaves out

`tests/durations.json` has seconds per file for fast tests, and per test for slow ones. `make test-all` renews it. A
slice has a third of the slow tests, the next third after the next commit, and those that directly import what changed
since then, or run a changed technique folder, as far as `SLICE_MINUTES` go.
"""

import argparse
import ast
import io
import json
import math
import re
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
KEPT_FILE = ROOT / "tests" / "durations.json"
TIMED = re.compile(r"faults/test_(processes|random_kills)|network/")
"""Files whose tests measure how soon something happens, and share runs."""
SHARES_RANKS = re.compile(r"recipes/|fake_gpus/|faults/test_resume|unit/test_(pipeline|tensor_parallel)\.py")
"""Files whose tests look at what one start of ranks computed."""
SHARED_BY_ALL = ("tests/fixtures.py", "tests/forked.py", "tests/pace.py", "tests/conftest.py", "tests/durations.py")
WORKERS = 2
FAST_MINUTES, SLICE_MINUTES = 6, 12
TURNS = 3
"""After so many commits each slow test was in a slice, while the kept durations stay."""
LISTED = 15
"""Most lines of what was added."""


@dataclass
class Durations:
    """Seconds of tests, as they were kept."""

    commit: str = ""
    """The one that they were measured on."""
    fast: dict[str, float] = field(default_factory=dict)
    """Of each file's tests that `make test` runs."""
    slow: dict[str, float] = field(default_factory=dict)
    """Of each test that it leaves out."""

    @property
    def fast_minutes(self) -> float:
        """What `make test` takes, if no worker waits for another."""
        return sum(self.fast.values()) / WORKERS / 60


def read_kept() -> Durations:
    """Return the kept durations."""
    return Durations(**json.loads(KEPT_FILE.read_text(encoding="utf-8")))


def scope_of(test: str) -> str:
    """Return what a worker takes as one: tests that measure time, a file whose tests share ranks, else one test."""
    if TIMED.search(test):
        return "timed"
    return test.partition("::")[0] if SHARES_RANKS.search(test) else test


def seconds_of_scopes() -> dict[str, float]:
    """Return what was kept of each scope; single fast tests, of which files are kept, are left out."""
    kept, seconds = read_kept(), defaultdict[str, float](float)
    for name, each in (*kept.fast.items(), *kept.slow.items()):
        seconds[scope_of(name)] += each
    return seconds


# -- the slice


def groups_of(slow: Mapping[str, float]) -> list[list[str]]:
    """Return what is chosen as one: a file whose tests share ranks, else one test."""
    groups = defaultdict(list)
    for test in sorted(slow):
        groups[test if TIMED.search(test) else scope_of(test)].append(test)
    return list(groups.values())


def parts_of(slow: Mapping[str, float]) -> list[list[list[str]]]:
    """Divide the groups into a part for each turn, of like seconds; those that measure time by themselves."""
    parts, filled = [[] for _ in range(TURNS)], [[0.0, 0.0] for _ in range(TURNS)]
    for group in sorted(groups_of(slow), key=lambda tests: -sum(map(slow.get, tests))):
        is_timed = bool(TIMED.search(group[0]))
        least = min(range(TURNS), key=lambda turn: filled[turn][is_timed])
        parts[least].append(group)
        filled[least][is_timed] += sum(map(slow.get, group))
    return parts


def slice_of(slow: Mapping[str, float], changed: Iterable[str], commits: int) -> tuple[list[str], list[str]]:
    """Return the tests whose turn it is, and those of what changed that there is time for besides.

    Each worker of the tests comes to the same slice.
    """
    turn = parts_of(slow)[commits % TURNS]
    left_s = WORKERS * SLICE_MINUTES * 60 - _seconds(turn, slow)
    left_timed_s = SLICE_MINUTES * 60 - _seconds([group for group in turn if TIMED.search(group[0])], slow)
    others = [group for group in groups_of(slow) if group not in turn and concerns(group[0], changed)]
    first = commits // TURNS % max(1, len(others))  # another one each time, where there is no time for all
    more = []
    for group in others[first:] + others[:first]:
        seconds = _seconds([group], slow)
        timed_s = seconds if TIMED.search(group[0]) else 0
        if seconds <= left_s and timed_s <= left_timed_s:
            more += group
            left_s, left_timed_s = left_s - seconds, left_timed_s - timed_s
    return [*chain(*turn)], more


def _seconds(groups: Iterable[list[str]], slow: Mapping[str, float]) -> int:
    """Whole ones, so that each worker comes to the same sum."""
    return sum(math.ceil(sum(map(slow.get, group))) for group in groups)


def concerns(test: str, changed: Iterable[str]) -> bool:
    """Whether a test is about one of these files: its own, one that it imports, or one of a folder that it runs."""
    return any(
        path in _files_of(test)
        or _imported_as(path) in _imports_of(test)
        or path.partition("/")[0] in _folders_of(test)
        for path in changed
    )


def _imported_as(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def _files_of(test: str) -> dict[str, str]:
    """The test's file, its conftest, and what these import from `tests` or start, with their texts."""
    file = test.partition("::")[0]
    folder = Path(file).parent
    found = {name: _text(name) for name in (file, str(folder / "conftest.py"))}
    text = "".join(found.values())
    helpers = [name.replace(".", "/") + ".py" for name in re.findall(r"^from (tests[.\w]+) import", text, re.MULTILINE)]
    workers = [str(folder / name) for name in re.findall(r"\w+_worker\.py", text)]
    return found | {name: _text(name) for name in (*helpers, *workers) if name not in SHARED_BY_ALL}


@cache
def _folders_of(test: str) -> set[str]:
    """The technique folder whose notebook or workflow stands in the test's name, else all that its files name."""
    folders = {path.name.partition("_")[2]: path.name for path in ROOT.glob("[0-9].[0-9]_*")}
    in_name = [technique for technique in folders if technique in test]
    if in_name:
        return {folders[max(in_name, key=len)]}
    text = "".join(_files_of(test).values())
    return {folder for folder in folders.values() if folder in text}


@cache
def _imports_of(test: str) -> set[str]:
    """Modules of `common` that the test's files, and the workflows of its folders, import by name."""
    sources = [path for folder in _folders_of(test) for path in ROOT.glob(f"{folder}/run_0_*/my_*.py")]
    texts = [*_files_of(test).values(), *(path.read_text(encoding="utf-8") for path in sources)]
    return set[str]().union(*map(_imports_in, texts))


@cache
def _imports_in(source: str) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return {name for node in nodes for name in (node.module, *(f"{node.module}.{each.name}" for each in node.names))}


@cache
def _text(file: str) -> str:
    path = ROOT / file
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def changed_since(commit: str) -> list[str]:
    """Return the files that differ from a commit; of one that this clone does not have none."""
    done = subprocess.run(["git", "diff", "--name-only", commit], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


@cache
def slice_of_now() -> tuple[list[str], list[str]]:
    """Return the slice of this commit, as `slice_of` does."""
    kept, commits = read_kept(), int(_git("rev-list", "--count", "HEAD"))
    return slice_of(kept.slow, changed_since(kept.commit), commits)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def slice_said() -> str:
    """Say what the slice has, and by file which tests it leaves out."""
    kept, (turn, more) = read_kept(), slice_of_now()
    out = [test for test in kept.slow if test not in {*turn, *more}]

    def sum_of(tests: list[str]) -> str:
        return f"{len(tests)} ({sum(map(kept.slow.get, tests)) / 60:.1f} min of a worker)"

    names = defaultdict(list)
    for test in out:
        names[test.partition("::")[0]].append(test.partition("::")[2])
    chosen = f"{sum_of(turn)} whose turn it is, {sum_of(more)} of what changed since {kept.commit[:7]}"
    return "\n".join(
        [f"Slow tests: {chosen}; left out {sum_of(out)}:", *(f"  {f}: {', '.join(t)}" for f, t in names.items())]
    )


# -- keeping


def kept_from(measured: Mapping[str, tuple[float | None, bool]], commit: str, before: Durations) -> Durations:
    """Return what is kept of tests' seconds and whether they are slow; of a skipped slow one what it took before."""
    kept = Durations(commit)
    for test, (seconds, is_slow) in sorted(measured.items()):
        file = test.partition("::")[0]
        if is_slow:
            kept.slow[test] = before.slow.get(test, 0.0) if seconds is None else round(seconds, 1)
        else:
            kept.fast[file] = round(kept.fast.get(file, 0) + (seconds or 0), 2)
    return kept


def added_said(before: Durations, now: Durations) -> str:
    """Say what has been added since the durations were kept last."""
    rows = []
    for old, new in ((before.fast, now.fast), (before.slow, now.slow)):
        rows += [(new.get(name, 0) - old.get(name, 0), name) for name in {**old, **new}]
    lines = [[f"{more:+.1f} s", name] for more, name in sorted(rows, key=lambda row: -abs(row[0])) if abs(more) >= 1]
    totals = [
        f"fast tests: {before.fast_minutes:.1f} -> {now.fast_minutes:.1f} min on {WORKERS} workers ({FAST_MINUTES})",
        f"slow tests: {sum(before.slow.values()) / 60:.1f} -> {sum(now.slow.values()) / 60:.1f} min of one worker",
    ]
    return "\n".join([f"Since {before.commit[:7]}:", *totals, tabulate(lines[:LISTED], tablefmt="plain")])


def statements_said(commit: str) -> str:
    """Say how many Python statements the tests had at a commit, if this clone has it, and how many they have now."""
    names = {name for name in _git("ls-files", "tests").splitlines() if name.endswith(".py")}
    now = sum(map(_statements, map(_text, names)))
    done = subprocess.run(["git", "archive", commit, "tests"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        return f"statements of tests: {now:,}; {commit[:7]} is not in this clone"
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        texts = [tar.extractfile(file).read().decode() for file in tar if file.name.endswith(".py")]
    return f"statements of tests: {sum(map(_statements, texts)):,} -> {now:,}"


def _statements(text: str) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))


def main() -> None:
    """Do what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.durations", description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="what runs with --measured wrote")
    parser.add_argument("--replace", action="store_true", help="of all tests: forget what was kept")
    parser.add_argument("--slice", action="store_true", help="say what the slice has, and what it leaves out")
    options = parser.parse_args()
    if options.slice:
        print(slice_said())
        return
    if not options.files:
        parser.error("name what a run with --measured wrote")
    measured = {test: each for file in options.files for test, each in json.loads(file.read_text()).items()}
    before = read_kept()
    now = kept_from(measured, _git("rev-parse", "HEAD"), before)
    if not options.replace:
        now = Durations(before.commit, before.fast, {**before.slow, **now.slow})
    KEPT_FILE.write_text(json.dumps(asdict(now), indent=1) + "\n", encoding="utf-8")
    print(added_said(before, now), statements_said(before.commit), sep="\n")


if __name__ == "__main__":
    main()
