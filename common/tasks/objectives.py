"""What a model learns to predict: how rows become a batch, what a row's losses are, and what is best."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base.run_config import RunConfig
from common.data.batches import Collate

VALIDATION_LOSS = "eval_mean_loss"
"""The validation loss by its name in the Trainer's logs: mean over the answer tokens (with classification: the labels)
of all validation rows."""
ACCURACY = "eval_accuracy"
"""With classification: the share of the validation rows whose label was found."""


@dataclass(frozen=True)
class Objective:
    """One kind of prediction."""

    collator: Callable[[PreTrainedTokenizerBase, PreTrainedModel], Collate]
    results: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """From logits and labels, what each row counts for: shape (rows, k); the sums of the columns make the metrics."""
    metrics: Callable[[torch.Tensor], dict[str, float]]
    """From the sums of all rows' results, shape (k,): by name, as the Trainer's logs have them."""
    best_metric: str
    """The metric by which the best checkpoint is chosen."""
    higher_is_better: bool
    loss: Callable[..., torch.Tensor] | None = None
    """Instead of the model's own: from outputs, labels and `num_items_in_batch`, the labels of the whole step."""


def mean_loss(sums: torch.Tensor) -> dict[str, float]:
    """The validation loss: mean over the predicted tokens of all rows, so the same at any batch and world size.

    `sums` holds the sum of the losses and the number of tokens. (The Trainer's own `eval_loss` is a mean of batch
    means: 0.4 % more on two ranks than on one, for the same model.)
    """
    loss_sum, token_count = sums
    return {VALIDATION_LOSS: float(loss_sum / token_count)}


def objective_of(run: RunConfig) -> Objective:
    """Return what the run's model learns to predict."""
    module, _, name = run.goal.objective.partition(":")
    return getattr(import_module(module), name)
