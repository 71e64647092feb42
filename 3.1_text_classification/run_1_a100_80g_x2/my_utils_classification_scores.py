"""How good a classifier is: accuracy and macro-F1 with confidence intervals, and which classes it confuses.

Macro-F1 is the mean of the classes' F1, each class weighing the same; its interval is a percentile bootstrap over rows,
that of accuracy Wilson's. They say what other rows of the same kind would give (95 %), not what another seed would.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest, bootstrap
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score

from common.data.rows import Row
from common.data.texts import MOST_LABELS

CONFIDENCE = 0.95
BOOTSTRAP_SAMPLES, BOOTSTRAP_SEED = 1000, 0


@dataclass(frozen=True)
class Classified:
    """What a model found in the texts of a split, in the data's order, and the names of all classes."""

    labels: tuple[str, ...]
    found: tuple[int, ...]
    meant: tuple[int, ...]

    def __str__(self) -> str:
        accuracy, f1 = accuracy_score(self.meant, self.found), macro_f1(self.found, self.meant)
        low, high = accuracy_interval(self.found, self.meant)
        return f"accuracy {accuracy:.4f} ({low:.3f} to {high:.3f}), macro-F1 {f1:.3f}"

    def summary(self) -> dict[str, object]:
        """Return the metrics for the record; of many labels the matrix has those that most rows mean."""
        commonest = sorted(number for number, _ in Counter(self.meant).most_common(MOST_LABELS))
        shown = commonest if len(self.labels) > MOST_LABELS else list(range(len(self.labels)))
        return {
            "accuracy": float(accuracy_score(self.meant, self.found)),
            "accuracy_interval": accuracy_interval(self.found, self.meant),
            "macro_f1": macro_f1(self.found, self.meant),
            "macro_f1_interval": macro_f1_interval(self.found, self.meant),
            "rows": len(self.meant),
            "classes": len(self.labels),
            "labels": [self.labels[number] for number in shown],
            "confusion": confusion_matrix(self.meant, self.found, labels=shown).tolist(),
        }

    def lines(self, rows: list[Row]) -> list[dict[str, object]]:
        """Return the lines of the predictions file, one for each text."""
        return [
            {"row": number, "text": row["text"], "label": row["label"], "found": self.labels[found]}
            for number, (row, found) in enumerate(zip(rows, self.found, strict=True), 1)
        ]


def accuracy_interval(found: tuple[int, ...], meant: tuple[int, ...]) -> tuple[float, float]:
    """Return Wilson's score interval of the accuracy."""
    correct = int(accuracy_score(meant, found, normalize=False))
    interval = binomtest(correct, len(meant)).proportion_ci(CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def macro_f1(found: tuple[int, ...], meant: tuple[int, ...]) -> float:
    """Return the mean of the F1 of every class that stands among `meant` or `found`."""
    return float(f1_score(meant, found, average="macro", zero_division=0))


def macro_f1_interval(found: tuple[int, ...], meant: tuple[int, ...]) -> tuple[float, float]:
    """Return percentiles of the macro-F1 of rows drawn again and again, with replacement; (0, 1) for a single row."""
    if len(meant) == 1:
        return 0.0, 1.0
    interval = bootstrap(
        (np.array(found), np.array(meant)), macro_f1, paired=True, vectorized=False, method="percentile",
        n_resamples=BOOTSTRAP_SAMPLES, confidence_level=CONFIDENCE, rng=BOOTSTRAP_SEED,
    ).confidence_interval  # fmt: skip
    return float(interval.low), float(interval.high)
