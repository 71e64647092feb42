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
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.base.paths import REPOSITORY
from common.records.store import fit_to_be_kept
from tests.forked import run_forked

SINGLE = REPOSITORY / "2.1_lora_finetuning" / "run_0_cpu_x1"
DDP = REPOSITORY / "2.2_lora_finetuning_with_ddp" / "run_0_cpu_x2"
BASE = REPOSITORY / "assets" / "embedded_base"


@pytest.fixture
def bad_data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    shutil.copytree(REPOSITORY / "assets" / "exhibits", folder)
    (folder / "train.jsonl").write_text('{"messages": "hello"}\n')
    return folder


@pytest.mark.parametrize(
    ("launcher", "named"), [("torchrun", "torchrun"), pytest.param("accelerate", "acclaunch", marks=pytest.mark.slow)]
)
def test_ddp_runs_on_two_ranks_that_share_the_rows(run_workflow: Callable, launcher: str, named: str) -> None:
    done = run_workflow(launcher, is_forked=False)
    assert done.exit_code == 0, done.output
    record = done.record
    assert (record["status"], record["launcher"]) == ("completed", named)
    assert [share["rank"] for share in record["world"]] == [0, 1]
    assert sum(share["samples"] for share in record["world"]) == 65
    assert all(share["tokens"] > 0 for share in record["world"])
    assert len(record["memory"]) == 2
    assert record["machine_ceiling"]["strong"] > 0
    assert record["machine_ceiling"]["weak"] > 0
    for rank in (0, 1):
        assert f"[RANK{rank}:CPU] memory: now" in done.output
        assert f"[RANK{rank}:CPU] mini-batch:" in done.output
    firsts = [
        line.partition("the first is row ")[2].split(":")[0]
        for line in done.output.splitlines()
        if "mini-batch:" in line
    ]
    assert len(set(firsts)) == 2
    spoken = [line for line in done.output.splitlines() if "validation loss" in line or "tuning:" in line]
    assert spoken
    assert all(line.startswith("[RANK0:CPU] ") for line in spoken)


def test_make_run_starts_the_ranks_that_the_folder_asks_for(run_workflow: Callable) -> None:
    done = run_workflow("make run", "--max_steps", "2")
    assert done.exit_code == 0, done.output
    assert len(done.record["world"]) == 2


def test_the_recorded_command_gives_the_same_losses_again(run_workflow: Callable, tmp_path: Path) -> None:
    rows = [json.dumps({"instruction": f"What is {n}?", "output": f"It is the number {n}."}) for n in range(60)]
    (tmp_path / "own rows.jsonl").write_text("\n".join(rows))
    own = ("--data", os.path.relpath(tmp_path / "own rows.jsonl", SINGLE), "--threads", str(os.cpu_count()))
    done = run_workflow("python", *own, "--max_steps", "2", "--train_rows", "-1")
    assert done.exit_code == 0, done.output
    first = done.record
    assert first["environment"]["threads_per_rank"] == first["config"]["threads"] == os.cpu_count()
    command = shlex.split(first["command"])
    assert command[0] == "python"
    code = run_forked([sys.executable, *command[1:]], SINGLE, os.environ, tmp_path / "again.log", timeout=300)
    assert code == 0, (tmp_path / "again.log").read_text()
    again = done.record
    assert again["started_at"] > first["started_at"]
    for losses in ("training_losses", "validation_losses"):
        assert again[losses] == first[losses]


def test_one_device_runs_and_what_it_saved_loads_with_plain_libraries(run_workflow: Callable, tmp_path: Path) -> None:
    done = run_workflow("python", is_forked=False)
    assert done.exit_code == 0, done.output
    record = done.record
    assert record["status"] == "completed"
    assert record["environment"]["threads_per_rank"] == 1
    ids = torch.tensor([AutoTokenizer.from_pretrained(done.results / "merged")("Who made it?")["input_ids"]])
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), done.results / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(done.results / "merged").eval()
    base = AutoModelForCausalLM.from_pretrained(BASE).eval()
    with torch.no_grad():
        assert (adapted(ids).logits - merged(ids).logits).abs().max() < 1e-4
        assert (base(ids).logits - merged(ids).logits).abs().max() > 1e-2
    weights = load_file(done.results / "adapter" / "adapter_model.safetensors")
    untouched = [name for name, weight in weights.items() if "lora_B" in name and not weight.any()]
    assert len(weights) == 2 * 7 * base.config.num_hidden_layers
    assert untouched == []  # gradients reached every layer through reentrant checkpointing
    for name in ("predictions_before.csv", "predictions_after.csv"):
        assert len((done.results / name).read_text().splitlines()) == 10
    assert list((done.results / "tensorboard").iterdir())
    assert AutoTokenizer.from_pretrained(done.results / "adapter").chat_template
    assert not (done.results / "adapter" / "README.md").exists()  # PEFT's, which names a path
    for place in (tmp_path, REPOSITORY):
        assert str(place) not in json.dumps(fit_to_be_kept(record)), "a kept record names no path of a machine"


def test_one_rank_where_two_are_asked_for_fails(run_workflow: Callable) -> None:
    done = run_workflow("python", folder=DDP)
    assert done.exit_code == 2
    assert "asks for 2 rank(s)" in done.output
    assert not done.results.exists()


def test_two_ranks_where_one_is_asked_for_fail(run_workflow: Callable) -> None:
    done = run_workflow("torchrun", folder=SINGLE)
    assert done.exit_code != 0
    assert done.output.count("error: This run asks for 1 rank(s)") == 1
    assert not done.results.exists()


@pytest.mark.parametrize("launcher", ["python", pytest.param("make run", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("--batch_size", "0"), "per_device_train_batch_size is 0"),
        (("--data", "no/such/folder"), "The data no/such/folder do not exist"),
        (("--model", "nobody/no-such-model"), "hf download nobody/no-such-model"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    run_workflow: Callable, launcher: str, overrides: tuple[str, ...], said: str
) -> None:
    done = run_workflow(launcher, *overrides)
    assert done.exit_code == 2
    assert [said in line for line in done.output.splitlines()] == [True], done.output
    assert not done.results.exists()


def test_malformed_data_is_refused_before_anything_is_written(run_workflow: Callable, bad_data: Path) -> None:
    done = run_workflow("python", "--data", str(bad_data))
    assert done.exit_code == 2
    assert "train.jsonl, line 1 has " in done.output
    assert not done.results.exists()


def test_a_model_folder_without_weights_is_refused(run_workflow: Callable, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BASE, folder)
    (folder / "model.safetensors").unlink()
    done = run_workflow("python", "--model", str(folder))
    assert done.exit_code == 2
    assert "has no weights" in done.output
    assert not done.results.exists()


def test_a_file_that_asks_for_another_precision_is_refused(run_workflow: Callable, tmp_path: Path) -> None:
    folder = tmp_path / "run_0_cpu_x2"
    shutil.copytree(DDP, folder, ignore=shutil.ignore_patterns("results", "records"))
    config = folder / "my_accelerate_config.yaml"
    config.write_text(config.read_text().replace("mixed_precision: 'no'", "mixed_precision: bf16"))
    done = run_workflow("accelerate", "--test_rows", "1", "--max_new_tokens", "1", folder=folder)
    assert done.exit_code != 0
    assert "precision is fp32, but Accelerate was told mixed_precision bf16" in done.output
