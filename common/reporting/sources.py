"""The source of functions, for notebooks that show what their ranks will call, but must not import it."""

import ast
from importlib.util import find_spec
from pathlib import Path


def source_of(*names: str) -> str:
    """Return the source of functions, classes or methods named like `common.training.ddp:data_parallel`.

    Files are read, and not imported: ranks that are forks of a notebook must find CUDA, and what may use it, untouched.
    """
    found = []
    for name in names:
        module, _, path = name.partition(":")
        text = Path(find_spec(module).origin).read_text(encoding="utf-8")
        node: ast.AST = ast.parse(text)
        for part in path.split("."):
            node = next(each for each in node.body if getattr(each, "name", "") == part)
        found.append(ast.get_source_segment(text, node, padded=True))
    return "\n\n\n".join(found)
