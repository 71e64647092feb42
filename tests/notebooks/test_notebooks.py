"""Every notebook runs from top to bottom, and is fit to be read: order, size, no path of a machine, no secret."""

import ast
import json
import re
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import nbformat
import pandas as pd
import papermill
import pytest
from matplotlib import pyplot
from PIL import Image

from bench.tables.table import data_parallel_ranks
from common.base.paths import REPOSITORY
from common.base.run_folders import literal_of
from common.records.store import RECORD_NAME, Record, load_record

NOTEBOOKS = sorted(REPOSITORY.glob("[0-9].[0-9]_*/run_*/*.ipynb"))
SOURCES = list({(path.parts[-3], path.name): path for path in reversed(NOTEBOOKS)}.values())[::-1]
"""Each technique's first ones; that the rest have the same cells is proved in tests/unit/test_siblings.py."""
COMMON = REPOSITORY / "common"
LONGEST_CELL_LINES = 25
ROWS = 33
SMALL = {"train_rows": ROWS, "test_rows": 5, "num_train_epochs": 1, "max_new_tokens": 12, "steps": -1}
"""Of these, a notebook is told what it, or its task, has; `steps` are ZeRO's, -1 = all of the epoch's."""
PLANNING = [path for path in NOTEBOOKS if path.parts[-3].startswith("1.1_")]  # they train nothing; they have own tests
COMPARING = [path for path in NOTEBOOKS if path.stem.endswith("_compare")]  # they show what was run before
TRAINING = [path for path in SOURCES if path not in (*PLANNING, *COMPARING)]
ACROSS = [path for path in NOTEBOOKS if path.parts[-3].startswith("3.2_") and path not in SOURCES]
"""Copies of a notebook that starts three worlds, and takes minutes; only the copy for the CPU is run."""
COPIES = [path for path in NOTEBOOKS if path not in (*PLANNING, *COMPARING, *TRAINING, *ACROSS)]
DIFFERENT_COPIES = (
    "2.1_lora_finetuning/run_2_h200_141g_x1/lora_finetuning_complete.ipynb",  # no gradient checkpointing
    "2.2_lora_finetuning_with_ddp/run_1_a6000_48g_x2/lora_finetuning_with_ddp_nblaunch.ipynb",
    "2.3_qlora_finetuning/run_1_a5000_24g_x1/qlora_finetuning.ipynb",  # nf4-double, paged_adamw_8bit
    "2.4_full_finetuning/run_2_h200_141g_x1/full_finetuning.ipynb",  # accumulation, adamw_8bit
    "2.5_full_finetuning_with_mp/run_1_a6000_48g_x2/full_finetuning_with_mp.ipynb",  # reentrant checkpointing
    "2.6_full_finetuning_with_fsdp/run_1_a100_80g_x2/full_finetuning_with_fsdp_nblaunch.ipynb",
    "2.6_full_finetuning_with_fsdp/run_3_a100_80g_x2_zero/full_finetuning_with_fsdp_nblaunch.ipynb",  # ZeRO-3
    "2.7_full_finetuning_with_pp/run_1_a6000_48g_x2/full_finetuning_with_pp_torchrun.ipynb",  # padding to 64
    "3.1_text_classification/run_1_a100_80g_x2/text_classification_nblaunch.ipynb",
    "3.3_visual_question_answering/run_1_a6000_48g_x1/visual_question_answering.ipynb",  # accumulation, workers
    "3.4_preference_tuning/run_1_a6000_48g_x1/preference_tuning.ipynb",  # checkpointing
    "3.5_reinforcement_learning/run_1_a6000_48g_x1/reinforcement_learning.ipynb",  # accumulation
)
"""Of each technique, the copy for a GPU with most settings of its own; `make soak` runs the others."""
FIRST = ("lora_finetuning_complete.ipynb", "lora_finetuning_with_ddp_nblaunch.ipynb")
"""One notebook that runs here, and one that starts ranks: those of `make test`."""
REFUSING = (
    "lora_finetuning_complete", "lora_finetuning_with_ddp_acclaunch", "full_finetuning_with_pp_torchrun",
    "text_classification_nblaunch", "visual_question_answering",
)  # fmt: skip
"""One for each way to start, and to be told: a parameter, `settings`, or a recipe's."""
CELL_BY_CELL = ("complete", "finetuning", "mp", "compare", "answering", "tuning", "learning")
"""Last words of the notebooks that start no ranks."""
OWN_DATA = {
    "visual": ({"image": "{n}.png", "question": "Is it red? {n}", "answer": "A little."}, {}),
    "reinforcement": ({"question": "Is {n} even?", "facts": "{parity}"}, {}),
    "preference": ({"prompt": "Is {n} even?", "chosen": "It is {parity}.", "rejected": "Who knows?"}, {}),
    "classification": (
        {"claim": "The number {n} is here.", "kind": "{parity}"},
        {"text_column": "claim", "label_column": "kind"},
    ),
    "summarization": (
        {"talk": "A: Take {n}.\nB: It is {parity}.", "gist": "{parity}"},
        {"text_column": "talk", "summary_column": "gist"},
    ),
    "finetuning": ({"instruction": "Even or odd?", "input": "{n}", "output": "{n} is {parity}."}, {}),
}
"""By a word of the notebook's name, a row of somebody else (Alpaca's columns for chats), and settings that name its
columns."""
PICTURES = {
    "zero": {"losses.png", "held.png"},
    "summarization": {"losses.png"},
    "classification": {"accuracy.png", "confusion.png", "memory.png"},
    "visual": {"losses.png", "memory.png", "gallery.png"},
    "preference": {"losses.png", "memory.png", "log_probs.png"},
    "reinforcement": {"rewards.png", "memory.png"},
    "pp": {"losses.png", "memory.png", "timeline.png"},
    "qlora": {"losses.png", "memory.png", "levels.png"},
    "fsdp": {"losses.png", "memory.png", "held.png"},
    "sp": {"losses.png", "memory.png", "held.png"},
    "finetuning": {"losses.png", "memory.png"},
}
"""By the first such word of its name, what a notebook draws."""


