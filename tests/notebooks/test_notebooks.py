"""Every notebook runs from top to bottom, and is fit to be read: order, size, no path of a machine, no secret."""

import ast
import json
import re
from pathlib import Path

import nbformat
import papermill
import pytest
from PIL import Image

from common.base.paths import REPOSITORY
from common.records.store import RECORD_NAME, Record, load_record
from common.reporting.rows import data_parallel_ranks

NOTEBOOKS = sorted(REPOSITORY.glob("[0-9].[0-9]_*/run_*/*.ipynb"))
SOURCES = list({(path.parts[-3], path.name): path for path in reversed(NOTEBOOKS)}.values())[::-1]
"""Each technique's first ones; that the rest have the same cells is proved in tests/unit/test_siblings.py."""
LONGEST_CELL_LINES = 25
ROWS = 33
SMALL = {"train_rows": ROWS, "test_rows": 5, "num_train_epochs": 1}
PLANNING = [path for path in NOTEBOOKS if path.parts[-3].startswith("1.1_")]  # they train nothing; they have own tests
ACROSS = [path for path in NOTEBOOKS if path.parts[-3].startswith("3.2_") and path.parent.name[:5] != "run_0"]
"""Copies of a notebook that starts three worlds, and takes minutes; only the copy for the CPU is run."""
ZERO_COPIES = [path for path in NOTEBOOKS if "zero" in path.stem and path.parent.name[:5] != "run_0"]
"""Likewise, one for each stage; `make soak` runs them."""
COMPARING = [path for path in NOTEBOOKS if path.stem.endswith("_compare")]  # they show what was run before
FOR_CPU = [path for path in NOTEBOOKS if path.parent.name.startswith("run_0_") and path not in (*PLANNING, *COMPARING)]
FIRST = ("lora_finetuning_complete.ipynb", "lora_finetuning_with_ddp_nblaunch.ipynb")
"""One notebook that runs here, and one that starts ranks."""
EMBEDDED_DEFAULT = {"device": "cpu", "gpu": "", "model": "assets/embedded_base", "precision": "fp32"}
"""What makes a GPU folder's notebook run here: another device and model, and nothing else."""
CELL_BY_CELL = ("complete", "finetuning", "mp", "compare", "answering", "tuning")
"""Last words of the notebooks that start no ranks."""


def id_of(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


def marks_of(slow: bool, path: Path | None = None) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] * slow + [pytest.mark.soak] * (path in ZERO_COPIES)


@pytest.fixture
def what_it_needs(path: Path, request: pytest.FixtureRequest) -> None:
    if "zero" in id_of(path):  # of a notebook, or of its folder
        request.getfixturevalue("needs_deepspeed")


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_there_are_notebooks() -> None:
    assert {path.name for path in NOTEBOOKS} >= {
        "lora_finetuning_complete.ipynb",
        "lora_finetuning_with_ddp_nblaunch.ipynb",
        "lora_finetuning_with_ddp_acclaunch.ipynb",
        "full_finetuning.ipynb",
        "full_finetuning_with_mp.ipynb",
        "qlora_finetuning.ipynb",
        "full_finetuning_with_fsdp_nblaunch.ipynb",
        "full_finetuning_with_zero_torchrun.ipynb",
        "text_classification_nblaunch.ipynb",
        "text_classification_compare.ipynb",
        "summarization_torchrun.ipynb",
        "visual_question_answering.ipynb",
        "preference_tuning.ipynb",
    }


def with_most_slow() -> list:
    """Every notebook; all but the first technique's only in `make test-all`, or in `make soak`."""
    return [
        pytest.param(path, id=id_of(path), marks=marks_of(path.name not in FIRST or path not in FOR_CPU, path))
        for path in NOTEBOOKS
        if path not in (*PLANNING, *COMPARING, *ACROSS)
    ]


def parameters_cell(path: Path) -> str:
    return next(cell.source for cell in code_cells(path) if "parameters" in cell.metadata.get("tags", []))


