"""What every tool of the training benchmark is given: rows, base, adapters, schedule, and the loss it must reach."""

import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from bench.long_rows import long_rows
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.data.rows import IGNORED_LABEL, Splits, Tokens
from common.data.splits import load_splits, tokens_of
from common.models.loading import any_shape_config, load_base_model, load_tokenizer
from common.models.trained_weights import with_trained_weights
from common.runtime import recorder

Technique = Literal["lora", "full"]
DataSet = Literal["short", "long", "random"]
"""The embedded rows as they are, and joined to conversations; and tokens drawn from a whole vocabulary."""
LONG_TRAIN_ROWS, LONG_VALIDATION_ROWS = 256, 32
RANDOM_LENGTH = 1024
"""Tokens of each random row."""

BATCH_SIZES: dict[DataSet, int] = {"short": 16, "long": 8, "random": 2}
"""Rows of an optimizer step."""
TARGET_LOSSES: dict[tuple[DataSet, Technique], float] = {
    ("short", "lora"): 0.1,
    ("short", "full"): 0.05,
    ("long", "lora"): 0.5,
    ("long", "full"): 0.4,
}
"""Validation loss to reach, in nats per answer token: one to three epochs at a good learning rate."""
MOST_EPOCHS = 6
MOST_STEPS: dict[DataSet, int] = {"short": MOST_EPOCHS * 52, "long": MOST_EPOCHS * 32}
CHECKS_PER_EPOCH = 4
WARMUP_STEPS = 10
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 0.3
SCHEDULER = "constant_with_warmup"
"""With a constant rate, what is reached after some steps does not hang on how many steps were planned. A cosine would
favour a tool whose plan happens to end where the target is."""

VALIDATION_ROWS_AT_ONCE = 8


@dataclass(frozen=True)
class Trial:
    """One training by one tool, in a process of its own."""

    tool: str
    technique: Technique
    learning_rate: float
    seed: int
    target_loss: float
    """Validation loss at which the trial ends, in nats per answer token."""
    most_steps: int
    """Optimizer steps after which the trial is given up."""
    train_rows: int = -1
    data: DataSet = "short"
    model: str = RunConfig.model
    """Folder of the base."""
    longest_rows: bool = False
    """Train only on the longest rows, one batch of them, which needs the most memory."""

    @property
    def batch_size(self) -> int:
        """Rows of an optimizer step."""
        return BATCH_SIZES[self.data]

    def to_dict(self) -> dict[str, object]:
        """For the command line of the trial's process."""
        return asdict(self)

    def run_config(self) -> RunConfig:
        """The same as a run of this repository would be set."""
        return RunConfig(
            technique=self.technique,
            model=self.model,
            per_device_train_batch_size=self.batch_size,
            num_train_epochs=MOST_EPOCHS,
            learning_rate=self.learning_rate,
            lr_scheduler_type=SCHEDULER,
            warmup_steps=WARMUP_STEPS,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_GRAD_NORM,
            seed=self.seed,
            train_rows=self.train_rows,
        )


class TrialOfEpochs(recorder.Trial):
    """A training without reports, validations and checkpoints, whose rows are drawn as in any run."""

    repeats = False


@dataclass(frozen=True)
class Material:
    """What a tool trains on."""

    tokenizer: PreTrainedTokenizerBase
    train: Sequence[Tokens]
    validation: Sequence[Tokens]

    @property
    def splits(self) -> Splits:
        """The same for a workflow."""
        return Splits(self.train, self.validation, [])

    @property
    def train_tokens(self) -> int:
        """Tokens of an epoch, without padding."""
        return sum(len(row["input_ids"]) for row in self.train)


def load_material(run: RunConfig) -> Material:
    """The embedded rows as tokens."""
    splits, tokenizer = load_splits(run), load_tokenizer(run)
    train, validation = (tokens_of(rows, tokenizer, run) for rows in (splits.train, splits.validation))
    return Material(tokenizer, train, validation)


def material_of(trial: Trial) -> Material:
    """The rows of a trial's data set as tokens; where `train_rows` is set, that many, and one batch for validation."""
    if trial.data == "random":
        return random_material(trial)
    material = load_material(trial.run_config()) if trial.data == "short" else long_material(trial.run_config())
    if trial.train_rows > 0:
        material = replace(material, validation=material.validation[:VALIDATION_ROWS_AT_ONCE])
    if trial.longest_rows:
        longest = heapq.nlargest(trial.batch_size, material.train, key=lambda row: len(row["input_ids"]))
        return replace(material, train=longest)
    return material


def long_material(run: RunConfig) -> Material:
    """The embedded rows, joined to conversations."""
    turns = load_material(replace(run, train_rows=-1))
    count = run.train_rows if run.train_rows > 0 else LONG_TRAIN_ROWS
    validation = sorted(long_rows(turns.validation, LONG_VALIDATION_ROWS), key=lambda row: len(row["input_ids"]))
    return Material(turns.tokenizer, long_rows(turns.train, count), validation)


def random_material(trial: Trial) -> Material:
    """Rows of one length for all steps, drawn from the whole vocabulary; every token is an answer's."""
    vocabulary = any_shape_config(trial.model).vocab_size
    shape = (trial.most_steps * trial.batch_size, RANDOM_LENGTH)
    drawn = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(trial.seed)).tolist()
    rows = [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in drawn]
    return Material(load_tokenizer(trial.run_config()), rows, [])


def base_folder(run: RunConfig) -> Path:
    """Where the embedded base lies."""
    return REPOSITORY / run.model


def load_model(run: RunConfig) -> PreTrainedModel:
    """The embedded base with what is to be trained switched on; every tool's adapters leave casts to autocast."""
    set_seed(run.seed)
    return with_trained_weights(load_base_model(run, {"": "cpu"}), run)


@torch.no_grad()
def validation_loss(model: torch.nn.Module, material: Material) -> float:
    """Mean loss over the answer tokens of all validation rows, in nats; the one function for every tool."""
    was_training = model.training
    model.eval()
    forward = getattr(model, "_original_forward", model.forward)  # without the autocast that Accelerate puts around
    loss_sum = token_count = 0.0
    for start in range(0, len(material.validation), VALIDATION_ROWS_AT_ONCE):
        batch = padded(material.validation[start : start + VALIDATION_ROWS_AT_ONCE])
        logits = forward(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        targets = batch["labels"][:, 1:]
        loss_sum += torch.nn.functional.cross_entropy(
            logits[:, :-1].float().mT, targets, ignore_index=IGNORED_LABEL, reduction="sum"
        ).item()
        token_count += (targets != IGNORED_LABEL).sum().item()
    model.train(was_training)
    return loss_sum / token_count


def padded(rows: list[Tokens]) -> dict[str, torch.Tensor]:
    """Rows of one batch as tensors of shape (rows, tokens), padded on the right with zeros that nobody sees."""
    filling = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED_LABEL}
    return {
        name: torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(row[name]) for row in rows], batch_first=True, padding_value=value
        )
        for name, value in filling.items()
    }
