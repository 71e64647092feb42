"""Deliberate faults in the project's own code, and the tests that have to see them.

    python -m tests.mutants                    every fault in a copy of the repository, and who caught it
    python -m tests.mutants --chosen           those of tests/mutants_chosen.py alone
    python -m tests.mutants --only manifest    those with a word in their name or their file
    python -m tests.mutants --draw 60 --seed 18 --at 385165e    write tests/mutants_drawn.json anew

A chosen fault breaks a promise that somebody thought of. As chosen faults can flatter, others are drawn by chance: an
operator, a number, a statement. Of these the file says which tests catch them; those without tests were caught by none,
and are not run.

Each fault is put into a copy, where its tests run up to the first failure. The libraries are imported once, in the
process that forks all others. Exit code 0: every fault is caught that has to be; 1: one is not; 2: a fault's place is
gone, a test is gone, or a test fails without any fault.
"""

import argparse
import ast
import gc
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import psutil
from tabulate import tabulate

from tests.forked import LIBRARIES
from tests.mutants_chosen import CHOSEN, Fault
from tests.pace import patient

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")  # before the libraries are imported, which read them once
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # else every process looks through all that is installed

ROOT = Path(__file__).resolve().parents[1]
DRAWN_FILE = ROOT / "tests" / "mutants_drawn.json"
MARK = "MUTANT"
"""A variable of the environment, by which the processes that a fault leaves behind are found."""
FAULT_S, CONTROL_S = 180, 900
"""How long the tests of a fault may take, and those of one file without a fault, on the reference machine."""
TESTS_FAILED, INTERRUPTED, NOT_LOADED, NO_CONFTEST, CRASHED = 1, 2, 3, 4, 70


# -- what is run


@dataclass(frozen=True)
class Job:
    """Tests to be run in a copy, with a fault or without."""

    name: str
    tests: tuple[str, ...]
    fault: Fault | None = None


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    job: Job
    seconds: float
    exit_code: int | None
    """Of pytest; None: it did not end in time."""
    failed_test: str
    is_import: bool
    """Whether what failed is the import of a test module."""
    log: str

    @property
    def is_caught(self) -> bool:
        """Whether a test saw the fault; an import that fails counts for drawn faults alone."""
        codes = (TESTS_FAILED, INTERRUPTED, NOT_LOADED, NO_CONFTEST)
        return self.exit_code in codes and bool(self.failed_test) and not self.is_broken

    @property
    def is_broken(self) -> bool:
        """Whether the tests could not be run at all."""
        if self.exit_code in (0, None):
            return False
        is_chosen = self.job.fault is not None and not self.job.fault.kind
        return not self.failed_test or (self.is_import and is_chosen)

    def __str__(self) -> str:
        """For the table."""
        if self.exit_code is None:
            return f"NOT CAUGHT: no answer in {self.seconds:.0f} s"
        if self.is_broken:
            return f"BROKEN: pytest's exit code is {self.exit_code}"
        if not self.is_caught:
            return "NOT CAUGHT"
        return ("import fails: " if self.is_import else "") + shortened(self.failed_test)


def shortened(test: str) -> str:
    """A test's name without its folder."""
    return test.removeprefix("tests/")