def parameters_for(path: Path, tmp_path: Path, encoder: str) -> dict:
    """A small run; a GPU folder's on two CPU devices, with the embedded default in place of its model."""
    parameters = {**SMALL, "results_root": str(tmp_path)}
    if "classification" in path.stem:
        parameters = {"train_rows": ROWS, "validation_rows": 9, "test_rows": 9, "results_root": str(tmp_path)}
        parameters["settings"] = {"num_train_epochs": 1}
    if "summarization" in path.stem:
        parameters = {"train_rows": ROWS, "validation_rows": 9, "test_rows": 9, "results_root": str(tmp_path)}
        parameters["settings"] = {"num_train_epochs": 1, "max_new_tokens": 12}
    if "visual" in path.stem or "preference" in path.stem:
        parameters = {"train_rows": ROWS, "test_rows": 5, "results_root": str(tmp_path)}
        parameters["settings"] = {"num_train_epochs": 1, "validation_rows": 9}
    if "zero" in path.stem:
        parameters["steps"] = -1  # all of the epoch's
    if path not in FOR_CPU:
        parameters |= {
            "settings": {**parameters.get("settings", {}), **EMBEDDED_DEFAULT},
            "per_device_train_batch_size": 8,
        }
        if {"ddp", "pp", "fsdp", "zero", "classification"} & set(path.stem.split("_")):
            parameters["devices"] = 2
        if "mp" in path.stem.split("_"):
            parameters |= {"settings": {**EMBEDDED_DEFAULT, "devices": 1}, "stages": 2}
        if "precision" in parameters_cell(path):  # there the notebook's own word counts
            parameters["precision"] = parameters["settings"]["precision"]
            parameters["settings"] = {k: v for k, v in EMBEDDED_DEFAULT.items() if k != "precision"}
        if "classification" in path.stem:
            parameters["settings"] |= {"model": encoder, "per_device_train_batch_size": 8}
        if "visual" in path.stem:
            parameters["settings"] |= {"model": "assets/embedded_vision_base", "devices": 1}
        if "preference" in path.stem:
            parameters["settings"] |= {"model": "assets/embedded_labeller", "devices": 1}
        if "acclaunch" in path.stem:
            parameters["config_file"] = "../run_0_cpu_x2/my_accelerate_config.yaml"
    return parameters


@pytest.mark.usefixtures("what_it_needs")
@pytest.mark.parametrize("path", with_most_slow())
def test_the_notebook_runs(
    path: Path, tmp_path: Path, encoders: dict[str, str], request: pytest.FixtureRequest
) -> None:
    """Kernel and ranks are forks, but for the first `notebook_launcher`, which has processes as users do."""
    if path.name != FIRST[1] or path not in FOR_CPU:
        request.getfixturevalue("forked_kernels")
    parameters = parameters_for(path, tmp_path, encoders["bert"])
    papermill.execute_notebook(path, tmp_path / "out.ipynb", parameters, cwd=path.parent, progress_bar=False)
    records = [load_record(found) for found in tmp_path.glob(f"results/*/{RECORD_NAME}")]
    assert len(records) == (3 if {"zero", "summarization"} & set(path.stem.split("_")) else 1)  # of a stage, a loop
    for record in records:
        check_record(record, path)
    drawn = {picture.relative_to(tmp_path / "results").parts[1] for picture in tmp_path.glob("results/*/*.png")}
    assert drawn == pictures_of(path)


def own_data(path: Path, folder: Path) -> dict:
    """Settings with 60 rows of somebody else, in another format and with other names than the repository's."""
    numbers = [{"n": n, "parity": ("even", "odd")[n % 2]} for n in range(60)]
    if "visual" in path.stem:
        for each in numbers:
            Image.new("RGB", (48, 32), (4 * each["n"], 0, 0)).save(folder / f"{each['n']}.png")
        rows, columns = (
            [{"image": f"{n}.png", "question": f"Is it red? {n}", "answer": "A little."} for n in range(60)],
            {},
        )
    elif "preference" in path.stem:
        rows = [
            {"prompt": f"Is {each['n']} even?", "chosen": f"It is {each['parity']}.", "rejected": "Who knows?"}
            for each in numbers
        ]
        columns = {}
    elif "classification" in path.stem:
        rows = [{"claim": f"The number {each['n']} is here.", "kind": each["parity"]} for each in numbers]
        columns = {"text_column": "claim", "label_column": "kind"}
    elif "summarization" in path.stem:
        rows = [
            {"talk": f"A: Take {each['n']}.\nB: It is {each['parity']}.", "gist": each["parity"]} for each in numbers
        ]
        columns = {"text_column": "talk", "summary_column": "gist"}
    else:
        rows, columns = (
            [
                {"instruction": "Even or odd?", "input": str(each["n"]), "output": f"{each['n']} is {each['parity']}."}
                for each in numbers
            ],
            {},
        )  # Alpaca's columns
    file = folder / "own.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return {"data": str(file), **columns}


@pytest.mark.slow
@pytest.mark.usefixtures("what_it_needs", "forked_kernels")
@pytest.mark.parametrize("path", FOR_CPU, ids=id_of)
def test_the_notebook_runs_on_own_data(path: Path, tmp_path: Path) -> None:
    settings = {"num_train_epochs": 1, "max_new_tokens": 12}
    parameters = {"results_root": str(tmp_path), "settings": {**settings, **own_data(path, tmp_path)}}
    if "num_train_epochs = " in parameters_cell(path):
        parameters |= {"num_train_epochs": parameters["settings"].pop("num_train_epochs")}
    if "classification" in path.stem:
        del parameters["settings"]["max_new_tokens"]
    if "zero" in path.stem:
        parameters["steps"] = -1
    papermill.execute_notebook(path, tmp_path / "out.ipynb", parameters, cwd=path.parent, progress_bar=False)
    records = [load_record(found) for found in tmp_path.glob(f"results/*/{RECORD_NAME}")]
    assert records
    for record in records:
        assert record["status"] == "completed"
        assert record["config"]["data"] == str(tmp_path / "own.jsonl")


