"""How long each test takes, and the slice of the slow tests that `.ci/run` has time for.

    python -m tests.durations FILE ...             keep what runs with `--measured FILE` measured; say what was added
    python -m tests.durations --update FILE ...    the same, of the tests that these runs had alone
    python -m tests.durations --slice              which slow tests the slice has, and which it leaves out

`tests/durations.json` has seconds of the reference machine (`tests/pace.py`): of fast tests by file, of each slow one.
`make test-all` renews it. A slice has a quarter of the slow tests, another one with each commit, and before them those
that what changed since then concerns, as far as `SLICE_MINUTES` go.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
KEPT_FILE = ROOT / "tests" / "durations.json"
TIMED = re.compile(r"faults/test_(processes|random_kills)|network/")
"""Files whose tests measure how soon something happens, and share runs."""
SHARES_RANKS = re.compile(r"recipes/|fake_gpus/|faults/test_resume|unit/test_(pipeline|tensor_parallel)\.py")
"""Files whose tests look at what one start of ranks computed."""
WORKERS = 2
FAST_MINUTES, SLICE_MINUTES = 6, 12
TURNS = 4
"""After so many slices each slow test has run."""
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


def parts_of(slow: Mapping[str, float]) -> list[list[str]]:
    """Divide the tests into as many parts as there are turns, of like seconds; a file that shares ranks stays whole."""
    groups = defaultdict(list)
    for test in sorted(slow):
        groups[test if TIMED.search(test) else scope_of(test)].append(test)
    parts, filled = [[] for _ in range(TURNS)], [[0.0, 0.0] for _ in range(TURNS)]
    for group in sorted(groups.values(), key=lambda tests: -sum(map(slow.get, tests))):
        is_timed = bool(TIMED.search(group[0]))
        least = min(range(TURNS), key=lambda turn: filled[turn][is_timed])
        parts[least] += group
        filled[least][is_timed] += sum(map(slow.get, group))
    return parts


def slice_of(slow: Mapping[str, float], changed: Iterable[str], commits: int) -> tuple[list[str], list[str]]:
    """Return the tests of what changed that there is time for, and the others whose turn it is."""
    turn = set(parts_of(slow)[commits % TURNS])
    left = {"timed": SLICE_MINUTES * 60.0, "": WORKERS * SLICE_MINUTES * 60.0}

    def takes(test: str) -> bool:
        places = ["", "timed"] if TIMED.search(test) else [""]
        if any(left[place] < slow[test] for place in places):
            return False
        for place in places:
            left[place] -= slow[test]
        return True

    for test in turn:
        takes(test)
    concerned = [test for test in slow if concerns(test, changed)]
    first = [test for test in concerned if test in turn or takes(test)]
    return first, sorted(turn - set(first))


def concerns(test: str, changed: Iterable[str]) -> bool:
    """Whether a test is about one of these files: its own, one that it imports, or one of a folder that it runs."""
    file = test.partition("::")[0]
    return any(
        path == file
        or (path.startswith("common/") and _imported_as(path) in _imports_of(file) | _imports_of_folders(test))
        or _technique(path) in _techniques_of(test)
        for path in changed
    )


def _imported_as(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _technique(path: str) -> str:
    """Of a file of a technique folder: the folder's name without its number; of others nothing."""
    folder = path.partition("/")[0]
    return folder.partition("_")[2] if re.match(r"\d\.\d_", folder) else "-"


@cache
def _techniques_of(test: str) -> set[str]:
    """The one whose notebook or workflow stands in the test's name, else those whose folder the test's file names."""
    text, folders = _text(test.partition("::")[0]), [path.name for path in ROOT.glob("[0-9].[0-9]_*")]
    in_name = [_technique(folder) for folder in folders if _technique(folder) in test]
    return {max(in_name, key=len)} if in_name else {_technique(folder) for folder in folders if folder in text}


@cache
def _imports_of(file: str) -> set[str]:
    """Modules of this repository that a file imports by name; a test's conftest belongs to it."""
    texts = [_text(file), _text(str(Path(file).with_name("conftest.py")))]
    return {name for text in texts for name in re.findall(r"^\s*from (common[.\w]*) import", text, re.MULTILINE)}


