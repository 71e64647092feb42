"""Run folders: their workflows, and the `RunConfig` literal that describes a run, read without an import."""

import ast
import os
import re
from functools import cache
from pathlib import Path

from common.base.errors import BadInputError, closest
from common.base.paths import REPOSITORY, find_here, from_repository
from common.base.run_config import RunConfig

# techniques and parallelisms that the workflows of a technique folder do besides those of their literal
FOLDERS_TAKE = (
    ("2.3_qlora_finetuning", ("qlora",), ("single", "ddp")),
    ("2.6_full_finetuning_with_fsdp", ("full", "lora"), ("ddp", "fsdp", "zero1", "zero2", "zero3")),
    ("2.6_full_finetuning_with_fsdp", ("qlora",), ("fsdp",)),
    ("2.7_full_finetuning_with_pp", ("full", "lora"), ("pp",)),
    ("2.8_full_finetuning_with_sp", ("full", "lora", "qlora"), ("ddp", "fsdp")),
)
LITERAL = re.compile(r"^RUN = RunConfig\(", re.MULTILINE)


def folder_named(run_folder: Path) -> Path:
    """Return where a folder is that is named from here, or else from the repository's root."""
    return (find_here(run_folder, os.path.isdir) or REPOSITORY / run_folder).resolve()


def workflows_of(run_folder: Path) -> list[Path]:
    """Return the `my_workflow_*.py` of a run folder, named as for `folder_named`: one or several."""
    run_folder = folder_named(run_folder)
    found = sorted(run_folder.glob("my_workflow_*.py"))
    if not found:
        here = str(from_repository(run_folder))
        raise BadInputError(f"{here} is no run folder, as it has 0 files my_workflow_*.py: {_folders_meant_by(here)}")
    return found


def _folders_meant_by(name: str) -> str:
    """Return what to choose instead of `name`: its technique's run folders, the closest, or each first one."""
    folders = sorted({str(path.parent.relative_to(REPOSITORY)) for path in REPOSITORY.glob("*/run_*/my_workflow_*.py")})
    own = [folder for folder in folders if name != "." and folder.startswith(name)]
    meant = closest(name, folders)
    if meant and not own:
        return f"did you mean {meant}?"
    return f"choose one of {', '.join(own or [folder for folder in folders if '/run_0_' in folder])}."


def literal_of(run_folder: Path) -> RunConfig:
    """Return the run of a folder, named as for `folder_named`, by its one `RUN = RunConfig(...)`."""
    return read_literal(_source_with_literal(run_folder))


def lora_of(run_folder: Path) -> dict[str, object]:
    """Return a folder's literal `LORA`: by field, how LoRA's runs differ from `RUN`; empty where there is none."""
    lora = assignments(_source_with_literal(run_folder)).get("LORA")
    return ast.literal_eval(lora.value) if lora else {}


def _source_with_literal(run_folder: Path) -> str:
    """Return the module with a run folder's literal: its workflow, or what its workflows share."""
    files = [*workflows_of(run_folder), *sorted(folder_named(run_folder).glob("my_utils_*.py"))]
    found = [source for path in files if LITERAL.search(source := path.read_text(encoding="utf-8"))]
    if len(found) != 1:
        raise BadInputError(
            f"{len(found)} files my_*.py of {run_folder.name} have a `RUN = RunConfig(...)`: write one."
        )
    return found[0]


@cache
def assignments(source: str) -> dict[str, ast.Assign]:
    """Return a module's top-level statements `NAME = value` by name."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    return {ast.unparse(node.targets[0]): node for node in found}


@cache
def read_literal(source: str) -> RunConfig:
    """Return the run that the literal in a workflow's source describes, without importing the workflow."""
    call = assignments(source)["RUN"].value
    return RunConfig(**{keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords})


def run_folders(root: Path = REPOSITORY) -> dict[Path, RunConfig]:
    """Return the run of every run folder, in order."""
    folders = sorted({workflow.parent for workflow in root.glob("[0-9].[0-9]_*/run_*/my_workflow_*.py")})
    return {folder: literal_of(folder) for folder in folders}


def workflow_does(own: RunConfig, technique: str, parallel: str) -> bool:
    """Return whether the workflow of `own`'s folder trains so: others would do their own all the same."""
    folder = own.run_folder.partition("/")[0]
    taken = [settings for name, *settings in FOLDERS_TAKE if name == folder]
    taken.append(((own.technique,), (own.parallel,)))
    is_taken = any(technique in techniques and parallel in parallels for techniques, parallels in taken)
    return bool(own.goal.folder_for_one) or is_taken  # a task's own folder does all that the task is done with
