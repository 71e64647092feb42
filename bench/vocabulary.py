"""Memory and speed where logits are large: a small decoder with the vocabulary of a real one, by tool."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.entries import Entry, measured
from bench.recipe import RANDOM_LENGTH, Technique, Trial
from bench.trial_process import LLAMA_FACTORY_PYTHON, ONE_THREAD, python_of
from bench.vocabulary_trial import COUNTED_STEP, TURN
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.models.loading import load_tokenizer

TOOLS = ("ours", "sft-default", "sft-best", "trainer", "llama-factory")
QUICK_TOOLS = ("ours",)
SFT_TOOLS = ("sft-default", "sft-best")
"""SFTTrainer: its loss goes over parts of the vocabulary by default, and rows of one length need no packing."""
VOCABULARY, QUICK_VOCABULARY = 128_256, 2_048
"""Words; the first is Llama 3's."""
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "max_position_embeddings": RANDOM_LENGTH,
}
TIMED_STEPS, QUICK_TIMED_STEPS = 3, 1
SEED, LEARNING_RATE = 42, 1e-4
SHARE_OF_TRAINER, SHARE_OF_SFT = 0.5, 1.05
"""The most that our peak may be."""
MIB = 2**20


@dataclass(frozen=True)
class Outcome:
    """What a tool's steps took: bytes of tensors at the highest moment, and seconds of each."""

    peak_bytes: int
    seconds: list[float]


def entries(technique: Technique, quick: bool) -> list[Entry]:
    """Each tool's peak and seconds a step, and the ratios that have bars."""
    tools = QUICK_TOOLS if quick else TOOLS
    timed_steps = QUICK_TIMED_STEPS if quick else TIMED_STEPS
    with tempfile.TemporaryDirectory() as folder:
        make_base(Path(folder), QUICK_VOCABULARY if quick else VOCABULARY)
        trials = [
            Trial(tool, technique, LEARNING_RATE, SEED, 0.0, COUNTED_STEP + timed_steps, data="random", model=folder)
            for tool in tools
            if python_of(tool)
        ]
        outcomes = steps_in_turn(trials, timed_steps)
    command = f"python -m bench vocabulary --technique {technique}"
    figures = [entry for tool in tools for entry in tool_entries(technique, tool, outcomes.get(tool), command)]
    return figures + ratio_entries(technique, outcomes, command)


def make_base(folder: Path, vocabulary: int) -> None:
    """Write a decoder of random weights, the same each time, with the embedded tokenizer."""
    tokenizer = load_tokenizer(RunConfig())
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(SEED)
    LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **SHAPE, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def steps_in_turn(trials: list[Trial], timed_steps: int) -> dict[str, Outcome]:
    """Take each tool's timed steps in turn, so that a drift hits all alike.

    Raises:
        RuntimeError: a tool failed; with the end of what it said.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in trials]
        started = [stack.enter_context(ToolProcess(*each)) for each in zip(trials, files, strict=True)]
        for process in started:
            process.read_on()
        for step in range(timed_steps):
            for process in started:
                process.take_turn()
                print(f"{process.trial.tool}: step {step + 1} of {timed_steps}", file=sys.stderr, flush=True)
        return {process.trial.tool: Outcome(**json.loads(process.last_line)) for process in started}


class ToolProcess:
    """A tool in a process of its own with one thread, which waits for its turn before each timed step."""

    def __init__(self, trial: Trial, said: IO[str]) -> None:
        """Start it, with `said` as its standard error; its steps that are not timed are taken at once."""
        self.trial, self.said, self.last_line = trial, said, ""
        self.process = subprocess.Popen(
            [str(python_of(trial.tool)), "-m", "bench.vocabulary_trial", json.dumps(trial.to_dict())],
            cwd=REPOSITORY,
            env={**os.environ, **ONE_THREAD},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )

    def __enter__(self) -> "ToolProcess":
        return self

    def __exit__(self, *_: object) -> None:
        """End it, if it has not ended."""
        with self.process:
            self.process.kill()

    def take_turn(self) -> None:
        """Have it take a step, and wait until it has."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.read_on()

    def read_on(self) -> None:
        """Wait until it waits for its turn, or has ended.

        Raises:
            RuntimeError: it failed; with the end of what it said.
        """
        for line in self.process.stdout:
            if line.strip() == TURN:
                return
            self.last_line = line
        if self.process.wait():
            self.said.seek(0)
            raise RuntimeError(f"The trial {self.trial} failed:\n{self.said.read()[-3000:]}")


def tool_entries(technique: Technique, tool: str, outcome: Outcome | None, command: str) -> list[Entry]:
    """A tool's peak and its seconds a step; no `outcome`: it was not run."""
    name = f"vocabulary, {technique}, {tool}"
    if outcome is None:
        return [measured(f"{name}: not run ({LLAMA_FACTORY_PYTHON} names no Python)", None, "s", command)]
    return [
        measured(f"{name}: peak of all tensors in a step", outcome.peak_bytes / MIB, "MiB", command),
        measured(f"{name}: a step", statistics.median(outcome.seconds), "s", command),
    ]


def ratio_entries(technique: Technique, outcomes: dict[str, Outcome], command: str) -> list[Entry]:
    """What has bars; nothing where a tool that a bar compares with did not run."""
    if not {"ours", "trainer", *SFT_TOOLS} <= outcomes.keys():
        return []
    ours, peaks = outcomes["ours"], {tool: outcome.peak_bytes for tool, outcome in outcomes.items()}
    smallest = min(SFT_TOOLS, key=peaks.get)
    fastest = min(SFT_TOOLS, key=lambda tool: statistics.median(outcomes[tool].seconds))
    pairs = zip(outcomes[fastest].seconds, ours.seconds, strict=True)
    name = f"vocabulary, {technique}, ours against"
    shares = [
        measured(f"{name} {tool}, peak of all tensors", peaks["ours"] / peaks[tool], "ratio", command, at_most=bar)
        for tool, bar in (("trainer", SHARE_OF_TRAINER), (smallest, SHARE_OF_SFT))
    ]
    times = statistics.median(theirs / own for theirs, own in pairs)
    return [*shares, measured(f"{name} {fastest}, times as fast a step", times, "ratio", command, at_least=1.0)]