def check_record(record: Record, path: Path) -> None:
    assert record["status"] == "completed"
    assert sum(share["samples"] for share in record["world"][: data_parallel_ranks(record)]) == ROWS
    last_word = path.stem.split("_")[-1]
    assert record["launcher"] == ("notebook" if last_word in CELL_BY_CELL else last_word)
    assert record["run_folder"] == str(path.parent.relative_to(REPOSITORY))


def pictures_of(path: Path) -> set[str]:
    """What a notebook draws."""
    words = set(path.stem.split("_"))
    if "zero" in words:
        return {"losses.png", "held.png"}
    if "summarization" in words:
        return {"losses.png"}
    if "classification" in words:
        return {"accuracy.png", "confusion.png", "memory.png"}
    if "visual" in words:
        return {"losses.png", "memory.png", "gallery.png"}
    if "preference" in words:
        return {"losses.png", "memory.png", "log_probs.png"}
    more = {"pp": "timeline.png", "qlora": "levels.png", "fsdp": "held.png"}
    return {"losses.png", "scores.png", "memory.png", *(more[word] for word in words & more.keys())}


@pytest.mark.usefixtures("forked_kernels")
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.parent.name, marks=marks_of(slow=path not in SOURCES)) for path in COMPARING],
)
def test_what_was_run_is_compared(path: Path, tmp_path: Path) -> None:
    papermill.execute_notebook(path, tmp_path / "out.ipynb", cwd=path.parent, progress_bar=False)
    said = (tmp_path / "out.ipynb").read_text()
    assert "LoRA with TP" in said
    assert said.count("image/png") == 2  # curves, confusion


@pytest.mark.usefixtures("what_it_needs", "forked_kernels")
@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=marks_of(slow=path.name != FIRST[0])) for path in FOR_CPU]
)
def test_bad_input_ends_the_notebook_with_the_sentence(path: Path, tmp_path: Path) -> None:
    wrong = {"per_device_train_batch_size": 0}
    parameters = {
        **SMALL,
        **(wrong if "per_device_train_batch_size = " in parameters_cell(path) else {"settings": wrong}),
    }
    parameters["results_root"] = str(tmp_path)
    with pytest.raises(papermill.PapermillExecutionError) as failed:
        papermill.execute_notebook(path, tmp_path / "out.ipynb", parameters, cwd=path.parent, progress_bar=False)
    partial = (tmp_path / "out.ipynb").read_text()
    assert "per_device_train_batch_size is 0, but must be at least 1" in str(failed.value) + partial
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("path", SOURCES, ids=id_of)
def test_the_first_cell_tells_versions_without_cuda_and_parameters_follow(path: Path) -> None:
    cells = code_cells(path)
    assert "version(" in cells[0].source
    assert not re.search(r"^\s*(import|from) torch", cells[0].source, re.MULTILINE)
    assert cells[1].metadata.get("tags") == ["parameters"]


@pytest.mark.parametrize("path", SOURCES, ids=id_of)
def test_the_reader_knows_what_for_how_long_and_what_next(path: Path) -> None:
    first, *_, last = nbformat.read(path, as_version=4).cells
    assert "You will learn" in first.source
    assert re.search(r"\*\*Time:\*\* (about|half|seconds)", first.source)
    assert "What to try next" in last.source


@pytest.mark.parametrize("path", SOURCES, ids=id_of)
def test_cells_are_short_and_explained(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    for cell in cells:
        if cell.cell_type == "code":
            assert len(cell.source.splitlines()) <= LONGEST_CELL_LINES
            for node in ast.walk(ast.parse(cell.source)):
                assert not (isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 10)
    assert sum(cell.cell_type == "markdown" for cell in cells) >= len(cells) // 3


@pytest.mark.parametrize("path", [path for path in FOR_CPU if path.stem.split("_")[-1] in CELL_BY_CELL], ids=id_of)
def test_a_cell_calls_a_step_as_the_workflow_does(path: Path) -> None:
    """What only a slow test saw: a step whose arguments changed in the workflow, and not in the notebook."""
    (workflow,) = path.parent.glob("my_workflow_*.py")
    taken = {ast.unparse(call) for call in calls_in(workflow.read_text(encoding="utf-8"))}
    cells = "\n".join(cell.source for cell in code_cells(path) if not cell.source.startswith("%"))
    steps = [ast.unparse(call) for call in calls_in(cells) if ast.unparse(call.func).startswith("steps.")]
    named = {call.replace("steps.", "") for call in steps}
    assert len(named) >= 6
    assert named <= taken


def calls_in(source: str) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]


def test_kept_outputs_are_those_of_one_run_in_order() -> None:
    """Of copies, too: a folder for a GPU may keep outputs of its own."""
    for path in NOTEBOOKS:
        cells = code_cells(path)
        counts = [cell.execution_count for cell in cells]
        assert counts in (list(range(1, len(cells) + 1)), [None] * len(cells)), path
        assert not any(output.output_type == "error" for cell in cells for output in cell.outputs), path
        assert not re.search(r"(/(home|root|Users|tmp)/|hf_[A-Za-z0-9]{20,})", json.dumps(cells)), path
        assert str(REPOSITORY) not in path.read_text(encoding="utf-8"), path
