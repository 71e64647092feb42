"""One table says what techniques, parallelisms and tasks are; nothing else compares their names."""

import ast
from collections.abc import Iterator

from common.base.paths import REPOSITORY
from common.base.specs import PARALLELISMS, TASKS, TECHNIQUES

NAMES = {*TECHNIQUES, *PARALLELISMS, *TASKS}
FILES = [*REPOSITORY.glob("common/**/*.py"), *REPOSITORY.glob("[1-3].*/run_0*/my_*.py")]
OTHER_NAMES = {REPOSITORY / "common" / "runtime" / "faults.py": {"full"}}
"""A fault is a disk that is full."""


def named(node: ast.AST) -> list[str]:
    """The names of the table that are written in a node: as a text, or among those of a tuple, list or set."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return [part.value for part in parts if isinstance(part, ast.Constant) and part.value in NAMES]


def compared(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each place where a name decides: comparisons, patterns, sets, and keys of dictionaries."""
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            parts = [key for key in node.keys if key]
        elif isinstance(node, ast.Set | ast.MatchValue):
            parts = [node.value if isinstance(node, ast.MatchValue) else node]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "with" in node.func.attr:
            parts = node.args  # startswith, endswith
        for part in parts:
            yield from ((node.lineno, name) for name in named(part))


def test_a_comparison_with_a_name_is_found_and_one_that_is_passed_on_is_none() -> None:
    """The control."""
    sources = ('way == "ddp"', 'way in ("mp", "pp")', '{"lora": 1}[technique]', 'task in {"chat"}',
               'way.startswith("zero1")', 'match way:\n    case "tp":\n        pass')  # fmt: skip
    assert [source for source in sources if not list(compared(source))] == []
    assert list(compared('replace(run, parallel="ddp")')) == []


def test_no_name_of_the_table_is_compared() -> None:
    assert len(FILES) > 100
    found = [
        (str(path.relative_to(REPOSITORY)), line, name)
        for path in FILES
        for line, name in compared(path.read_text("utf-8"))
        if name not in OTHER_NAMES.get(path, ())
    ]
    assert found == []
