"""What a summarizer learns, and how good texts are by ROUGE (Lin 2004), the mean over all rows.

It is a summary's overlap with the one that a person wrote, as F-measure with Porter's stemmer: of single words (1),
pairs of words (2), and the longest common subsequence of the whole text (L) or sentence by sentence (Lsum).
"""

import logging
import re

import datasets
import evaluate
from rouge_score.rouge_scorer import RougeScorer

from common.data.batches import make_collator
from common.data.rows import IGNORED_LABEL
from common.tasks.objectives import VALIDATION_LOSS, Objective, answer_results, mean_loss, step_loss

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


SUMMARIES = Objective(
    lambda tokenizer, model, run: make_collator(tokenizer, model, run.pad_to_multiple_of),
    answer_results,
    mean_loss,
    VALIDATION_LOSS,
    False,
    step_loss,
    # a decoder that reads another text predicts all of its tokens
    labels_in=lambda row: len(row["labels"]) - row["labels"].count(IGNORED_LABEL),
    needs_losses_alone=True,
)


class _Rouge(evaluate.Metric):
    # `evaluate.load("rouge")` would fetch its script from the Hub

    def _info(self) -> evaluate.MetricInfo:
        texts = {name: datasets.Value("string") for name in ("predictions", "references")}
        return evaluate.MetricInfo(
            description="ROUGE", citation="Lin 2004", inputs_description="texts", features=datasets.Features(texts)
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        scorer = RougeScorer(ROUGE, use_stemmer=True)
        scores = [scorer.score(*pair) for pair in zip(references, predictions, strict=True)]
        return {name: sum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE}


def rouge_scores(written: list[str], references: list[str]) -> dict[str, float]:
    """Return the ROUGE of a whole set, by `evaluate` over Google's `rouge-score`."""
    logging.getLogger("absl").setLevel(logging.WARNING)  # it says at each use which tokenizer it takes
    by_sentence = [["\n".join(SENTENCE_END.split(text)) for text in texts] for texts in (written, references)]
    return _Rouge().compute(predictions=by_sentence[0], references=by_sentence[1])