@cache
def _imports_of_folders(test: str) -> set[str]:
    sources = [str(path.relative_to(ROOT)) for path in ROOT.glob("[0-9].[0-9]_*/run_0_*/my_*.py")]
    return {name for path in sources if _technique(path) in _techniques_of(test) for name in _imports_of(path)}


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
    """Say what the slice has, by file, and which tests it leaves out."""
    kept, (first, turn) = read_kept(), slice_of_now()
    out = [test for test in kept.slow if test not in {*first, *turn}]

    def sum_of(tests: Iterable[str]) -> str:
        return f"{len(list(tests))} ({sum(map(kept.slow.get, tests)) / 60:.1f} min of a worker)"

    files = dict.fromkeys(test.partition("::")[0] for test in out)
    names = [f"  {file}: {', '.join(t.partition('::')[2] for t in out if t.startswith(file))}" for file in files]
    changed = f"{sum_of(first)} of what changed since {kept.commit[:7]}, {sum_of(turn)} whose turn it is"
    return "\n".join([f"Slow tests: {changed}; left out {sum_of(out)}:", *names])


# -- keeping


def kept_from(measured: Mapping[str, tuple[float, bool]], commit: str) -> Durations:
    """Return what is kept of tests' seconds, each with whether it is slow."""
    kept = Durations(commit)
    for test, (seconds, is_slow) in sorted(measured.items()):
        if is_slow:
            kept.slow[test] = round(seconds, 1)
        else:
            file = test.partition("::")[0]
            kept.fast[file] = round(kept.fast.get(file, 0) + seconds, 2)
    return kept


def updated(before: Durations, now: Durations) -> Durations:
    """Return the kept durations with those of some tests renewed; the commit stays: not all tests saw the new one."""
    return Durations(before.commit, {**before.fast, **now.fast}, {**before.slow, **now.slow})


def added_said(before: Durations, now: Durations, statements: tuple[int, int]) -> str:
    """Say what has been added since the durations were kept last."""
    rows = []
    for old, new in ((before.fast, now.fast), (before.slow, now.slow)):
        rows += [(new.get(name, 0) - old.get(name, 0), name) for name in {**old, **new}]
    lines = [[f"{more:+.1f} s", name] for more, name in sorted(rows, key=lambda row: -abs(row[0])) if abs(more) >= 1]
    totals = [
        f"fast tests: {before.fast_minutes:.1f} -> {now.fast_minutes:.1f} min on {WORKERS} workers ({FAST_MINUTES})",
        f"slow tests: {sum(before.slow.values()) / 60:.1f} -> {sum(now.slow.values()) / 60:.1f} min of one worker",
        f"statements of tests: {statements[0]:,} -> {statements[1]:,}",
    ]
    return "\n".join([f"Since {before.commit[:7]}:", *totals, tabulate(lines[:LISTED], tablefmt="plain")])


def statements_at(commit: str) -> int:
    """Count the Python statements of the tests at a commit; "" is the working tree."""
    names = _git("ls-tree", "-r", "--name-only", commit or "HEAD", "tests").splitlines()
    count = 0
    for name in names:
        if name.endswith(".py") and (commit or (ROOT / name).is_file()):
            text = _git("show", f"{commit}:{name}") if commit else _text(name)
            count += sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))
    return count


def main() -> None:
    """Do what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.durations", description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="what runs with --measured wrote")
    parser.add_argument("--update", action="store_true", help="keep the others' durations")
    parser.add_argument("--slice", action="store_true", help="say what the slice has, and what it leaves out")
    options = parser.parse_args()
    if options.slice:
        print(slice_said())
        return
    measured = {test: each for file in options.files for test, each in json.loads(file.read_text()).items()}
    before, now = read_kept(), kept_from(measured, _git("rev-parse", "HEAD"))
    if options.update:
        now = updated(before, now)
    print(added_said(before, now, (statements_at(before.commit), statements_at(""))))
    KEPT_FILE.write_text(json.dumps(asdict(now), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
