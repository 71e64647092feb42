"""What tests share: workflows started as processes, and tiny models."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    PreTrainedTokenizerBase,
    RobertaConfig,
    RobertaModel,
)

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.data.row_checks import say_once
from common.data.splits import read_splits
from common.models.loading import EMBEDDED_SUMMARIZER, load_tokenizer
from common.models.real_models import minilm_folder
from common.records.store import RECORD_NAME, Record, kept_records, load_record
from common.runtime.launchers import accelerate_command, torchrun_command
from common.runtime.rank import end_rank
from common.training.part import SHARDS
from common.training.zero import check_deepspeed
from tests.fake_gpus.machine import compiled_guard, compiler
from tests.forked import run_forked
from tests.pace import patient

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
SINGLE = REPOSITORY / "2.1_lora_finetuning" / "run_0_cpu_x1"
DDP = REPOSITORY / "2.2_lora_finetuning_with_ddp" / "run_0_cpu_x2"
SMALL = (
    "--train_rows",
    "65",
    "--validation_rows",
    "9",
    "--test_rows",
    "9",
    "--num_train_epochs",
    "1",
    "--max_new_tokens",
    "8",
)
TINY_ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
                "initializer_range": 0.2}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


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
    """Run 2.1's or 2.2's workflow by a launcher, with overrides, writing below `tmp_path`.

    As a fork of a server that has the libraries loaded, or with `is_forked=False` as a user's shell would start it;
    always so where there is a GPU, as CUDA does not survive a fork.
    """

    def run(
        launcher: str,
        *overrides: str,
        folder: Path | None = None,
        name: str = "test",
        is_forked: bool = not HAS_CUDA,
        within_s: float = 300,
    ) -> Finished:
        folder = folder or (SINGLE if launcher == "python" else DDP)
        script = next(folder.glob("my_workflow_*.py")).name
        arguments = [*SMALL, *overrides, "--results_root", str(tmp_path), "--run_name", name]
        command = {
            "python": [sys.executable, script, *arguments],
            "make run": [sys.executable, "-m", "common.launch", *arguments],
            "torchrun": torchrun_command(script, 2, *arguments),
            "accelerate": accelerate_command(script, "my_accelerate_config.yaml", *arguments),
        }[launcher]
        log = tmp_path / f"{name}.log"
        if is_forked:
            code = run_forked(command, folder, os.environ, log, timeout=within_s)
        else:
            with log.open("ab") as output:
                code = subprocess.run(
                    command, cwd=folder, stdout=output, stderr=output, timeout=patient(within_s), check=False
                ).returncode
        return Finished(code, log.read_text(errors="replace"), tmp_path / "results" / name)

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
        """What was trained, after so many steps."""
        return trained_weights(self.results / "checkpoints" / f"checkpoint-{step}")


def trained_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Those of a checkpoint, whole, by the names of plain libraries; of the Trainer and of ZeRO from their files."""
    if not (checkpoint / SHARDS).exists():
        files = checkpoint.glob("*.safetensors")
        return {name: weight for file in files for name, weight in load_file(file).items()}
    whole = checkpoint.parent / f"{checkpoint.name}.pt"
    dcp_to_torch_save(checkpoint / SHARDS, whole)
    weights = torch.load(whole, weights_only=True)["model"]
    return {name.replace(".modules_to_save", "").replace(".default", ""): weight for name, weight in weights.items()}


@pytest.fixture(scope="session")
def run_several() -> Callable[..., dict[str, Trained]]:
    """Workflows one after the other, in one start of `ranks` processes.

    `runs` has by name a run folder, or one of its workflows, and overrides. `starter` is a module that runs a script
    somewhere else, such as on a machine with fake GPUs. `logits_at_once` are those of a chunk of the loss, 0 = as
    usual: of so small models one chunk has all.
    """

    def run(
        folder: Path,
        runs: dict[str, tuple[Path, tuple[str, ...]]],
        ranks: int,
        starter: str = "",
        logits_at_once: int = 0,
    ) -> dict[str, Trained]:
        names = {name: name.replace(", ", "-").replace(" ", "-") for name in runs}
        jobs = [
            {"place": str(place), "name": names[name], "overrides": overrides, "logits_at_once": logits_at_once}
            for name, (place, overrides) in runs.items()
        ]
        (folder / "jobs.json").write_text(json.dumps(jobs))
        script = str(REPOSITORY / "tests" / "recipes" / "run_several.py")
        program = ["-m", starter, script] if starter else [script]
        command = [sys.executable, *program] if ranks == 1 else torchrun_command(program[0], ranks, *program[1:])
        folders = dict.fromkeys(str(place.parent if place.suffix else place) for place, _ in runs.values())
        importable = [str(REPOSITORY), *folders]
        log = folder / "jobs.log"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(importable)}
        code = run_forked([*command, str(folder / "jobs.json")], folder, env, log, timeout=600)
        assert code == 0, log.read_text(errors="replace")
        return {name: Trained(folder / "results" / names[name]) for name in runs}

    return run


@pytest.fixture(autouse=True)
def nothing_was_said_before() -> None:
    """What is said once in a process, or while rows are read, is said in each test, whichever ran before it."""
    say_once.cache_clear()
    read_splits.cache_clear()


@pytest.fixture(scope="session")
def needs_deepspeed() -> None:
    """Skip where ZeRO cannot run, and say what is missing in the sentence that users get."""
    try:
        check_deepspeed()
    except BadInputError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def fake_gpus() -> None:
    """Skip where the fake machine cannot be compiled."""
    if compiler() is None:
        pytest.skip("no C++ compiler (c++): the fake machine of several GPUs needs one; install g++")
    compiled_guard()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A world of this process alone, whose collectives are gloo's."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    end_rank()


@pytest.fixture
def records() -> list[Record]:
    """The kept ones; whoever changes one copies it before."""
    return kept_records()


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    """The embedded base's, which a test may change."""
    return load_tokenizer(RunConfig())


@pytest.fixture(scope="session")
def summarizers() -> PreTrainedTokenizerBase:
    """The embedded summarizer's tokenizer."""
    return AutoTokenizer.from_pretrained(EMBEDDED_SUMMARIZER)


@pytest.fixture(scope="session")
def tiny_summarizer(tmp_path_factory: pytest.TempPathFactory, summarizers: PreTrainedTokenizerBase) -> str:
    """A tiny BART at its random start, with the embedded tokenizer."""
    torch.manual_seed(0)
    tokenizer, folder = summarizers, tmp_path_factory.mktemp("bart")
    config = BartConfig(
        vocab_size=len(tokenizer), d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=256, dropout=0.0,
        bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    BartForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny BERT and a tiny RoBERTa without heads, each with MiniLM's tokenizer; by their kind, the folder."""
    tokenizer, folders = AutoTokenizer.from_pretrained(minilm_folder()), {}
    for kind, config_class, model_class in (("bert", BertConfig, BertModel), ("roberta", RobertaConfig, RobertaModel)):
        torch.manual_seed(0)
        config = config_class(vocab_size=len(tokenizer), pad_token_id=0, **TINY_ENCODER, **NO_DROPOUT)
        folder = tmp_path_factory.mktemp(kind)
        model_class(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders[kind] = str(folder)
    return folders


@pytest.fixture
def run_config() -> RunConfig:
    return RunConfig(technique="lora", parallel="single", run_folder="2.1_lora_finetuning/run_0_cpu_x1")
