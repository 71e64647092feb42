"""Memory where logits are large: a small decoder with the vocabulary of a real one, by tool."""

import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerControl, TrainerState, TrainingArguments

from bench.apart import measured_apart
from bench.clock import Clock
from bench.entries import Entry, measured
from bench.recipe import RANDOM_LENGTH, TECHNIQUES, Trial, material_of
from bench.tools import TOOLS
from common.base.run_config import RunConfig
from common.hardware.devices import MIB
from common.models.loading import load_tokenizer
from common.planning.terms import Kind
from common.runtime.memory_tracker import MemoryTracker

COMMAND = "python -m bench vocabulary"
# The tools that ours is compared with, and the most that its peak may be of theirs
OTHERS = {"trainer": 0.5, "sft-best": 1.05}
VOCABULARY, QUICK_VOCABULARY = 128_256, 2_048  # Llama 3's words, and a few
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "max_position_embeddings": RANDOM_LENGTH,
}


@dataclass
class StepMeter(Clock):
    """Counts the bytes of tensors in a trial's second step: the optimizer has its states after the first.

    Attributes:
        peak_bytes: The most that weights, gradients, optimizer states and all that a step makes take at once; without
            the batch itself.
    """

    peak_bytes: int = 0
    tracker: MemoryTracker = field(default_factory=lambda: MemoryTracker(vocab_size=0, rounded_to=1))

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        **_: object,
    ) -> None:
        """Begin to count."""
        if self.step:
            states = [value for state in optimizer.state.values() for value in state.values()]
            for tensor in (*model.parameters(), *model.buffers(), *filter(torch.is_tensor, states)):
                self.tracker.add(tensor, Kind.WEIGHTS)
            self.tracker.__enter__()

    def step_done(self, model: torch.nn.Module) -> bool:
        """Return whether this was the last step."""
        self.step += 1
        if self.step > 1:
            self.tracker.__exit__(None, None, None)
            self.peak_bytes = max(sum(parts.values()) for parts in self.tracker.timeline.values())
        return self.step > 1


def entries(quick: bool) -> list[Entry]:
    """Each tool's peak, and the ratios that have bars; `quick`: ours alone, with few words."""
    found, tools = [], ("ours",) if quick else ("ours", *OTHERS)
    with tempfile.TemporaryDirectory() as folder:
        make_base(Path(folder), QUICK_VOCABULARY if quick else VOCABULARY)
        for technique in TECHNIQUES[:1] if quick else TECHNIQUES:
            trials = {tool: Trial(tool, technique, "random", model=folder) for tool in tools}
            peaks = {tool: measured_apart(peak_bytes, **asdict(trial)) for tool, trial in trials.items()}
            found += entries_of(technique, peaks)
    return found


def make_base(folder: Path, vocabulary: int) -> None:
    """Write a decoder of random weights, the same each time, with the embedded tokenizer."""
    tokenizer = load_tokenizer(RunConfig())
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(RunConfig.seed)
    LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **SHAPE, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def peak_bytes(**trial: Any) -> int:
    """Train by the trial's tool, in a process of its own; return the peak of a step."""
    asked = Trial(**trial)
    meter = StepMeter(asked, material_of(asked))
    TOOLS[asked.tool](meter)
    return meter.peak_bytes


def entries_of(technique: str, peaks: dict[str, int]) -> list[Entry]:
    """Each tool's peak in bytes, and how ours compares with the other tools that ran."""
    name = f"vocabulary, {technique}"
    found = [
        measured(f"{name}, {tool}: peak of all tensors in a step", peak / MIB, "MiB", COMMAND)
        for tool, peak in peaks.items()
    ]
    for tool in filter(peaks.get, OTHERS):
        against, share = f"{name}, ours against {tool}, peak of all tensors", peaks["ours"] / peaks[tool]
        found.append(measured(against, share, "ratio", COMMAND, at_most=OTHERS[tool]))
    return found
