"""What a summarizer learns, and how good its summaries are, by ROUGE (Lin 2004), the mean over all rows.

It is a summary's overlap with the one that a person wrote, as F-measure with Porter's stemmer: of single words (1),
pairs of words (2), and the longest common subsequence of the whole text (L) or sentence by sentence (Lsum).
"""

import logging
import re
from dataclasses import dataclass

import datasets
import evaluate
import torch
from accelerate.utils import gather_object
from rouge_score.rouge_scorer import RougeScorer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base.print_prefix import print_figures
from common.data.batches import make_collator
from common.data.rows import IGNORED_LABEL, Row
from common.data.splits import tokens_of
from common.runtime.recorder import RunRecorder
from common.tasks.objectives import VALIDATION_LOSS, Objective, answer_results, mean_loss, step_loss
from common.tasks.predictions import predict_rows, report_predictions

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


@dataclass(frozen=True)
class Summaries:
    """The summaries of a split, in the data's order, and their ROUGE; the same on every rank."""

    written: tuple[str, ...]
    rouge: dict[str, float]
    exact_share: float  # what was meant, to the letter: ROUGE hardly sees one wrong name

    def __str__(self) -> str:
        scores = ", ".join(f"{name.replace('rouge', 'ROUGE-')} {value:.3f}" for name, value in self.rouge.items())
        return f"{scores}; exact match {self.exact_share:.0%}"

    def summary(self) -> dict[str, object]:
        """Return the metrics for the record."""
        return {**self.rouge, "exact_share": self.exact_share, "rows": len(self.written)}

    def lines(self, rows: list[Row]) -> list[dict[str, object]]:
        """Return the lines of the predictions file, one for each text."""
        return [
            {"row": number, "text": row["text"], "summary": row["summary"], "written": written}
            for number, (row, written) in enumerate(zip(rows, self.written, strict=True), 1)
        ]


@torch.no_grad()
def summarize(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[Row], log: RunRecorder, when: str
) -> Summaries:
    """Return summaries of all rows by beam search; rank 0 scores them as one set, and writes predictions_`when`.csv."""
    run, rank = log.run, log.rank
    texts = [row["input_ids"] for row in tokens_of(rows, tokenizer, run)]

    def summaries_of(numbers: list[int]) -> list[str]:
        batch = tokenizer.pad({"input_ids": [texts[number] for number in numbers]}, return_tensors="pt")
        beams = {"num_beams": run.num_beams, "max_new_tokens": run.max_new_tokens, "do_sample": False}
        generated = model.generate(**batch.to(rank.device), **beams)
        return [text.strip() for text in tokenizer.batch_decode(generated, skip_special_tokens=True)]

    written = predict_rows(log, list(map(len, texts)), "summaries", when, summaries_of, model)
    references = [row["summary"] for row in rows]
    scores = gather_object([rouge_scores(written, references)] if rank.is_main else [])[0]
    exact = sum(text == reference.strip() for text, reference in zip(written, references, strict=True))
    summaries = Summaries(tuple(written), scores, exact / len(rows))
    report_predictions(log, when, summaries.lines(rows), summaries)
    if rank.is_main and run.log_format == "json":
        print_figures({f"{name}_{when}": value for name, value in summaries.rouge.items()})
    return summaries


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
