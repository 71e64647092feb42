"""DPO: TRL's `DPOTrainer` takes the steps, and this repository's trainer draws the rows, checks, saves and resumes.

The reference is the model before this training. With LoRA it is the same model with its adapters switched off, so that
none is held twice; with full fine-tuning its log-probabilities of every answer are found once, before the first step.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from peft import PeftModel
from tqdm import tqdm
from trl import DPOConfig, DPOTrainer
from typing_extensions import override

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.batches import TrainingRows
from common.data.messages import first_tokens
from common.data.rows import Tokens, without_labels
from common.data.stored_rows import stored
from common.models.loading import load_tokenizer
from common.tasks.preferences import REFERENCES, PairCollator, answer_log_probs, is_pair, set_tile
from common.training.strategy import Batch, Strategy, WholeModel
from common.training.trainer import AuditedTrainer

REFERENCE_ADAPTER = "ref"
"""TRL's name for a copy of an adapter that was trained before; ours begin at zero, where the base is the reference."""


class PairedModel(WholeModel):
    """What a rank does with pairs: each is one label, and on several ranks every batch has as many pairs."""

    @classmethod
    def check(cls, run: RunConfig) -> None:
        """Refuse adapters of the head, which TRL's loss does not call, and dropout, which TRL's trainer switches off.

        Raises:
            BadInputError: with the setting.
        """
        if run.method.has_adapters and "lm_head" in run.target_names:
            raise BadInputError(
                f"target_modules is {run.target_modules}, but TRL's loss reads the head's own weights without its "
                "adapter: leave lm_head out."
            )
        if run.method.has_adapters and run.lora_dropout:
            raise BadInputError(
                f"lora_dropout is {run.lora_dropout}, but TRL's DPO takes its steps without dropout, so that model and "
                "reference are alike at first: pass --lora_dropout 0."
            )

    @override
    def labels_in(self, row: Tokens) -> int:
        return int(is_pair(row))

    @override
    def inputs_for_loss(self, batch: Batch) -> Batch:
        return batch

    @override
    def fill(self, batch: list[Tokens]) -> list[Tokens]:
        missing = self.run.per_device_train_batch_size - len(batch)
        if self.rank.world_size == 1 or "row" not in batch[0] or missing <= 0:
            return batch
        return batch + [without_labels(first_tokens(batch[0], 2))] * missing

    @override
    @torch.no_grad()
    def results(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        now = answer_log_probs(model, batch)
        if REFERENCES[0] in batch:
            reference = [batch[name] for name in REFERENCES]
        else:
            with self.model.disable_adapter():
                reference = answer_log_probs(self.model, batch)
        return self.objective.results(now, reference, self.run.beta)


class TokenizedDPOTrainer(DPOTrainer):
    """TRL's trainer, of rows that are tokens already: it prepares no data, and writes and sends no report."""

    loss_is_scaled_for_ga = True

    def __init__(self, *, train_dataset: Any, eval_dataset: Any, compute_loss_func: None, **kwargs: Any) -> None:
        """Take the rows in place of a stand-in, as TRL wants a `Dataset`; the loss is TRL's."""
        one_pair = Dataset.from_list([{"prompt_ids": [0], "chosen_ids": [0], "rejected_ids": [0]}])
        super().__init__(train_dataset=one_pair, eval_dataset=one_pair, **kwargs)
        self.train_dataset, self.eval_dataset, self.processing_class = train_dataset, eval_dataset, None
        if isinstance(self.model, PeftModel) and REFERENCE_ADAPTER in self.model.peft_config:
            self.model.delete_adapter(REFERENCE_ADAPTER)

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset

    def _precompute_ref_logps(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset  # TRL's own takes a `Dataset`, and every process would compute and cache all of it

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Write none: a run has a record."""

    def _send_telemetry(self) -> None:
        """Send nothing."""


class PreferenceTrainer(AuditedTrainer, TokenizedDPOTrainer):
    """An AuditedTrainer for pairs of answers."""

    arguments_class = DPOConfig

    def __init__(self, *, strategy: Strategy, **kwargs: Any) -> None:
        """Train by `strategy`; the rest goes to both trainers."""
        super().__init__(strategy=strategy, processing_class=load_tokenizer(strategy.run), **kwargs)
        set_tile(self.model)

    @classmethod
    @override
    def own_arguments(cls, run: RunConfig) -> dict[str, object]:
        return {"beta": run.beta, "max_length": None, "precompute_ref_log_probs": not run.method.has_adapters}

    @override
    def train(self, **kwargs: Any) -> Any:
        self.find_reference()
        return super().train(**kwargs)

    def find_reference(self) -> None:
        """Without adapters: compute once the log-probabilities that the untrained model gives to all answers.

        Called on every rank.
        """
        if self.precompute_ref_logps and REFERENCES[0] not in self.train_dataset.rows[0]:
            self.train_dataset = TrainingRows(self.with_reference(self.train_dataset.rows, "training"))
            self.eval_dataset = self.with_reference(self.eval_dataset, "validation")

    def with_reference(self, rows: Sequence[Tokens], which: str) -> Sequence[Tokens]:
        """Return the rows with what the model, not trained yet, finds of both answers; every rank takes its share."""
        own = range(self.args.process_index, len(rows), self.args.world_size)
        size, collate = self.args.per_device_eval_batch_size, PairCollator(self._tokenizer.pad_token_id)
        starts = tqdm(
            range(0, len(own), size), f"log-probabilities of {which} rows before training, batches", delay=2,
            mininterval=2, disable=self.args.process_index > 0, file=sys.stdout,
        )  # fmt: skip
        found: dict[int, dict[str, float]] = {}
        self.model.eval()
        for start in starts:
            numbers = own[start : start + size]
            batch = collate([rows[number] for number in numbers])
            inputs = self._prepare_inputs({name: batch[name] for name in MODEL_INPUTS})
            pairs = zip(*(each.tolist() for each in self.compute_ref_log_probs(self.model, inputs)), strict=True)
            found |= {
                number: dict(zip(REFERENCES, pair, strict=True)) for number, pair in zip(numbers, pairs, strict=True)
            }
        self.model.train()
        everyone = {number: pair for of_rank in gather_object([found]) for number, pair in of_rank.items()}
        return stored({**row, **everyone[number]} for number, row in enumerate(rows))

    @override
    def compute_loss(self, model: torch.nn.Module, inputs: Batch, *_: Any, num_items_in_batch: int, **__: Any) -> Any:
        """Return this batch's part of the step's mean over all its pairs: TRL's loss is a mean over the batch.

        A filler's loss is log 2 and has no gradient. DDP averages over ranks, so each part is multiplied by their
        number.
        """
        inputs = dict(inputs)
        real, pairs = inputs.pop("pairs"), len(inputs["input_ids"]) // 2
        total = super().compute_loss(model, inputs) * pairs - (pairs - real) * math.log(2)
        return total * self.args.world_size / num_items_in_batch


MODEL_INPUTS = ("input_ids", "attention_mask", "completion_mask")
