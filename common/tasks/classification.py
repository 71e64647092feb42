"""What a classifier learns, and how good it is: accuracy and macro-F1 with confidence intervals, and who is confused.

Accuracy: share of the rows whose label was found; its interval is Wilson's. Macro-F1: the mean of the classes' F1, each
class weighing the same however rare it is; its interval is a percentile bootstrap over rows. Both intervals say what
other rows of the same kind would give (95 %), not what another seed would.
"""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import SequenceClassifierOutput

from common.base.print_prefix import rank_prefix
from common.data.batches import batches_by_length, make_class_collator
from common.data.rows import IGNORED_LABEL, Row
from common.data.splits import tokens_of
from common.runtime.recorder import RunLog
from common.tasks.objectives import ACCURACY, VALIDATION_LOSS, Objective

CONFIDENCE = 0.95
BOOTSTRAP_SAMPLES, BOOTSTRAP_SEED = 1000, 0


# -- in training


def class_results(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Loss, 1, and whether the label was found, of each row: shape (rows, 3); zeros for a row without a label.

    `logits` has shape (rows, classes), `labels` (rows,).
    """
    losses = cross_entropy(logits.float(), labels, ignore_index=IGNORED_LABEL, reduction="none")
    has_label = labels != IGNORED_LABEL
    correct = (logits.argmax(-1) == labels) & has_label
    return torch.stack([losses, has_label.float(), correct.float()], dim=1)


def class_metrics(sums: torch.Tensor) -> dict[str, float]:
    """Mean loss and accuracy of all rows, each counted once at any batch and world size."""
    loss, rows, correct = (float(value) for value in sums)
    return {VALIDATION_LOSS: loss / rows, ACCURACY: correct / rows}


def class_loss(
    outputs: SequenceClassifierOutput, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """The sum of the rows' losses over the labels of the whole step, so that uneven shares weigh what they should.

    (The library's own is a mean over this rank's batch.)
    """
    divisor = (labels != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
    return cross_entropy(outputs.logits.float(), labels, ignore_index=IGNORED_LABEL, reduction="sum") / divisor


CLASSES = Objective(
    lambda tokenizer, _: make_class_collator(tokenizer), class_results, class_metrics, ACCURACY, True, class_loss
)


# -- at the end


@dataclass(frozen=True)
class Classified:
    """What a model found in the texts of a split, in the data's order; the same on every rank."""

    labels: tuple[str, ...]
    """The names of the classes, in the order of their numbers."""
    found: tuple[int, ...]
    meant: tuple[int, ...]

    @property
    def accuracy(self) -> float:
        """Share of the rows whose label was found."""
        return float(np.mean(np.equal(self.found, self.meant)))

    def __str__(self) -> str:
        """One line for a reader."""
        low, high = accuracy_interval(self.found, self.meant)
        return (
            f"accuracy {self.accuracy:.4f} ({low:.3f} to {high:.3f}), macro-F1 {macro_f1(self.found, self.meant):.3f}"
        )

    def summary(self) -> dict[str, object]:
        """The figures for the record."""
        return {
            "accuracy": self.accuracy,
            "accuracy_interval": accuracy_interval(self.found, self.meant),
            "macro_f1": macro_f1(self.found, self.meant),
            "macro_f1_interval": macro_f1_interval(self.found, self.meant),
            "rows": len(self.meant),
            "labels": list(self.labels),
            "confusion": confusion(self.found, self.meant, len(self.labels)),
        }

    def save_csv(self, path: Path, rows: list[Row]) -> None:
        """One line per text."""
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["row", "text", "label", "found"])
            for number, (row, found) in enumerate(zip(rows, self.found, strict=True), 1):
                writer.writerow([number, row["text"], row["label"], self.labels[found]])


def accuracy_interval(found: tuple[int, ...], meant: tuple[int, ...]) -> tuple[float, float]:
    """Wilson's score interval of the share of rows whose label was found."""
    from scipy.stats import binomtest  # here: only classification needs it

    correct = int(np.sum(np.equal(found, meant)))
    interval = binomtest(correct, len(meant)).proportion_ci(CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def macro_f1(found: tuple[int, ...], meant: tuple[int, ...]) -> float:
    """Mean of the F1 of every class that stands among `meant` or `found`."""
    from sklearn.metrics import f1_score  # here: only classification needs it

    return float(f1_score(meant, found, average="macro", zero_division=0))


def macro_f1_interval(found: tuple[int, ...], meant: tuple[int, ...]) -> tuple[float, float]:
    """Percentiles of the macro-F1 of rows drawn again and again, with replacement; of a single row, all that can be."""
    from scipy.stats import bootstrap

    if len(meant) == 1:
        return 0.0, 1.0
    interval = bootstrap(
        (np.array(found), np.array(meant)), macro_f1, paired=True, vectorized=False, method="percentile",
        n_resamples=BOOTSTRAP_SAMPLES, confidence_level=CONFIDENCE, rng=BOOTSTRAP_SEED,
    ).confidence_interval  # fmt: skip
    return float(interval.low), float(interval.high)


def confusion(found: tuple[int, ...], meant: tuple[int, ...], classes: int) -> list[list[int]]:
    """How many rows of each class (lines) were taken for which (columns)."""
    from sklearn.metrics import confusion_matrix

    return confusion_matrix(meant, found, labels=range(classes)).tolist()


@torch.no_grad()
def classify(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[Row], log: RunLog, when: str
) -> Classified:
    """The labels that a model finds, every rank for its share of the rows; no row is counted twice.

    Rank 0 writes predictions_`when`.csv into the results folder.
    """
    run, rank = log.run, log.rank
    tokens, collate = tokens_of(rows, tokenizer, run), make_class_collator(tokenizer)
    lengths = [len(row["input_ids"]) for row in tokens]
    batches = batches_by_length(lengths, run.per_device_eval_batch_size, rank.rank, rank.world_size)
    found: list[tuple[int, int]] = []
    title = f"{rank_prefix(rank.rank, rank.device)} labels {when} tuning, batches"
    for numbers in tqdm(batches, desc=title, disable=not rank.is_main, file=sys.stdout, mininterval=2):
        batch = collate([tokens[number] for number in numbers])
        inputs = {name: batch[name].to(rank.device) for name in ("input_ids", "attention_mask")}
        found += zip(numbers, model(**inputs).logits.argmax(-1).tolist(), strict=True)
    in_order = tuple(label for _, label in sorted(gather_object(found)))
    names = tuple(model.config.id2label[number] for number in range(model.config.num_labels))
    classified = Classified(names, in_order, tuple(row["class"] for row in rows))
    if rank.is_main:
        classified.save_csv(log.folder / f"predictions_{when}.csv", rows)
        print(f"{when} tuning: {classified}")
    return classified
