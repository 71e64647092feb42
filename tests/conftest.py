"""What tests share: the embedded base, small runs, and run folders as real processes."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before the Hub's library is imported, which reads it once

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, BartConfig, BartForConditionalGeneration

from common.launch import accelerate_command, free_port, torchrun_command
from common.models import EMBEDDED_SUMMARIZER
from common.run_config import REPOSITORY, RunConfig
from common.run_record import RECORD_NAME, Record, load_record

SINGLE = REPOSITORY / "2.1_lora_finetuning" / "run_0_cpu_x1"
DDP = REPOSITORY / "2.2_lora_finetuning_with_ddp" / "run_0_cpu_x2"
SMALL = ("--train_rows", "65", "--test_rows", "9", "--epochs", "1")


@dataclass(frozen=True)
class Finished:
    """A workflow that ran as a process of its own."""

    exit_code: int
    output: str
    results: Path

    @property
    def record(self) -> Record:
        return load_record(self.results / RECORD_NAME)


@pytest.fixture
def run_workflow(tmp_path: Path) -> Callable[..., Finished]:
    """Run 2.1's or 2.2's workflow by a launcher, with overrides, writing below `tmp_path`."""

    def run(launcher: str, *overrides: str, folder: Path | None = None, name: str = "test") -> Finished:
        folder = folder or (SINGLE if launcher == "python" else DDP)
        script = next(folder.glob("my_workflow_*.py")).name
        arguments = [*SMALL, *overrides, "--results_root", str(tmp_path), "--run_name", name]
        command = {
            "python": [sys.executable, script, *arguments],
            "make run": [sys.executable, "-m", "common.launch", *arguments],
            "torchrun": torchrun_command(script, 2, *arguments),
            "accelerate": accelerate_command(script, "my_accelerate_config.yaml", *arguments),
        }[launcher]
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        return Finished(done.returncode, done.stdout, tmp_path / "results" / name)

    return run


@dataclass(frozen=True)
class Trained:
    """What a run left behind."""

    results: Path

    @property
    def record(self) -> Record:
        return load_record(self.results / RECORD_NAME)

    def losses(self, kind: str) -> list[float]:
        return [loss for _, loss in self.record[kind]]

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        """The weights after so many steps, from one file or several."""
        files = (self.results / "checkpoints" / f"checkpoint-{step}").glob("*.safetensors")
        return {name: weight for file in files for name, weight in load_file(file).items()}


@pytest.fixture(scope="session")
def run_several() -> Callable[..., dict[str, Trained]]:
    """Workflows one after the other, in one start of `ranks` processes.

    `runs` has by name a run folder, or one of its workflows, and overrides.
    """

    def run(folder: Path, runs: dict[str, tuple[Path, tuple[str, ...]]], ranks: int) -> dict[str, Trained]:
        names = {name: name.replace(", ", "-").replace(" ", "-") for name in runs}
        jobs = [
            {"place": str(place), "name": names[name], "port": free_port(), "overrides": overrides}
            for name, (place, overrides) in runs.items()
        ]
        (folder / "jobs.json").write_text(json.dumps(jobs))
        script = str(REPOSITORY / "tests" / "recipes" / "run_several.py")
        command = [sys.executable, script] if ranks == 1 else torchrun_command(script, ranks)
        folders = dict.fromkeys(str(place.parent if place.suffix else place) for place, _ in runs.values())
        importable = [str(REPOSITORY), *folders]
        done = subprocess.run(
            [*command, str(folder / "jobs.json")],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(importable)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return {name: Trained(folder / "results" / names[name]) for name in runs}

    return run


@pytest.fixture(scope="session")
def tiny_summarizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny BART at its random start, with the embedded tokenizer."""
    torch.manual_seed(0)
    tokenizer, folder = AutoTokenizer.from_pretrained(EMBEDDED_SUMMARIZER), tmp_path_factory.mktemp("bart")
    config = BartConfig(
        vocab_size=len(tokenizer), d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=256, dropout=0.0,
        bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    BartForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run_config() -> RunConfig:
    return RunConfig(technique="lora", parallel="single", run_folder="2.1_lora_finetuning/run_0_cpu_x1")
