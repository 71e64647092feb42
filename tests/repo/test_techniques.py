"""A technique can be seen: its library's call stands in the workflow or one call below, and its notebook prints it."""

import ast
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from common.base.paths import REPOSITORY

CALLS = {
    "2.1": ("LoraConfig", "get_peft_model"),
    "2.2": ("DistributedDataParallel",),
    "2.3": ("BitsAndBytesConfig",),
    "2.4": ("requires_grad_",),
    "2.5": ("load_base_model", "custom_device_map"),
    "2.6": ("fully_shard", "initialize"),
    "2.7": ("PipelineStage", "Schedule1F1B"),
    "2.8": ("all_to_all_single", "register", "DistributedDataParallel", "fully_shard"),
    "3.1": ("parallelize_module",),
    "3.2": ("prepare", "Seq2SeqTrainer", "all_reduce"),
    "3.4": ("logsigmoid",),
    "3.5": ("clamp",),
}
"""By technique, what its libraries do it with."""
BY_THE_TASK = {"3.4": {"pair_results": "common.tasks.preferences"}}
"""What a folder's loop calls by its task's `Objective`, and where it is."""


def run_folder(technique: str) -> Path:
    return min(REPOSITORY.glob(f"{technique}_*/run_0_*"))


def names_in(node: ast.AST) -> set[str]:
    return {getattr(each, "id", "") or getattr(each, "attr", "") for each in ast.walk(node)}


def defined_in(tree: ast.Module) -> dict[str, ast.AST]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def names_below(name: str, module: str) -> set[str]:
    """The names in a function or class of a module; a class counts as what it derives from, too."""
    defined = defined_in(ast.parse(Path(find_spec(module).origin).read_text(encoding="utf-8")))
    found = names_in(defined[name]) if name in defined else set()
    bases = [base for each in found & defined.keys() for base in getattr(defined[each], "bases", [])]
    return found.union(*map(names_in, bases))


@pytest.mark.parametrize("technique", CALLS)
def test_the_call_is_at_most_one_below_the_workflow(technique: str) -> None:
    """What a workflow calls of its own folder counts as the workflow."""
    trees = {path.stem: ast.parse(path.read_text("utf-8")) for path in run_folder(technique).glob("my_*.py")}
    nodes = [node for tree in trees.values() for node in tree.body]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    module_of = {each.name: node.module for node in imports for each in node.names}
    helpers = {
        name: node for stem, tree in trees.items() if "_utils_" in stem for name, node in defined_in(tree).items()
    }
    named = set().union(*(names_in(tree) for stem, tree in trees.items() if "_workflow_" in stem))
    while called := named & helpers.keys():
        named |= set().union(*(names_in(helpers.pop(name)) for name in called))
    called = {name: module_of[name] for name in named & module_of.keys()} | BY_THE_TASK.get(technique, {})
    of_common = [names_below(name, module) for name, module in called.items() if module.startswith("common.")]
    assert named.union(*of_common) >= set(CALLS[technique])


@pytest.mark.parametrize("technique", CALLS)
def test_the_notebook_prints_it(technique: str) -> None:
    cells = [json.loads(path.read_text("utf-8"))["cells"] for path in run_folder(technique).glob("*.ipynb")]
    printed = json.dumps([cell["outputs"] for of_one in cells for cell in of_one if cell["cell_type"] == "code"])
    assert [call for call in CALLS[technique] if call not in printed] == []