def id_of(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


def of_name(path: Path, by_word: dict[str, Any]) -> Any:
    return next(value for word, value in by_word.items() if word in path.stem.split("_"))


def in_make_test(path: Path) -> object:
    return pytest.param(path, id=id_of(path), marks=[] if path.name in FIRST else pytest.mark.slow)


def copy_of(path: Path) -> object:
    is_different = str(path.relative_to(REPOSITORY)) in DIFFERENT_COPIES
    return pytest.param(path, id=id_of(path), marks=[pytest.mark.slow, *([] if is_different else [pytest.mark.soak])])


@pytest.fixture
def what_it_needs(path: Path, request: pytest.FixtureRequest) -> None:
    """DeepSpeed; and forks of kernel and ranks."""
    if "zero" in id_of(path):  # of a notebook, or of its folder
        request.getfixturevalue("needs_deepspeed")
    request.getfixturevalue("forked_kernels")


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def tagged(path: Path, tag: str) -> list[nbformat.NotebookNode]:
    return [cell for cell in code_cells(path) if tag in cell.metadata.get("tags", [])]


def execute(path: Path, folder: Path, asked: dict[str, object]) -> None:
    """Run it with these settings: those that it has a parameter for, and the others among `settings`."""
    cell = next(cell.source for cell in code_cells(path) if "parameters" in cell.metadata.get("tags", []))
    own = {name: value for name, value in asked.items() if re.search(rf"^{name} = ", cell, re.MULTILINE)}
    more = {name: value for name, value in asked.items() if name not in own and name != "steps"}
    parameters = {**own, "settings": more, "results_root": str(folder)}
    papermill.execute_notebook(path, folder / "out.ipynb", parameters, cwd=path.parent, progress_bar=False)


def small_run(path: Path) -> dict[str, object]:
    classifies, of_steps = "classification" in path.stem, {"max_steps": -1} if "reinforcement" in path.stem else {}
    return {name: value for name, value in SMALL.items() if not (classifies and name == "max_new_tokens")} | of_steps


def own_data(path: Path, folder: Path) -> dict[str, object]:
    """Settings with 60 rows in another format and with other names than the repository's."""
    (row, columns), rows = of_name(path, OWN_DATA), []
    for n in range(60):
        rows.append({name: text.format(n=n, parity=("even", "odd")[n % 2]) for name, text in row.items()})
        if "image" in row:
            Image.new("RGB", (48, 32), (4 * n, 0, 0)).save(folder / f"{n}.png")
    (folder / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"data": str(folder / "own.jsonl"), **columns}


def on_this_machine(path: Path) -> dict[str, object]:
    """Settings that put a copy for a GPU on CPU devices, with the model of the first folder in place of its own."""
    (source,) = (each for each in SOURCES if (each.parts[-3], each.name) == (path.parts[-3], path.name))
    here = literal_of(source.parent)
    asked = {name: getattr(here, name) for name in ("device", "gpu", "model", "max_length", "precision", "devices")}
    asked |= {"validation_rows": 9, "per_device_train_batch_size": 8}
    if "mp" in path.stem.split("_"):
        asked["stages"] = 2
    if "acclaunch" in path.stem:
        asked["config_file"] = f"../{source.parent.name}/my_accelerate_config.yaml"
    return asked


def test_there_are_notebooks() -> None:
    assert {path.name for path in TRAINING} >= {
        "lora_finetuning_complete.ipynb",
        "lora_finetuning_with_ddp_nblaunch.ipynb",
        "lora_finetuning_with_ddp_acclaunch.ipynb",
        "full_finetuning.ipynb",
        "full_finetuning_with_mp.ipynb",
        "qlora_finetuning.ipynb",
        "full_finetuning_with_fsdp_nblaunch.ipynb",
        "full_finetuning_with_zero_torchrun.ipynb",
        "full_finetuning_with_pp_nblaunch.ipynb",
        "full_finetuning_with_sp_nblaunch.ipynb",
        "text_classification_nblaunch.ipynb",
        "summarization_torchrun.ipynb",
        "visual_question_answering.ipynb",
        "preference_tuning.ipynb",
        "reinforcement_learning.ipynb",
    }
    assert {str(path.relative_to(REPOSITORY)) for path in COPIES} >= set(DIFFERENT_COPIES)
    assert len(COMPARING) == 2


@pytest.mark.usefixtures("what_it_needs")
@pytest.mark.parametrize("path", [*map(in_make_test, TRAINING), *map(copy_of, COPIES)])
def test_the_notebook_runs(path: Path, tmp_path: Path) -> None:
    """Each technique's first ones with somebody else's rows, and copies with the repository's."""
    check_that_it_runs(path, tmp_path)


@pytest.mark.slow
def test_notebook_launcher_starts_ranks_as_for_a_user(tmp_path: Path) -> None:
    """In a kernel and ranks that import their libraries themselves."""
    (path,) = (each for each in SOURCES if each.name == FIRST[1])
    check_that_it_runs(path, tmp_path)


def check_that_it_runs(path: Path, tmp_path: Path) -> None:
    asked = small_run(path) | (on_this_machine(path) if path in COPIES else own_data(path, tmp_path))
    execute(path, tmp_path, asked)
    records = [load_record(found) for found in tmp_path.glob(f"results/*/{RECORD_NAME}")]
    assert len(records) == (3 if {"zero", "summarization"} & set(path.stem.split("_")) else 1)  # of a stage, a loop
    for record in records:
        check_record(record, path)
        assert record["config"]["data"] == asked.get("data", literal_of(path.parent).data)
    drawn = {picture.relative_to(tmp_path / "results").parts[1] for picture in tmp_path.glob("results/*/*.png")}
    assert drawn == of_name(path, PICTURES)


def check_record(record: Record, path: Path) -> None:
    assert record["status"] == "completed"
    assert sum(share["samples"] for share in record["world"][: data_parallel_ranks(record)]) == ROWS
    last_word = path.stem.split("_")[-1]
    assert record["launcher"] == ("notebook" if last_word in CELL_BY_CELL else last_word)
    assert record["run_folder"] == str(path.parent.relative_to(REPOSITORY))


@pytest.mark.usefixtures("forked_kernels")
def test_what_was_run_is_compared(tmp_path: Path) -> None:
    path = COMPARING[0]
    papermill.execute_notebook(path, tmp_path / "out.ipynb", cwd=path.parent, progress_bar=False)
    said = (tmp_path / "out.ipynb").read_text()
    assert "LoRA with TP" in said
    assert said.count("image/png") == 2  # curves, confusion


@pytest.mark.usefixtures("forked_kernels")
@pytest.mark.parametrize("path", [in_make_test(path) for path in TRAINING if path.stem in REFUSING])
def test_bad_input_ends_the_notebook_with_the_sentence(path: Path, tmp_path: Path) -> None:
    with pytest.raises(papermill.PapermillExecutionError) as failed:
        execute(path, tmp_path, {"per_device_train_batch_size": 0})
    partial = (tmp_path / "out.ipynb").read_text()
    assert "per_device_train_batch_size is 0, but must be at least 1" in str(failed.value) + partial
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("path", SOURCES, ids=id_of)
def test_a_notebook_is_fit_to_be_read(path: Path) -> None:
    """It says what for, for how long and what next; versions come first, without CUDA, and then the parameters."""
    cells, code = nbformat.read(path, as_version=4).cells, code_cells(path)
    assert "You will learn" in cells[0].source
    assert re.search(r"\*\*Time:\*\* (about|half|seconds)", cells[0].source)
    assert "What to try next" in cells[-1].source
    assert "version(" in code[0].source
    assert not re.search(r"^\s*(import|from) torch", code[0].source, re.MULTILINE)
    assert code[1].metadata.get("tags") == ["parameters"]
    assert len(cells) - len(code) >= len(cells) // 3
    for cell in code:
        assert len(cell.source.splitlines()) <= LONGEST_CELL_LINES
        functions = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.FunctionDef)]
        assert all(each.end_lineno - each.lineno < 10 for each in functions)


