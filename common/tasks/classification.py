"""What a classifier learns: the label of each row, by cross-entropy; how it is validated by accuracy."""

import torch
from torch.nn.functional import cross_entropy
from transformers import DataCollatorWithPadding

from common.data.rows import IGNORED_LABEL
from common.tasks.objectives import ACCURACY, VALIDATION_LOSS, Objective, step_loss


def class_results(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return each row's loss, 1, and whether its label was found, (rows, 3), of logits (rows, classes); else zeros."""
    losses = cross_entropy(logits.float(), labels, ignore_index=IGNORED_LABEL, reduction="none")
    has_label = labels != IGNORED_LABEL
    correct = (logits.argmax(-1) == labels) & has_label
    return torch.stack([losses, has_label.float(), correct.float()], dim=1)


def class_metrics(sums: torch.Tensor) -> dict[str, float]:
    """Return mean loss and accuracy of all rows, each counted once at any batch and world size."""
    loss, rows, correct = (float(value) for value in sums)
    return {VALIDATION_LOSS: loss / rows, ACCURACY: correct / rows}


CLASSES = Objective(
    lambda tokenizer, _, run: DataCollatorWithPadding(tokenizer, pad_to_multiple_of=run.pad_to_multiple_of or None),
    class_results,
    class_metrics,
    ACCURACY,
    True,
    step_loss,
)
