"""What a model learns to predict: how rows become a batch, what a row's losses are, and what is best."""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from common.base.run_config import RunConfig
from common.data.batches import Collate
from common.data.rows import IGNORED_LABEL, Tokens, labels_in

# names in the log history
VALIDATION_LOSS = "eval_mean_loss"  # over all validation rows' answer tokens, or what `Task.loss_per` says
ACCURACY = "eval_accuracy"  # of labels that were found, or of pairs whose chosen answer has the higher reward

REWARD = "eval_reward"  # mean of the greedy answers to the validation prompts


@dataclass(frozen=True)
class Objective:
    """One kind of prediction."""

    collator: Callable[[PreTrainedTokenizerBase, PreTrainedModel, RunConfig], Collate]
    results: Callable[..., torch.Tensor]  # from logits and what each is to predict, what each row counts for: (rows, k)
    metrics: Callable[[torch.Tensor], dict[str, float]]  # from the sums of all rows' results, (k,), for the log history
    best_metric: str
    higher_is_better: bool
    # instead of the model's own, unless that is in chunks: from outputs, labels, and the labels of the whole step
    loss: Callable[..., torch.Tensor] | None = None
    labels_in: Callable[[Tokens], int] = labels_in  # how many labels of a row are to be predicted
    needs_losses_alone: bool = False  # `results` are the sum of a row's losses and their number, without logits
    # where the loss reads log-probabilities of whole answers: a batch's summed loss, and what each row counts for, from
    # the run, the model, what is called (in training another module around it), and a batch
    loss_of_model: Callable[[RunConfig, Any, torch.nn.Module, dict[str, Any]], torch.Tensor] | None = None
    results_of_model: Callable[[RunConfig, Any, torch.nn.Module, dict[str, Any]], torch.Tensor] | None = None
    prepare: Callable[[PreTrainedModel, RunConfig], None] | None = None  # what is done to a model before it trains


def answer_results(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return sum of the losses, and number, of each row's answer tokens, shape (rows, 2).

    `logits` has shape (rows, positions, vocabulary), `targets`, what each position is to predict, (rows, positions).
    Row by row, as fp32 copies of all rows' logits would take several times their memory.
    """
    losses = [
        cross_entropy(row.float(), wanted, ignore_index=IGNORED_LABEL, reduction="sum")
        for row, wanted in zip(logits, targets, strict=True)
    ]
    return torch.stack([torch.stack(losses), (targets != IGNORED_LABEL).sum(1)], dim=1)


def mean_loss(sums: torch.Tensor) -> dict[str, float]:
    """Return the validation loss, from the sum of the losses and the number of tokens of all rows.

    (The `eval_loss` of Transformers' Trainer is a mean of batch means: 0.4 % more on two ranks than on one.)
    """
    loss_sum, token_count = sums
    return {VALIDATION_LOSS: float(loss_sum / token_count)}


def step_loss(
    outputs: ModelOutput, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Return the sum of the losses over the number of labels of the whole step, so that uneven shares weigh right.

    Logits have shape (rows, classes) or (rows, tokens, vocabulary), `labels` the same without the last dimension.
    """
    divisor = (labels != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
    logits = outputs.logits.float().movedim(-1, 1)
    losses = cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    return losses / divisor


def objective_of(run: RunConfig) -> Objective:
    """Return what the run's model learns to predict."""
    return resolve_name(run.goal.objective)