@pytest.mark.parametrize("path", SOURCES, ids=id_of)
def test_what_a_notebook_imports_is_there(path: Path) -> None:
    code = "\n".join(cell.source for cell in code_cells(path) if not cell.source.startswith("%"))
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    named = [
        f"{node.module}:{alias.name}" for node in imports for alias in node.names if not node.module.startswith("my_")
    ]
    assert any(name.startswith("common.") for name in named)
    assert not [name for name in named if not is_there(name)]


@pytest.mark.parametrize("path", SOURCES, ids=id_of)
def test_a_printed_source_is_that_of_today(path: Path) -> None:
    today = "\n".join(file.read_text("utf-8") for file in (*path.parent.glob("my_*.py"), *COMMON.rglob("*.py")))
    shown = [cell for cell in code_cells(path) if re.match(r"Code\(", cell.source.splitlines()[-1])]
    printed = [output.data["text/plain"] for cell in shown for output in cell.outputs]
    functions = [function.rstrip() for text in printed for function in re.split(r"\n\n\n", text)]
    assert [function for function in functions if function not in today] == []


@pytest.mark.parametrize("path", [path for path in SOURCES if tagged(path, "projected")], ids=id_of)
def test_what_is_projected_is_what_the_planner_says_today(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells with this tag need only the parameters and one another, so that the others need not be run."""
    monkeypatch.chdir(path.parent)
    monkeypatch.syspath_prepend(path.parent)
    names: dict[str, Any] = {"display": lambda value: print(repr(value))}
    exec("\n".join(cell.source for cell in tagged(path, "parameters")), names)
    as_in_jupyter = {"max_columns": 20, "max_colwidth": 50, "width": 80, "precision": 6}
    with pd.option_context({f"display.{name}": value for name, value in as_in_jupyter.items()}):
        for cell in tagged(path, "projected"):
            *before, last = ast.parse(cell.source).body
            is_shown = isinstance(last, ast.Expr)
            exec(compile(ast.Module(before if is_shown else [*before, last], []), path.name, "exec"), names)
            value = eval(compile(ast.Expression(last.value), path.name, "eval"), names) if is_shown else None
            today = capsys.readouterr().out + ("" if value is None else repr(value))
            assert said(cell).split() == today.split()
    pyplot.close("all")


def said(cell: nbformat.NotebookNode) -> str:
    """Return what a cell has printed and shown, without pictures."""
    texts = (each.get("text") or each.data["text/plain"] for each in cell.outputs)
    return "\n".join(text for text in texts if not text.startswith("<Figure"))


def is_there(name: str) -> bool:
    try:
        resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True


@pytest.mark.parametrize("path", [path for path in TRAINING if path.stem.split("_")[-1] in CELL_BY_CELL], ids=id_of)
def test_a_cell_calls_a_step_as_the_workflow_does(path: Path) -> None:
    """What only a slow test saw: a step whose arguments changed in the workflow, and not in the notebook."""
    (workflow,) = path.parent.glob("my_workflow_*.py")
    taken = {ast.unparse(call) for call in calls_in(workflow.read_text(encoding="utf-8"))}
    cells = "\n".join(cell.source for cell in code_cells(path) if not cell.source.startswith("%"))
    steps = [ast.unparse(call) for call in calls_in(cells) if ast.unparse(call.func).startswith("steps.")]
    named = {call.replace("steps.", "") for call in steps}
    assert len(named) >= 6
    assert named <= taken
    assert loops_in(workflow.read_text(encoding="utf-8")) <= loops_in(cells)


def loops_in(source: str) -> set[str]:
    return {ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.For)}


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
