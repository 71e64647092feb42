"""Run folders: their workflows, and the `RunConfig` literal that describes a run, read without an import."""

import ast
import re
from pathlib import Path

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig

OWN_CHANGES = ("LORA", "MACHINES")
"""Literals right after `RUN`: how the runs of a technique, or of a loop, differ from it."""
LITERAL = re.compile(r"^RUN = RunConfig\(", re.MULTILINE)


def workflows_of(run_folder: Path) -> list[Path]:
    """The `my_workflow_*.py` of a run folder: one, or several that do the same in different ways.

    Raises:
        BadInputError: the folder has none.
    """
    found = sorted(run_folder.glob("my_workflow_*.py"))
    if not found:
        there = ", ".join(
            sorted({str(path.parent.relative_to(REPOSITORY)) for path in REPOSITORY.glob("*/run_*/my_workflow_*.py")})
        )
        here = run_folder.relative_to(REPOSITORY) if run_folder.is_relative_to(REPOSITORY) else run_folder
        raise BadInputError(f"{here} is no run folder, as it has 0 files my_workflow_*.py: choose one of {there}.")
    return found


def literal_file_of(run_folder: Path) -> Path:
    """The file with a run folder's `RUN = RunConfig(...)`: its workflow, or what its workflows share.

    Raises:
        BadInputError: it is no run folder, or has no literal.
    """
    files = [*workflows_of(run_folder), *sorted(run_folder.glob("my_utils_*.py"))]
    found = [path for path in files if LITERAL.search(path.read_text(encoding="utf-8"))]
    if len(found) != 1:
        raise BadInputError(
            f"{len(found)} files my_*.py of {run_folder.name} have a literal `RUN = RunConfig(...)` at their top: "
            "write one."
        )
    return found[0]


def find_literal(source: str) -> ast.Assign:
    """The statement `RUN = RunConfig(...)` of a workflow's source."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "RUN":
            return node
    raise BadInputError("A my_workflow_*.py has no literal `RUN = RunConfig(...)` at its top: write one.")


def literal_lines(source: str) -> tuple[int, int]:
    """Return the lines, from the first up to the last, of a folder's own literals: `RUN`, and `LORA` or `MACHINES`."""
    statements, run = ast.parse(source).body, find_literal(source)
    after = [node for node in statements if node.lineno > run.lineno][:1]
    is_own = after and isinstance(after[0], ast.Assign) and ast.unparse(after[0].targets[0]) in OWN_CHANGES
    last = after[0] if is_own else run
    return run.lineno - 1, last.end_lineno


def read_literal(workflow: Path) -> RunConfig:
    """The run that a workflow's literal describes, without importing the workflow."""
    call = find_literal(workflow.read_text(encoding="utf-8")).value
    assert isinstance(call, ast.Call)
    return RunConfig(**{keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords})


def read_lora(workflow: Path) -> dict[str, object]:
    """What the literal `LORA` of a workflow with several settings says: how LoRA's runs differ from `RUN`."""
    for node in ast.parse(workflow.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LORA":
            return ast.literal_eval(node.value)
    return {}


def run_folders(root: Path = REPOSITORY) -> dict[Path, RunConfig]:
    """Every run folder and its run, in order."""
    folders = sorted({workflow.parent for workflow in root.glob("[0-9].[0-9]_*/run_*/my_workflow_*.py")})
    return {folder: read_literal(literal_file_of(folder)) for folder in folders}


def literal_of(run_folder: Path) -> RunConfig:
    """The run of a folder, named from here or from the repository's root.

    Raises:
        BadInputError: it is no run folder.
    """
    return read_literal(literal_file_of(run_folder if run_folder.is_dir() else REPOSITORY / run_folder))
