"""What a summarizer learns, and how good its summaries are: ROUGE-1, 2, L and Lsum of the whole set.

ROUGE (Lin 2004): the overlap of a summary with the one that a person wrote, as F-measure with Porter's stemmer: of
single words (1), pairs of words (2), and the longest common subsequence of the whole text (L) or sentence by sentence
(Lsum). Each is the mean over all rows: ranks hand in their summaries, and one scores them all.
"""

import csv
import logging
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import Seq2SeqLMOutput

from common.base.print_prefix import print_figures, rank_prefix
from common.data.batches import batches_by_length, make_collator
from common.data.rows import IGNORED_LABEL, Row
from common.data.splits import tokens_of
from common.runtime.recorder import RunLog
from common.tasks.objectives import VALIDATION_LOSS, Objective, mean_loss

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
GENERATED = ("input_ids", "attention_mask")


# -- in training


def summary_results(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the losses, and number, of each summary's tokens, shape (rows, 2).

    `logits` has shape (rows, tokens, vocabulary), `labels` (rows, tokens).
    """
    losses = cross_entropy(logits.float().mT, labels, ignore_index=IGNORED_LABEL, reduction="none")
    return torch.stack([losses.sum(1), (labels != IGNORED_LABEL).sum(1)], dim=1)


def summary_loss(
    outputs: Seq2SeqLMOutput, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """The sum of the tokens' losses over the summaries' tokens of the whole step, so that uneven shares weigh right.

    (The library's own is a mean over this rank's batch.) `labels` has shape (rows, tokens).
    """
    divisor = (labels != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
    losses = cross_entropy(outputs.logits.float().mT, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    return losses / divisor


SUMMARIES = Objective(make_collator, summary_results, mean_loss, VALIDATION_LOSS, False, summary_loss)


# -- at the end


@dataclass(frozen=True)
class Summaries:
    """The summaries of a split, in the data's order, and their ROUGE; the same on every rank."""

    written: tuple[str, ...]
    rouge: dict[str, float]
    exact_share: float
    """Of the summaries those that are what was meant, to the letter: ROUGE hardly sees one wrong name."""

    def __str__(self) -> str:
        """One line for a reader."""
        scores = ", ".join(f"{name.replace('rouge', 'ROUGE-')} {value:.3f}" for name, value in self.rouge.items())
        return f"{scores}; {self.exact_share:.0%} to the letter"

    def summary(self) -> dict[str, object]:
        """The figures for the record."""
        return {**self.rouge, "exact_share": self.exact_share, "rows": len(self.written)}

    def save_csv(self, path: Path, rows: list[Row]) -> None:
        """One line per text."""
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["row", "text", "summary", "written"])
            for number, (row, written) in enumerate(zip(rows, self.written, strict=True), 1):
                writer.writerow([number, row["text"], row["summary"], written])


@torch.no_grad()
def summarize(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[Row], log: RunLog, when: str
) -> Summaries:
    """Summaries by beam search, every rank for its share of the rows, scored on rank 0 as one set.

    Rank 0 writes predictions_`when`.csv into the results folder.
    """
    run, rank = log.run, log.rank
    tokens, collate = tokens_of(rows, tokenizer, run), make_collator(tokenizer)
    lengths = [len(row["input_ids"]) for row in tokens]
    batches = batches_by_length(lengths, run.per_device_eval_batch_size, rank.rank, rank.world_size)
    written: list[tuple[int, str]] = []
    title = f"{rank_prefix(rank.rank, rank.device)} summaries {when} tuning, batches"
    for numbers in tqdm(batches, desc=title, disable=not rank.is_main, file=sys.stdout, mininterval=2):
        batch = collate([tokens[number] for number in numbers])
        inputs = {name: batch[name].to(rank.device) for name in GENERATED}
        generated = model.generate(
            **inputs, num_beams=run.num_beams, max_new_tokens=run.max_new_tokens, do_sample=False
        )
        texts = tokenizer.batch_decode(generated, skip_special_tokens=True)
        written += zip(numbers, (text.strip() for text in texts), strict=True)
    in_order = tuple(text for _, text in sorted(gather_object(written)))
    references = [row["summary"] for row in rows]
    scores = gather_object([rouge_scores(list(in_order), references)] if rank.is_main else [])[0]
    exact = sum(text == reference.strip() for text, reference in zip(in_order, references, strict=True))
    summaries = Summaries(in_order, scores, exact / len(rows))
    if rank.is_main:
        summaries.save_csv(log.folder / f"predictions_{when}.csv", rows)
        print(f"{when} tuning: {summaries}")
        if run.log_format == "json":
            print_figures({f"{name}_{when}": value for name, value in summaries.rouge.items()})
    return summaries


def rouge_scores(written: list[str], references: list[str]) -> dict[str, float]:
    """ROUGE of a whole set, by `evaluate` over Google's `rouge-score`: the mean over all rows."""
    by_sentence = [["\n".join(SENTENCE_END.split(text)) for text in texts] for texts in (written, references)]
    return _rouge_metric().compute(predictions=by_sentence[0], references=by_sentence[1])


@cache
def _rouge_metric() -> "evaluate.Metric":  # noqa: F821  # imported below: only summarization needs it
    """The metric on this machine: `evaluate.load("rouge")` would fetch its script from the Hub."""
    import datasets
    import evaluate
    from rouge_score.rouge_scorer import RougeScorer

    logging.getLogger("absl").setLevel(logging.WARNING)  # it says at each use which tokenizer it takes

    class Rouge(evaluate.Metric):
        """ROUGE with Porter's stemmer; sentences stand on lines of their own."""

        def _info(self) -> evaluate.MetricInfo:
            texts = {name: datasets.Value("string") for name in ("predictions", "references")}
            return evaluate.MetricInfo(
                description="ROUGE", citation="Lin 2004", inputs_description="texts", features=datasets.Features(texts)
            )

        def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
            scorer = RougeScorer(ROUGE, use_stemmer=True)
            scores = [scorer.score(*pair) for pair in zip(references, predictions, strict=True)]
            return {name: sum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE}

    return Rouge()
