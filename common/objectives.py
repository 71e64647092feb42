"""What a model learns to predict: how rows become a batch, what a row's losses are, and what is best."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.callbacks import VALIDATION_LOSS
from common.data import Collate


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
