"""Techniques by hand: cells run with their proofs; an exercise's check fails unsolved and passes with its solution."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

from common.base.paths import REPOSITORY
from tests.forked import TAKES_BACKWARD_PASSES
from tests.notebooks.conftest import kernels_forked
from tests.pace import patient

FOLDERS = sorted(REPOSITORY.glob("[0-9].[0-9]_*/by_hand"))
SUFFIXES = ("by_hand", "exercises", "solutions")
LONGEST_LINES = 30  # of a cell, and of a function
LONGEST_S = 120  # of a cell
EXERCISES = 3
LONG = ("2.6", "3.1", "3.2", "3.4", "3.5")  # of which the rest takes a quarter of a minute more than the proof
RUNS_A_FOLDER = re.compile(r"^!.*\.\./run_0_", re.MULTILINE)  # which `make notebooks` does; recipes have own tests


def id_of(folder: Path) -> str:
    return folder.parent.name[:3]


def notebook_of(folder: Path, suffix: str) -> Path:
    (found,) = folder.glob(f"*_{suffix}.ipynb")
    return found


def cells_of(folder: Path, suffix: str) -> list[NotebookNode]:
    return nbformat.read(notebook_of(folder, suffix), as_version=4).cells


def code_of(folder: Path, suffix: str) -> list[NotebookNode]:
    return [cell for cell in cells_of(folder, suffix) if cell.cell_type == "code"]


def is_tagged(cell: NotebookNode, tag: str) -> bool:
    return tag in cell.metadata.get("tags", [])


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelManager]:
    """A kernel for all notebooks; it and the ranks they start are forks, as most of their time would be imports."""
    manager = KernelManager(kernel_name="python3")
    with kernels_forked(tmp_path_factory.mktemp("kernel") / "kernel.log", {TAKES_BACKWARD_PASSES: "1"}):
        manager.start_kernel()
    yield manager
    manager.shutdown_kernel(now=True)


def executed(cells: list[NotebookNode], folder: Path, kernel: KernelManager) -> list[NotebookNode]:
    """Run cells in order, without names of notebooks before; an error ends it, but in a cell that is to raise one."""
    begin = f"%reset -f\n%cd -q {folder}"
    fresh = [nbformat.v4.new_code_cell(cell.source, metadata=cell.metadata) for cell in cells]  # each with its own id
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(begin), *fresh])
    NotebookClient(notebook, km=kernel, timeout=round(patient(LONGEST_S))).execute()
    return notebook.cells[1:]


def test_each_technique_that_trains_has_all_three() -> None:
    techniques = {path.name for path in REPOSITORY.glob("[23].[0-9]_*")}
    assert {folder.parent.name for folder in FOLDERS} == techniques
    for folder in FOLDERS:
        assert len({notebook_of(folder, suffix).stem.removesuffix(f"_{suffix}") for suffix in SUFFIXES}) == 1


def proof_of(folder: Path) -> list[NotebookNode]:
    """Return the code of the sections up to `The same in this repository`."""
    cells = cells_of(folder, "by_hand")
    headings = [" ".join(re.findall(r"^## .*", cell.source, re.MULTILINE)) for cell in cells]
    (last,) = (number for number, heading in enumerate(headings) if "The same in this repository" in heading)
    end = next(number for number, heading in enumerate(headings) if heading and number > last)
    return [cell for cell in cells[:end] if cell.cell_type == "code"]


def whole_of(folder: Path) -> list[NotebookNode]:
    return [cell for cell in code_of(folder, "by_hand") if not RUNS_A_FOLDER.search(cell.source)]


@pytest.mark.parametrize("folder", FOLDERS, ids=id_of)
def test_by_hand_is_equal_to_the_library_and_to_this_repository(folder: Path, kernel: KernelManager) -> None:
    proof = proof_of(folder)
    assert sum(is_tagged(cell, "by-hand") for cell in proof) >= 4
    assert any("assert" in cell.source for cell in proof)
    executed(proof if id_of(folder) in LONG else whole_of(folder), folder, kernel)


@pytest.mark.slow
@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if id_of(folder) in LONG], ids=id_of)
def test_mistakes_and_measurements_are_as_the_text_says(folder: Path, kernel: KernelManager) -> None:
    whole, proof = whole_of(folder), proof_of(folder)
    assert any("assert" in cell.source for cell in whole[len(proof) :])  # an error in a cell ends it
    executed(whole, folder, kernel)


@pytest.mark.parametrize("folder", FOLDERS, ids=id_of)
def test_a_check_fails_unsolved_and_passes_solved(folder: Path, kernel: KernelManager) -> None:
    unsolved, solved = code_of(folder, "exercises"), code_of(folder, "solutions")
    cells: list[NotebookNode] = []
    for before, after in zip(unsolved, solved, strict=True):
        if not is_tagged(before, "exercise"):
            assert before.source == after.source
        if is_tagged(before, "check"):
            solution = cells.pop()
            first = nbformat.v4.new_code_cell(before.source, metadata={"tags": ["raises-exception", "unsolved"]})
            cells += [first, solution]
        elif is_tagged(before, "exercise"):
            cells.append(before)
        cells.append(after)
    found = executed(cells, folder, kernel)
    tried = [cell for cell in found if is_tagged(cell, "unsolved")]
    assert len(tried) == EXERCISES
    assert all(any(output.output_type == "error" for output in cell.outputs) for cell in tried)
    passed = [output.text for cell in found for output in cell.outputs if output.output_type == "stream"]
    assert [f"{number} is solved" in "".join(passed) for number in range(1, EXERCISES + 1)] == [True] * EXERCISES


@pytest.mark.parametrize("folder", FOLDERS, ids=id_of)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_it_is_fit_to_be_read(folder: Path, suffix: str) -> None:
    cells, code = cells_of(folder, suffix), code_of(folder, suffix)
    assert all(word in cells[0].source for word in ("**Time:**", "**Before this:**"))
    assert len(cells) - len(code) >= len(cells) // 3
    for cell in code:
        assert len(cell.source.splitlines()) <= LONGEST_LINES
        if not re.search(r"^[!%]", cell.source, re.MULTILINE):
            for node in ast.walk(ast.parse(cell.source)):
                assert not isinstance(node, ast.FunctionDef) or node.end_lineno - node.lineno < LONGEST_LINES
    counts = [cell.execution_count for cell in code]
    assert counts == ([None] * len(code) if suffix == "exercises" else list(range(1, len(code) + 1)))
    text = notebook_of(folder, suffix).read_text(encoding="utf-8")
    assert not re.search(r"(/(home|root|Users|tmp|work)/|hf_[A-Za-z0-9]{20,})", text)
