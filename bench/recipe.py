"""What every tool of the training benchmark is given: rows, base, adapters, schedule, and the loss it must reach."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import DataCollatorForSeq2Seq, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from common.base.run_config import RunConfig
from common.data.rows import IGNORED_LABEL, Splits, Tokens
from common.data.splits import load_splits, tokens_of
from common.models.loading import any_shape_config, load_base_model, load_tokenizer
from common.models.trained_weights import with_trained_weights
from common.runtime import recorder

TECHNIQUES = ("lora", "full")
# Rows of an optimizer step: of the embedded rows as they are, joined to conversations, of random tokens, and docstrings
BATCH_SIZES = {"short": 16, "long": 8, "random": 2, "docstrings": 8}
DOCSTRINGS = "assets/docstrings"
# Validation loss to reach, in nats per answer token: one to three epochs at a good learning rate
TARGET_LOSSES = {("short", "lora"): 0.1, ("short", "full"): 0.05, ("long", "lora"): 0.5, ("long", "full"): 0.4}
# The learning rate, of this one, its half and its double, with which a tool takes the fewest steps (seed 7)
RATES = {
    **{("short", "lora"): 5e-4, ("short", "full"): 2e-3, ("long", "lora"): 1e-3, ("long", "full"): 4e-3},
    ("docstrings", "lora"): 3e-5,
}
# The same of tools that are best with another one
OTHER_RATES = {
    **dict.fromkeys((("short", "lora", tool) for tool in ("trainer", "sft-best")), 1e-3),
    **dict.fromkeys((("short", "full", tool) for tool in ("trainer-grouped", "sft-grouped")), 4e-3),
}
MOST_EPOCHS = 6
CHECKS_PER_EPOCH = 4

LONG_TRAIN_ROWS, LONG_VALIDATION_ROWS, LONG_SEED = 256, 32, 20263
# Tokens of a long row, and of their lognormal lengths the standard deviation of the logarithms
LEAST, MOST, MEDIAN, SPREAD = 20, 1000, 80, 1.1
RANDOM_ROWS, RANDOM_LENGTH = 10, 1024
VALIDATION_ROWS_AT_ONCE = 8


@dataclass(frozen=True)
class Trial:
    """One training by one tool, in a process of its own; `model` is the folder of the base."""

    tool: str
    technique: str
    data: str
    seed: int = 42
    train_rows: int = -1
    model: str = RunConfig.model

    @property
    def run(self) -> RunConfig:
        """The same as a run of this repository would be set.

        Of a constant learning rate what is reached after some steps does not hang on how many were planned: a cosine
        would favour a tool whose plan happens to end where the target is.
        """
        usual = RATES.get((self.data, self.technique), RunConfig.learning_rate)
        return RunConfig(
            technique=self.technique,
            model=self.model,
            data=DOCSTRINGS if self.data == "docstrings" else RunConfig.data,
            per_device_train_batch_size=BATCH_SIZES[self.data],
            num_train_epochs=MOST_EPOCHS,
            learning_rate=OTHER_RATES.get((self.data, self.technique, self.tool), usual),
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=10,
            weight_decay=0.01,
            max_grad_norm=0.3,
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
    return Material(tokenizer, *(tokens_of(rows, tokenizer, run) for rows in (splits.train, splits.validation)))


def material_of(trial: Trial) -> Material:
    """The rows of a trial's data set as tokens; where `train_rows` is set, that many, and one batch for validation."""
    if trial.data == "random":
        return random_material(trial)
    material = long_material(trial.run) if trial.data == "long" else load_material(trial.run)
    if trial.train_rows > 0:
        return replace(material, validation=material.validation[:VALIDATION_ROWS_AT_ONCE])
    return material


def long_material(run: RunConfig) -> Material:
    """The embedded rows, joined to conversations."""
    turns = load_material(replace(run, train_rows=-1))
    count = run.train_rows if run.train_rows > 0 else LONG_TRAIN_ROWS
    validation = sorted(long_rows(turns.validation, LONG_VALIDATION_ROWS), key=lambda row: len(row["input_ids"]))
    return Material(turns.tokenizer, long_rows(turns.train, count), validation)


def long_rows(turns: Sequence[Tokens], count: int) -> list[Tokens]:
    """Return `count` conversations of lognormal lengths, each of as many turns as its length has room for.

    All `turns` come up about equally often: they are shuffled, and again once all were used. The rows are the same each
    time.
    """
    rng, rows = random.Random(LONG_SEED), []
    pile: list[Tokens] = []
    for _ in range(count):
        room = min(max(rng.lognormvariate(math.log(MEDIAN), SPREAD), LEAST), MOST)
        taken: list[Tokens] = []
        while True:
            pile = pile or rng.sample(turns, len(turns))
            room -= len(pile[-1]["input_ids"])
            if taken and room < 0:
                break
            taken.append(pile.pop())
        rows.append(joined(taken))
    return rows


def joined(turns: Sequence[Tokens]) -> Tokens:
    """Return one row of several: a conversation, as the embedded chat template is one message after the other."""
    return {name: [token for turn in turns for token in turn[name]] for name in turns[0]}


def random_material(trial: Trial) -> Material:
    """Rows of one length, drawn from the whole vocabulary; every token is an answer's."""
    shape, drawn_by = (RANDOM_ROWS, RANDOM_LENGTH), torch.Generator().manual_seed(trial.seed)
    drawn = torch.randint(any_shape_config(trial.model).vocab_size, shape, generator=drawn_by).tolist()
    rows = [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in drawn]
    return Material(load_tokenizer(trial.run), rows, [])


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
    padded = DataCollatorForSeq2Seq(material.tokenizer)
    for start in range(0, len(material.validation), VALIDATION_ROWS_AT_ONCE):
        batch = padded(list(material.validation[start : start + VALIDATION_ROWS_AT_ONCE]))
        logits = forward(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        targets = batch["labels"][:, 1:]
        loss_sum += torch.nn.functional.cross_entropy(
            logits[:, :-1].float().mT, targets, ignore_index=IGNORED_LABEL, reduction="sum"
        ).item()
        token_count += (targets != IGNORED_LABEL).sum().item()
    model.train(was_training)
    return loss_sum / token_count
