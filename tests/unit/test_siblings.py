"""Sibling run folders are copies but for the literal, and what follows from it."""

import ast
import re
import shutil
from pathlib import Path

import nbformat
import pytest
import yaml

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import read_literal, run_folders
from common.siblings import accelerate_config, parameters_for, stale_files

TECHNIQUE = "2.2_lora_finetuning_with_ddp"
WORKFLOW = "my_workflow_lora_finetuning_with_ddp.py"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of one technique's folder, to spoil."""
    shutil.copytree(REPOSITORY / TECHNIQUE, tmp_path / TECHNIQUE, ignore=shutil.ignore_patterns("results", "records"))
    return tmp_path


def test_every_sibling_is_a_copy() -> None:
    assert len(run_folders()) >= 6
    assert stale_files() == {}


def test_a_changed_line_a_cell_and_a_number_of_processes_are_found_and_mended(copied: Path) -> None:
    sibling = copied / TECHNIQUE / "run_2_a6000_48g_x4"
    assert stale_files(copied) == {}
    spoilt = {
        sibling / WORKFLOW: ("merge(log, trainer, tokenizer)", "merge(log, trainer, None)"),
        sibling / "my_accelerate_config.yaml": ("num_processes: 4", "num_processes: 2"),
        sibling / "lora_finetuning_with_ddp_nblaunch.ipynb": (
            "per_device_train_batch_size = 14",
            "per_device_train_batch_size = 15",
        ),
    }
    for path, (right, wrong) in spoilt.items():
        assert right in path.read_text()
        path.write_text(path.read_text().replace(right, wrong))
    stale = stale_files(copied)
    assert set(stale) == set(spoilt)
    for path, content in stale.items():
        path.write_text(content)
    assert stale_files(copied) == {}


def test_a_new_gpu_is_a_copied_folder_and_an_edited_literal(copied: Path) -> None:
    new = copied / TECHNIQUE / "run_3_mine"
    shutil.copytree(copied / TECHNIQUE / "run_1_a6000_48g_x2", new)
    with pytest.raises(BadInputError, match="run_3_mine has run_folder"):
        stale_files(copied)
    literal = (new / WORKFLOW).read_text().replace("run_1_a6000_48g_x2", "run_3_mine")
    literal = literal.replace("devices=2", "devices=8").replace(
        "per_device_train_batch_size=14", "per_device_train_batch_size=6"
    )
    (new / WORKFLOW).write_text(literal)
    for path, content in stale_files(copied).items():
        path.write_text(content)
    assert read_literal(new / WORKFLOW).devices == 8
    assert "--standalone --nproc_per_node 8" in (new / WORKFLOW).read_text()
    assert yaml.safe_load((new / "my_accelerate_config.yaml").read_text())["num_processes"] == 8
    cells = nbformat.read(new / "lora_finetuning_with_ddp_acclaunch.ipynb", as_version=4).cells
    parameters = next(cell.source for cell in cells if "parameters" in cell.metadata.get("tags", []))
    assert "devices = 8" in parameters
    assert "per_device_train_batch_size = 6  # rows per rank and step" in parameters


def test_a_folder_for_several_machines_has_the_commands_of_each(copied: Path) -> None:
    new = copied / TECHNIQUE / "run_3_mine"
    shutil.copytree(copied / TECHNIQUE / "run_1_a6000_48g_x2", new)
    literal = (new / WORKFLOW).read_text().replace("run_1_a6000_48g_x2", "run_3_mine")
    (new / WORKFLOW).write_text(literal.replace("devices=2", "devices=6, nodes=3"))
    for _ in range(2):  # what is written is no change any more
        stale = stale_files(copied)
        for path, content in stale.items():
            path.write_text(content)
    assert not stale
    docstring = ast.get_docstring(ast.parse((new / WORKFLOW).read_text()))
    assert "torchrun --nnodes 3 --nproc_per_node 2 --rdzv_backend c10d --rdzv_endpoint ADDRESS:29400 \\\n" in docstring
    assert "--machine_rank NUMBER --main_process_ip ADDRESS \\\n" in docstring
    config = yaml.safe_load((new / "my_accelerate_config.yaml").read_text())
    assert (config["num_machines"], config["num_processes"], config["main_process_port"]) == (3, 6, 29500)


def test_3_2_across_machines_has_one_process_on_each() -> None:
    said = {
        path.parent.name: re.findall(r"^    torchrun (.*--nproc_per_node \d)", path.read_text(), re.MULTILINE)
        for path in (REPOSITORY / "3.2_summarization").glob("run_*/my_workflow_summarization_machines.py")
    }
    assert said == {
        "run_0_cpu_x2": ["--standalone --nproc_per_node 2"],
        "run_1_v100_16g_x4": ["--standalone --nproc_per_node 4"],
        "run_2_machines_x4": ["--nnodes 4 --nproc_per_node 1"],
    }


def test_a_sibling_keeps_its_own_adapters_recipe_beside_its_run(tmp_path: Path) -> None:
    technique, name = "3.1_text_classification", "my_workflow_text_classification.py"
    shutil.copytree(REPOSITORY / technique, tmp_path / technique, ignore=shutil.ignore_patterns("results", "records"))
    source, sibling = (tmp_path / technique / folder / name for folder in ("run_0_cpu_x2", "run_1_a100_80g_x2"))
    own = [line for line in sibling.read_text().splitlines() if line.startswith("LORA = ")]
    assert own != [line for line in source.read_text().splitlines() if line.startswith("LORA = ")]
    run = read_literal(sibling)
    source.write_text(source.read_text().replace("def load_data(", "def load_the_data("))
    for path, content in stale_files(tmp_path).items():
        path.write_text(content)
    assert stale_files(tmp_path) == {}
    assert "def load_the_data(" in sibling.read_text()
    assert [line for line in sibling.read_text().splitlines() if line.startswith("LORA = ")] == own
    assert read_literal(sibling) == run != read_literal(source)


def test_outputs_of_a_sibling_stay_while_its_cells_do(copied: Path) -> None:
    path = copied / TECHNIQUE / "run_1_a6000_48g_x2" / "lora_finetuning_with_ddp_nblaunch.ipynb"
    notebook = nbformat.read(path, as_version=4)
    code = next(cell for cell in notebook.cells if cell.cell_type == "code")
    code.outputs = [nbformat.v4.new_output("stream", text="from a real GPU")]
    nbformat.write(notebook, path)
    assert stale_files(copied) == {}
    source = copied / TECHNIQUE / "run_0_cpu_x2" / path.name
    source.write_text(source.read_text().replace("At the first step", "At the very first step"))
    assert "from a real GPU" not in stale_files(copied)[path]


def test_the_first_folders_parameters_are_those_of_its_literal() -> None:
    for folder, run in run_folders().items():
        for path in folder.glob("*.ipynb"):
            cells = nbformat.read(path, as_version=4).cells
            cell = next(cell.source for cell in cells if "parameters" in cell.metadata.get("tags", []))
            assert parameters_for(run, cell) == cell, path


def test_the_accelerate_file_asks_for_the_runs_devices(run_config: RunConfig) -> None:
    on_cpu = yaml.safe_load(accelerate_config(run_config))
    assert (on_cpu["use_cpu"], on_cpu["num_processes"], on_cpu["distributed_type"]) == (True, 1, "MULTI_GPU")
    on_gpu = yaml.safe_load(accelerate_config(RunConfig(device="cuda", parallel="ddp", devices=4)))
    assert (on_gpu["use_cpu"], on_gpu["num_processes"]) == (False, 4)