@dataclass
class Copy:
    """A copy of the repository in which one job at a time is run."""

    folder: Path
    child: int = 0
    job: Job | None = None
    start_s: float = 0.0
    stamp: int = field(default_factory=lambda: int(time.time()))

    @property
    def tree(self) -> Path:
        """The files."""
        return self.folder / "copy"

    def make(self, files: Iterable[str]) -> None:
        """Copy the files; tests ask git for them."""
        for name in files:
            target = self.tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
        for command in ("init", "add --all"):
            subprocess.run(["git", "-c", "core.autocrlf=false", *command.split()], cwd=self.tree, check=True,
                           capture_output=True)  # fmt: skip

    def write(self, file: str, content: str) -> None:
        """Change a file, with another time than it ever had: Python's compiled files go by time and size."""
        self.stamp += 2
        path = self.tree / file
        path.write_text(content, encoding="utf-8")
        os.utime(path, (self.stamp, self.stamp))

    def start(self, job: Job) -> None:
        """Begin with a job, in a process of its own."""
        if job.fault:
            self.write(job.fault.file, job.fault.applied_to(source_of(job.fault.file)))
        self.job, self.start_s = job, time.monotonic()
        sys.stdout.flush()
        self.child = os.fork()
        if not self.child:
            _be_pytest(self, job.tests)

    def end(self, exit_code: int | None) -> Outcome:
        """Leave nobody behind, mend the file, and say how it was; None: it has not ended yet, and is ended."""
        assert self.job
        seconds = time.monotonic() - self.start_s
        end_processes(self.child, str(self.folder))
        if exit_code is None:
            with suppress(ChildProcessError):
                os.waitpid(self.child, 0)
        job, self.job = self.job, None
        if job.fault:
            self.write(job.fault.file, source_of(job.fault.file))
        log, written = (self.folder / "log.txt").read_text(errors="replace"), self.folder / "outcome.json"
        if written.is_file():
            found = json.loads(written.read_text())
        else:  # pytest was ended in its midst
            found, exit_code = {"failed": "", "is_import": False}, None if exit_code is None else CRASHED
        if exit_code == NOT_LOADED and "in pytest_configure" in log:
            found = {"failed": "fixtures.py", "is_import": True}
        if exit_code == NO_CONFTEST and "ImportError while loading conftest" in log:
            found = {"failed": "conftest.py", "is_import": True}
        return Outcome(job, seconds, exit_code, found["failed"], found["is_import"], log)


class _FirstFailure:
    """Of pytest: which test failed first."""

    def __init__(self) -> None:
        self.failed, self.is_import = "", False

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed, self.is_import = report.nodeid, True


