"""Sibling run folders are copies but for the literal, and what follows from it."""

import shutil
from pathlib import Path

import nbformat
import pytest
import yaml

from assets.siblings import contents_for, parameters_for, stale_files
from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_folders import literal_of, read_literal, run_folders

TECHNIQUE = "2.2_lora_finetuning_with_ddp"
WORKFLOW = "my_workflow_lora_finetuning_with_ddp.py"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of a technique's folder, to spoil."""
    left_out = shutil.ignore_patterns("results", "records")
    shutil.copytree(REPOSITORY / TECHNIQUE, tmp_path / TECHNIQUE, ignore=left_out)
    return tmp_path


def replaced(path: Path, *changes: tuple[str, str]) -> None:
    for old, new in changes:
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))


def mend(folder: Path) -> None:
    for path, content in stale_files(folder).items():
        path.write_text(content)
    assert stale_files(folder) == {}


def parameters_of(path: Path) -> str:
    """The source of a notebook's cell with its parameters."""
    cells = nbformat.read(path, as_version=4).cells
    return next(cell.source for cell in cells if "parameters" in cell.metadata.get("tags", []))


def test_every_sibling_is_a_copy() -> None:
    """With its own literals (3.1's recipe of adapters), and the commands of its number of devices and machines."""
    assert len(run_folders()) >= 6
    assert stale_files() == {}


def test_a_changed_line_a_cell_and_a_number_of_processes_are_found_and_mended(copied: Path) -> None:
    sibling = copied / TECHNIQUE / "run_2_a6000_48g_x4"
    assert stale_files(copied) == {}
    spoilt = {
        WORKFLOW: ("save(log, loop, tokenizer)", "save(log, loop, None)"),
        "my_accelerate_config.yaml": ("num_processes: 4", "num_processes: 2"),
        "lora_finetuning_with_ddp_nblaunch.ipynb": (
            "per_device_train_batch_size = 14",
            "per_device_train_batch_size = 15",
        ),
    }
    for name, change in spoilt.items():
        replaced(sibling / name, change)
    assert set(stale_files(copied)) == {sibling / name for name in spoilt}
    mend(copied)


def test_a_new_gpu_is_a_copied_folder_and_an_edited_literal(copied: Path) -> None:
    folder = copied / TECHNIQUE / "run_3_mine"
    shutil.copytree(copied / TECHNIQUE / "run_1_a6000_48g_x2", folder)
    with pytest.raises(BadInputError, match="run_3_mine has run_folder"):
        stale_files(copied)
    rows = "per_device_train_batch_size="
    replaced(
        folder / WORKFLOW, ("run_1_a6000_48g_x2", "run_3_mine"), ("devices=2", "devices=8"), (f"{rows}14", f"{rows}6")
    )
    mend(copied)
    assert read_literal((folder / WORKFLOW).read_text(encoding="utf-8")).devices == 8
    assert "torchrun --nproc_per_node 8 " in (folder / WORKFLOW).read_text()
    assert yaml.safe_load((folder / "my_accelerate_config.yaml").read_text())["num_processes"] == 8
    parameters = parameters_of(folder / "lora_finetuning_with_ddp_acclaunch.ipynb")
    assert "devices = 8" in parameters
    assert "per_device_train_batch_size = 6  # rows per rank and step" in parameters


def test_outputs_of_a_sibling_stay_while_its_cells_do(copied: Path) -> None:
    path = copied / TECHNIQUE / "run_1_a6000_48g_x2" / "lora_finetuning_with_ddp_nblaunch.ipynb"
    notebook = nbformat.read(path, as_version=4)
    code = next(cell for cell in notebook.cells if cell.cell_type == "code")
    code.outputs = [nbformat.v4.new_output("stream", text="from a real GPU")]
    nbformat.write(notebook, path)
    assert stale_files(copied) == {}
    replaced(copied / TECHNIQUE / "run_0_cpu_x2" / path.name, ("At the first step", "At the very first step"))
    assert "from a real GPU" not in stale_files(copied)[path]


def test_the_first_folders_parameters_are_those_of_its_literal() -> None:
    notebooks = [(path, run) for folder, run in run_folders().items() for path in folder.glob("*.ipynb")]
    for path, run in notebooks:
        cell = parameters_of(path)
        assert parameters_for(run, cell) == cell, path


@pytest.mark.parametrize(("name", "expected"), [("run_0_cpu_x2", []), ("run_1_a6000_48g_x1", ["preference_tuning"])])
def test_a_notebook_that_starts_no_ranks_is_not_copied_to_where_several_work(name: str, expected: list[str]) -> None:
    source = REPOSITORY / "3.4_preference_tuning" / "run_0_cpu_x1"
    folder = source.with_name(name)
    copied = contents_for(folder, literal_of(folder), source)
    assert [path.stem for path in copied if path.suffix == ".ipynb"] == expected
