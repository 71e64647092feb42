"""The workflows by every launcher: they complete, tell the truth, and refuse what they must.

Those that train start as a user's shell starts them; refusals start as forks (`tests/forked.py`).
"""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from common.base.paths import REPOSITORY
from common.records.store import fit_to_be_kept
from tests.forked import run_forked
from tests.recipes.folders import BASE, CLASSIFICATION, DDP, LORA, MP, QLORA
from tests.recipes.saved import check_adapter_and_merged


@pytest.mark.parametrize(
    ("launcher", "named"), [("torchrun", "torchrun"), pytest.param("accelerate", "acclaunch", marks=pytest.mark.slow)]
)
def test_ddp_runs_on_two_ranks_that_share_the_rows(completed: Callable, launcher: str, named: str) -> None:
    done = completed(launcher, is_forked=False)
    record, lines = done.record, done.output.splitlines()
    assert record["launcher"] == named
    assert [share["rank"] for share in record["world"]] == [0, 1]
    assert sum(share["samples"] for share in record["world"]) == 65
    assert all(share["tokens"] > 0 for share in record["world"])
    assert len(record["memory"]) == 2
    assert min(record["machine_ceiling"][scaling] for scaling in ("strong", "weak")) > 0
    for said in ("memory: now", "mini-batch:"):
        assert all(f"[RANK{rank}:CPU] {said}" in done.output for rank in (0, 1))
    first_rows = {line.partition("the first is row ")[2].split(":")[0] for line in lines if "mini-batch:" in line}
    assert len(first_rows) == 2
    speakers = {line.split()[0] for line in lines if "validation loss" in line or "tuning:" in line}
    assert speakers == {"[RANK0:CPU]"}


def test_make_run_starts_the_ranks_that_the_folder_asks_for(completed: Callable) -> None:
    assert len(completed("make run", "--max_steps", "2").record["world"]) == 2


def test_the_recorded_command_gives_the_same_losses_again(completed: Callable, tmp_path: Path) -> None:
    rows = [json.dumps({"instruction": f"What is {n}?", "output": f"It is the number {n}."}) for n in range(60)]
    (tmp_path / "own rows.jsonl").write_text("\n".join(rows))
    own = ("--data", os.path.relpath(tmp_path / "own rows.jsonl", LORA), "--threads", str(os.cpu_count()))
    done = completed("python", *own, "--max_steps", "2", "--train_rows", "-1")
    first = done.record
    assert first["environment"]["threads_per_rank"] == first["config"]["threads"] == os.cpu_count()
    python, *command = shlex.split(first["command"])
    assert python == "python"
    code = run_forked([sys.executable, *command], LORA, os.environ, tmp_path / "again.log", timeout=300)
    assert code == 0, (tmp_path / "again.log").read_text()
    again = done.record
    assert again["started_at"] > first["started_at"]
    for losses in ("training_losses", "validation_losses"):
        assert again[losses] == first[losses]


def test_one_device_runs_and_what_it_saved_loads_with_plain_libraries(completed: Callable, tmp_path: Path) -> None:
    done = completed("python", is_forked=False)
    assert done.record["environment"]["threads_per_rank"] == 1
    check_adapter_and_merged(done.results)  # gradients reached every layer through reentrant checkpointing
    for name in ("predictions_before.csv", "predictions_after.csv"):
        assert len((done.results / name).read_text().splitlines()) == 10
    assert list((done.results / "tensorboard").iterdir())
    assert AutoTokenizer.from_pretrained(done.results / "adapter").chat_template
    for place in (tmp_path, REPOSITORY):
        assert str(place) not in json.dumps(fit_to_be_kept(done.record)), "a kept record names no path of a machine"


@pytest.fixture
def bad_files(tmp_path: Path) -> None:
    """In `tmp_path`: rows that are no messages, a model without weights, and a folder for another precision."""
    shutil.copytree(REPOSITORY / "assets" / "exhibits", tmp_path / "data")
    (tmp_path / "data" / "train.jsonl").write_text('{"messages": "hello"}\n')
    shutil.copytree(BASE, tmp_path / "model", ignore=shutil.ignore_patterns("model.safetensors"))
    shutil.copytree(DDP, tmp_path / DDP.name, ignore=shutil.ignore_patterns("results", "records"))
    config = tmp_path / DDP.name / "my_accelerate_config.yaml"
    config.write_text(config.read_text().replace("mixed_precision: 'no'", "mixed_precision: bf16"))


@pytest.mark.usefixtures("bad_files")
@pytest.mark.parametrize(
    ("launcher", "folder", "overrides", "said"),
    [
        pytest.param("python", LORA, "--batch_size 0", "per_device_train_batch_size is 0", id="number"),
        pytest.param("make run", DDP, "--data no/such/folder", "The data no/such/folder do not exist", id="data",
                     marks=pytest.mark.slow),
        ("python", LORA, "--model nobody/no-such-model", "hf download nobody/no-such-model"),
        ("python", LORA, "--data {here}/data", "train.jsonl, row 1 has "),
        ("python", LORA, "--model {here}/model", "has no weights"),
        ("python", DDP, "", "asks for 2 rank(s)"),
        ("python", MP, "--stages 9", "has 4 layers, too few for 9 stages"),
        ("python", QLORA, "--parallel zero3 --devices 2", "weights in 4 bits are sharded by fsdp, or whole on each"),
        ("python", QLORA, "--technique lora", "technique is lora, but the workflow of"),
        pytest.param("python", CLASSIFICATION, "--label_column class", "has no column 'class'", id="label",
                     marks=pytest.mark.slow),
        pytest.param("python", CLASSIFICATION, "--parallel tp --devices 5", "which 5 ranks cannot share evenly",
                     id="heads", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence_and_exit_code_2(
    run_workflow: Callable, tmp_path: Path, launcher: str, folder: Path, overrides: str, said: str
) -> None:
    done = run_workflow(launcher, *overrides.format(here=tmp_path).split(), folder=folder)
    assert done.exit_code == 2, done.output
    assert [said in line for line in done.output.splitlines()] == [True], done.output
    assert not done.results.exists()


def test_two_ranks_where_one_is_asked_for_fail(run_workflow: Callable) -> None:
    done = run_workflow("torchrun", folder=LORA)
    assert done.exit_code != 0
    assert done.output.count("error: This run asks for 1 rank(s)") == 1
    assert not done.results.exists()


@pytest.mark.usefixtures("bad_files")
def test_a_file_that_asks_for_another_precision_is_refused(run_workflow: Callable, tmp_path: Path) -> None:
    done = run_workflow("accelerate", "--test_rows", "1", "--max_new_tokens", "1", folder=tmp_path / DDP.name)
    assert done.exit_code != 0
    assert "precision is fp32, but Accelerate was told mixed_precision bf16" in done.output