def _be_pytest(copy: Copy, tests: Sequence[str]) -> NoReturn:
    """What a forked process does: pytest in the copy, whose modules are imported here for the first time."""
    exit_code = CRASHED
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        (copy.folder / "outcome.json").unlink(missing_ok=True)
        for stream, path, flags in (
            (0, Path(os.devnull), os.O_RDONLY),
            (1, copy.folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        ):
            os.dup2(os.open(path, flags), stream)
        os.dup2(1, 2)
        os.chdir(copy.tree)
        os.environ.update({"PYTHONPATH": str(copy.tree), MARK: str(copy.folder)})
        sys.path[:] = [str(copy.tree), *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        importlib.invalidate_caches()
        import pytest

        import common

        assert Path(common.__file__).is_relative_to(copy.tree), common.__file__
        seen = _FirstFailure()
        options = ["-x", "-q", "-p", "no:cacheprovider", "--basetemp", str(copy.folder / "tmp")]
        exit_code = int(pytest.main([*options, *tests], plugins=[seen]))
        (copy.folder / "outcome.json").write_text(json.dumps({"failed": seen.failed, "is_import": seen.is_import}))
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(exit_code)


def end_processes(session: int, mark: str) -> None:
    """Kill all processes that were forked in a session, or started from there, also those that left it."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session or process.environ().get(MARK) == mark:
                process.kill()


def run_jobs(jobs: Iterable[Job], copies: Sequence[Copy], limit_s: float) -> Iterator[Outcome]:
    """The outcomes as they come; each copy has one job at a time."""
    waiting = deque(jobs)
    try:
        while waiting or any(copy.job for copy in copies):
            for copy in copies:
                if copy.job is None:
                    if waiting:
                        copy.start(waiting.popleft())
                    continue
                ended, status = os.waitpid(copy.child, os.WNOHANG)
                if ended:
                    yield copy.end(os.waitstatus_to_exitcode(status))
                elif time.monotonic() - copy.start_s > limit_s:
                    yield copy.end(None)
            time.sleep(0.02)
    finally:
        for copy in copies:
            if copy.job:
                copy.end(None)


# -- faults


def drawn_faults() -> list[Fault]:
    """Those that were drawn by chance."""
    if not DRAWN_FILE.is_file():
        return []
    listed = json.loads(DRAWN_FILE.read_text(encoding="utf-8"))["faults"]
    return [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in listed]


def source_of(file: str) -> str:
    """A file as it is, without a fault."""
    return (ROOT / file).read_text(encoding="utf-8")


def check_places(faults: Iterable[Fault]) -> list[str]:
    """What is wrong with the places of faults: each stands in its file exactly once."""
    wrong = []
    for fault in faults:
        times = source_of(fault.file).count(fault.before) if (ROOT / fault.file).is_file() else 0
        if times != 1 or fault.before == fault.after:
            wrong.append(f"{fault.promise!r}: its place stands {times} times in {fault.file}: move the fault along")
    return wrong


def files_of_tree() -> list[str]:
    """Of the working tree: what git tracks, or would."""
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return [name for name in dict.fromkeys(listed) if name and os.path.lexists(ROOT / name)]


def git(*arguments: str) -> str:
    """What git says."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


# -- drawing

DRAWN_FROM = re.compile(r"common/.*\.py|[^/]+/run_0_[^/]+/my_(utils|workflow)_[^/]+\.py")
OTHER_OPERATORS: dict[type, tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: (r"not\s+in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"), ast.Add: (r"\+", "-"), ast.Sub: ("-", "+"), ast.Mult: (r"\*", "/"),
    ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"), ast.Pow: (r"\*\*", "*"),
    ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
"""By the kind of an operator: how it is written, as a pattern, and what stands in its place."""


@dataclass(frozen=True)
class Site:
    """A place in a file where a fault can be: what stands there from one byte to another, and what would instead."""

    kind: str
    start: int
    end: int
    instead: str


class _Sites(ast.NodeVisitor):
    """Every site of a module, annotations and what is for type checkers left out."""

    def __init__(self, text: str) -> None:
        self.data, self.found = text.encode(), list[Site]()
        lengths = [len(line) for line in self.data.splitlines(keepends=True)]
        self.line_starts = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
        self.visit(ast.parse(text))

    def _start(self, node: ast.AST) -> int:
        return self.line_starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.AST) -> int:
        return self.line_starts[node.end_lineno - 1] + node.end_col_offset

    def _add(self, kind: str, node: ast.AST, instead: str) -> None:
        self.found.append(Site(kind, self._start(node), self._end(node), instead))

    def _add_operator(self, operator: ast.AST, left: ast.AST, right: ast.AST) -> None:
        """The operator that is written between two operands."""
        if type(operator) not in OTHER_OPERATORS or any(_is_text(node) for node in (left, right)):
            return
        pattern, instead = OTHER_OPERATORS[type(operator)]
        start = self._end(left)
        place = re.search(pattern.encode(), self.data[start : self._start(right)])
        if place:
            self.found.append(Site("operator", start + place.start(), start + place.end(), instead))

    def visit_If(self, node: ast.If) -> None:
        is_for_checkers = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for part in node.orelse if is_for_checkers else (node.test, *node.body, *node.orelse):
            self.visit(part)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Nothing: places within are not known."""

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for operator, left, right in zip(node.ops, operands, node.comparators, strict=False):
            self._add_operator(operator, left, right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._add_operator(node.op, left, right)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._add_operator(node.op, node.left, node.right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            operand = self.data[self._start(node.operand) : self._end(node.operand)].decode()
            self._add("not", node, operand)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) in (int, float):
            self._add("number", node, repr(node.value + 1))

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add("statement", node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._add("statement", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("statement", node, "pass")
        self._add_operator(node.op, node.target, node.value)
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add("statement", node, "pass")
        self.generic_visit(node)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def fault_at(file: str, text: str, site: Site) -> Fault:
    """A site as a fault: whole lines, with as many before them as make them the only ones of their kind."""
    data = text.encode()
    first = data.rfind(b"\n", 0, site.start) + 1
    last = data.find(b"\n", site.end)
    last = len(data) if last < 0 else last
    while True:
        before = data[first:last].decode()
        if text.count(before) == 1:
            break
        first = data.rfind(b"\n", 0, first - 1) + 1
    after = (data[first : site.start] + site.instead.encode() + data[site.end : last]).decode()
    line = data.count(b"\n", 0, site.start) + 1
    named = data[site.start : site.end].decode().split("\n")[0]
    words = f"{named[:50]!r} becomes {site.instead[:50]!r}"
    return Fault(f"{file}:{line}: {words}", file, before, after, (), kind=site.kind)


def draw(count: int, seed: int, commit: str) -> None:
    """Write `count` faults that chance chooses among all sites of a commit; no tests are known to catch them yet."""
    names = [name for name in git("ls-tree", "-r", "--name-only", commit).splitlines() if DRAWN_FROM.fullmatch(name)]
    texts = {name: git("show", f"{commit}:{name}") for name in sorted(names)}
    sites = [(name, site) for name, text in texts.items() for site in sorted(_Sites(text).found, key=lambda s: s.start)]
    chosen = random.Random(seed).sample(sites, count)
    faults = [asdict(fault_at(name, texts[name], site)) for name, site in chosen]
    about = {"commit": commit, "seed": seed, "sites": len(sites)}
    DRAWN_FILE.write_text(json.dumps({"drawn_at": about, "faults": faults}, indent=1) + "\n", encoding="utf-8")
    print(f"{count} of {len(sites):,} sites in {len(texts)} files: {DRAWN_FILE.relative_to(ROOT)}")


# -- the command line


def parser() -> argparse.ArgumentParser:
    """Its options."""
    made = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", default="", help="faults with this text in their name or file")
    made.add_argument("--chosen", action="store_true", help="the chosen ones alone")
    made.add_argument("--drawn", action="store_true", help="the drawn ones alone")
    made.add_argument("--workers", type=int, default=2, help="copies in which tests run at once (2)")
    made.add_argument("--limit", type=float, default=FAULT_S, help=f"seconds for the tests of a fault ({FAULT_S})")
    made.add_argument("--no-control", action="store_true", help="do not run the tests without a fault first")
    made.add_argument("--logs", type=Path, help="keep pytest's output of each fault in this folder")
    made.add_argument("--draw", type=int, metavar="COUNT", help="draw so many faults, write them, and end")
    made.add_argument("--seed", type=int, default=18, help="of the draw (18)")
    made.add_argument("--at", default="HEAD", help="the commit that is drawn from (HEAD)")
    return made


def control_jobs(faults: Iterable[Fault]) -> list[Job]:
    """All tests of the faults, file by file; a test that is named in whole and in part is run in whole."""
    named = list(dict.fromkeys(test for fault in faults for test in fault.tests))
    known = set(named)

    def covers(test: str) -> Iterator[str]:
        yield from (test[: place.start()] for place in re.finditer(r"::|\[", test))

    by_file: dict[str, list[str]] = {}
    for test in named:
        if not known & set(covers(test)):
            by_file.setdefault(test.partition("::")[0], []).append(test)
    return [Job(file, tuple(tests)) for file, tests in by_file.items()]


def check_without_faults(faults: Iterable[Fault], copies: Sequence[Copy]) -> list[str]:
    """The control: what fails without any fault."""
    jobs, start_s, wrong = control_jobs(faults), time.monotonic(), list[str]()
    print(f"the control: the tests of {len(jobs)} files, without a fault", flush=True)
    for number, outcome in enumerate(run_jobs(jobs, copies, patient(CONTROL_S)), 1):
        print(f"{number}/{len(jobs):<4} {outcome.seconds:5.1f} s  {outcome.job.name}", flush=True)
        if outcome.exit_code != 0:
            wrong.append(f"{outcome.job.name} fails without a fault:\n{outcome.log[-3000:]}")
    print(f"the control took {time.monotonic() - start_s:.0f} s", flush=True)
    return wrong


def run_faults(faults: Sequence[Fault], copies: Sequence[Copy], limit_s: float, logs: Path | None) -> list[Outcome]:
    """Each fault's outcome, said as it comes, in the faults' order."""
    jobs = [Job(fault.promise, fault.tests, fault) for fault in faults]
    outcomes: dict[str, Outcome] = {}
    for outcome in run_jobs(jobs, copies, patient(limit_s)):
        outcomes[outcome.job.name] = outcome
        count = f"{len(outcomes)}/{len(jobs)}"
        print(f"{count:>7} {outcome.seconds:5.1f} s  {outcome.job.name}: {outcome}", flush=True)
        if outcome.is_broken:
            print(outcome.log[-3000:], flush=True)
        if logs:
            logs.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"\W+", "-", outcome.job.name)[:80]
            (logs / f"{name}.txt").write_text(outcome.log, encoding="utf-8")
    return [outcomes[job.name] for job in jobs]


def counted(faults: Sequence[Fault], caught: set[str], what: str) -> str:
    """`43 of 43 chosen`."""
    return f"{sum(fault.promise in caught for fault in faults)} of {len(faults)} {what}"


def main() -> int:
    """Run what is asked for; the exit code."""
    options, start_s = parser().parse_args(), time.monotonic()
    if options.draw:
        if DRAWN_FILE.exists():
            print(f"error: {DRAWN_FILE.name} has what catches the faults in it: remove it first", file=sys.stderr)
            return 2
        draw(options.draw, options.seed, options.at)
        return 0

    def is_asked(fault: Fault) -> bool:
        return options.only.lower() in f"{fault.promise} {fault.file}".lower()

    chosen = [fault for fault in (() if options.drawn else CHOSEN) if is_asked(fault)]
    drawn = [fault for fault in ([] if options.chosen else drawn_faults()) if is_asked(fault)]
    faults = [*chosen, *drawn]
    names = [fault.promise for fault in faults]
    wrong = [] if faults else [f"no fault has {options.only!r} in its name or file"]
    wrong += check_places(faults) + [f"{name!r} names two faults" for name in {*names} if names.count(name) > 1]
    if wrong:
        print("\n".join(f"error: {line}" for line in wrong), file=sys.stderr)
        return 2
    absent = {fault.promise for fault in faults if fault.needs and find_spec(fault.needs) is None}
    to_run = [fault for fault in faults if fault.tests and fault.promise not in absent]
    for library in (*LIBRARIES, "hypothesis", "pytest"):  # each fault's process takes them along
        importlib.import_module(library)
    gc.freeze()  # what is there now no forked process needs to look through
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies, files = [Copy(Path(folder) / str(number)) for number in range(options.workers)], files_of_tree()
        for copy in copies:
            copy.make(files)
        wrong = [] if options.no_control else check_without_faults(to_run, copies)
        if wrong:
            print("\n".join(f"error: {line}" for line in wrong), file=sys.stderr)
            return 2
        outcomes = run_faults(to_run, copies, options.limit, options.logs)
    return said(chosen, drawn, outcomes, absent, time.monotonic() - start_s)


def said(
    chosen: Sequence[Fault], drawn: Sequence[Fault], outcomes: Sequence[Outcome], absent: set[str], seconds: float
) -> int:
    """Print the table; the exit code."""
    by_name: dict[str, Outcome] = {outcome.job.name: outcome for outcome in outcomes}
    caught = {name for name, outcome in by_name.items() if outcome.is_caught}

    def line(fault: Fault) -> list[str]:
        if fault.promise in absent:
            return [fault.promise, f"not run: {fault.needs} is not installed", ""]
        if not fault.tests:
            return [fault.promise, "not run: no test caught it", ""]
        outcome = by_name[fault.promise]
        return [fault.promise, str(outcome), f"{outcome.seconds:.1f}"]

    print("\n" + tabulate([line(fault) for fault in (*chosen, *drawn)], ["fault", "caught by", "seconds"],
                          disable_numparse=True, colalign=("left", "left", "right")))  # fmt: skip
    here = [fault for fault in chosen if fault.promise not in absent]
    parts = [counted(here, caught, "chosen") if chosen else "", counted(drawn, caught, "drawn") if drawn else ""]
    print(f"\n{' and '.join(filter(None, parts))} faults caught, in {seconds:.0f} s")
    if any(outcome.is_broken for outcome in outcomes):
        return 2
    return int(any(not outcome.is_caught for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
