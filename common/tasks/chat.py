"""Chat: each answer's tokens are predicted; a row's losses, and how many tokens it has."""

import torch
from torch.nn.functional import cross_entropy

from common.data.batches import (
    make_collator,
)
from common.data.rows import IGNORED_LABEL
from common.tasks.objectives import VALIDATION_LOSS, Objective, mean_loss


def answer_results(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of the losses, and number, of each row's answer tokens, shape (rows, 2).

    `logits` has shape (rows, positions, vocabulary), `targets`, what each position is to predict, (rows, positions).
    Row by row: fp32 copies of all rows' logits would take several times as much memory as the logits.
    """
    losses = [
        cross_entropy(row.float(), wanted, ignore_index=IGNORED_LABEL, reduction="sum")
        for row, wanted in zip(logits, targets, strict=True)
    ]
    return torch.stack([torch.stack(losses), (targets != IGNORED_LABEL).sum(1)], dim=1)


def whole_row_results(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The same of logits at all positions and of the tokens themselves: position t predicts token t + 1."""
    return answer_results(logits[:, :-1], labels[:, 1:])


ANSWERS = Objective(lambda tokenizer, _: make_collator(tokenizer), whole_row_results, mean_loss, VALIDATION_LOSS, False)
