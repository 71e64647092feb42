"""What a model learns from pairs of answers by DPO, and what its own answers are like.

DPO (Rafailov et al. 2023) makes the chosen answer likelier than the rejected one, each compared with what the model
before this training, the reference, finds of it:

    reward(answer) = beta x (log p(answer) - log p_reference(answer))
    loss = -log sigmoid(reward(chosen) - reward(rejected))
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import trl.trainer.utils
from peft import PeftModel
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

from common.base.run_config import RunConfig
from common.data.batches import Collate
from common.data.pairs import prompt_length
from common.data.rows import IGNORED_LABEL, Row, Tokens, question_of, tokens_in
from common.data.stored_rows import stored
from common.runtime.recorder import RunRecorder
from common.tasks.answers import Evaluation, ScoredAnswer, facts_in
from common.tasks.objectives import ACCURACY, VALIDATION_LOSS, Objective
from common.tasks.predictions import predict_rows

MARGIN = "eval_margin"  # mean of reward(chosen) - reward(rejected), in the log history
# TRL's names of a row's reference log-probabilities, where they were computed before training
REFERENCES = ("ref_chosen_logps", "ref_rejected_logps")
YEAR = re.compile(r"\b(?:1\d|20)\d\d\b")
TRL_COLUMNS = trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE  # an error where TRL has renamed it
Pair = tuple[float, float]  # log-probabilities or rewards of the chosen and the rejected answer


# -- in training


def _pair_collator(pad_token_id: int, multiple: int = 0) -> Collate:
    """Return TRL's collator, of this repository's rows: all chosen answers come first, then all rejected ones.

    A batch, shape (2 pairs, tokens), also has the rows' numbers, and `pairs`, the number of rows that are not fillers.
    It is padded to a `multiple` of so many tokens; 0 = to the longest answer.
    """
    collate = DataCollatorForPreference(pad_token_id, pad_to_multiple_of=multiple or None)

    def collate_pairs(rows: list[Tokens]) -> dict[str, object]:
        batch = collate([_trl_row(row) for row in rows])
        numbers = {"row": torch.tensor([row["row"] for row in rows])} if "row" in rows[0] else {}
        return {**batch, **numbers, "pairs": sum(map(_is_pair, rows))}

    return collate_pairs


def _is_pair(row: Tokens) -> bool:
    return prompt_length(row) < len(row["input_ids"])


def _trl_row(row: Tokens) -> dict[str, object]:
    begin, counts = prompt_length(row), _is_pair(row)  # what a batch is filled up with has no answers
    return {
        "prompt_ids": row["input_ids"][:begin],
        "chosen_ids": row["input_ids"][begin:],
        "rejected_ids": row["rejected_ids"][begin:] if counts else [],
        **{name: row[name] if counts else 0.0 for name in REFERENCES if name in row},
    }


def token_log_probs(model: Callable[..., object], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-probability of each answer's tokens, and 0 elsewhere, by a model with TRL's head.

    Its shape is (answers, tokens - 1): each token is predicted at the position before it.
    """
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, IGNORED_LABEL)
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return model(**given, labels=labels, use_cache=False, fused_lm_head=True).log_probs


def answer_log_probs(model: Callable[..., object], batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of chosen and rejected answers, each (pairs,), by a model with TRL's head."""
    return token_log_probs(model, batch).sum(1).chunk(2)


def with_reference(
    rows: Sequence[Tokens], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, log: RunRecorder, which: str
) -> Sequence[Tokens]:
    """Return the rows of the split `which` with the log-probabilities that `model`, not trained yet, gives to both."""
    prepare_for_log_probs(model.eval())
    pairs = log_probs_of(model, tokenizer, rows, log, f"pairs of {which}", "before")
    return stored({**row, **dict(zip(REFERENCES, pair, strict=True))} for row, pair in zip(rows, pairs, strict=True))


def pair_results(now: Sequence[torch.Tensor], reference: Sequence[torch.Tensor], beta: float) -> torch.Tensor:
    """Return loss, 1, whether the chosen answer won, and the margin of each pair, shape (pairs, 4)."""
    chosen, rejected = (beta * (own - before) for own, before in zip(now, reference, strict=True))
    margin = chosen - rejected
    return torch.stack([-logsigmoid(margin), torch.ones_like(margin), (margin > 0).float(), margin], dim=1)


def dpo_loss(
    run: RunConfig, model: PreTrainedModel | PeftModel, module: torch.nn.Module, batch: dict[str, Any]
) -> torch.Tensor:
    """Return the sum of the losses of a batch's pairs, as `module`, which is `model` in training, finds them."""
    return _compared(run, model, module, batch)[:, 0].sum()


def _compared(
    run: RunConfig, model: PreTrainedModel | PeftModel, module: torch.nn.Module, batch: dict[str, Any]
) -> torch.Tensor:
    now = answer_log_probs(module, batch)
    if REFERENCES[0] in batch:  # found before training
        reference = [batch[name] for name in REFERENCES]
    else:
        with torch.no_grad(), model.disable_adapter():
            reference = answer_log_probs(model, batch)
    found = pair_results(now, reference, run.beta)
    if run.loss_type == "sft":  # the mean of a token of the chosen answer, as if there were no other
        found[:, 0] = -now[0] / batch["completion_mask"].chunk(2)[0].sum(1).clamp(min=1)
    return found[: batch["pairs"]]  # what a batch was filled up with comes last


def pair_metrics(sums: torch.Tensor) -> dict[str, float]:
    """Return the means over all pairs."""
    loss, count, won, margin = sums.tolist()
    return {VALIDATION_LOSS: loss / count, ACCURACY: won / count, MARGIN: margin / count}


def prepare_for_log_probs(model: PreTrainedModel | PeftModel, temperature: float = 1.0) -> None:
    """Switch a model's dropout off, so that it begins as the reference, and give it TRL's head."""
    disable_dropout_in_model(model)
    _with_chunked_head(model.get_base_model() if isinstance(model, PeftModel) else model, temperature)


PAIRS = Objective(
    lambda tokenizer, _, run: _pair_collator(tokenizer.pad_token_id, run.pad_to_multiple_of),
    results=pair_results,
    metrics=pair_metrics,
    best_metric=VALIDATION_LOSS,
    higher_is_better=False,
    labels_in=lambda row: int(_is_pair(row)),
    loss_of_model=dpo_loss,
    results_of_model=_compared,
    prepare=lambda model, _: prepare_for_log_probs(model),
)


# -- at the end


@dataclass(frozen=True)
class LabelEvaluation(Evaluation):
    """What a model answers to all prompts, scored without labelled answers, and how many of its samples differ."""

    distinct_share: float

    def __str__(self) -> str:
        facts, dates = self.facts_share(), self.mean("invents_a_date")
        said = "" if facts is None else f"fact recall {facts:.0%}, "
        written = f"{said}{dates:.0%} of the answers with an invented date, {self.mean('words'):.1f} words"
        return f"{written}, {self.distinct_share:.0%} of samples differ"

    def summary(self) -> dict[str, float | int | None]:
        """Return the metrics for the record."""
        dates = self.mean("invents_a_date")
        return {
            "facts_said_share": self.facts_share(),
            "invented_dates_share": dates,
            "undated_share": 1 - dates,
            "words": self.mean("words"),
            "distinct_share": self.distinct_share,
            "questions": len(self.answers),
        }


def scored(number: int, row: Row, answer: str) -> ScoredAnswer:
    """Return an answer to the prompt of a row, with what it says of the row's facts, and whether it invents a year."""
    return {
        "row": number,
        "question": question_of(row),
        "answer": answer,
        "facts": len(row.get("facts", [])),
        "facts_said": facts_in(answer, row),
        "invents_a_date": bool(invented_years(answer, row)),
        "words": len(answer.split()),
    }


@torch.no_grad()
def log_probs_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Tokens],
    log: RunRecorder,
    what: str,
    when: str,
) -> list[Pair]:
    """Return the log-probabilities of each pair's answers by a model, which gets TRL's head, as `predict_rows`."""
    _with_chunked_head(model)
    collate = _pair_collator(tokenizer.pad_token_id)

    def found(numbers: list[int]) -> Iterable[Pair]:
        batch = collate([pairs[number] for number in numbers])
        inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask", "completion_mask")}
        return zip(*(each.tolist() for each in answer_log_probs(model, inputs)), strict=True)

    return predict_rows(log, list(map(tokens_in, pairs)), what, when, found, model)


def _with_chunked_head(model: PreTrainedModel, temperature: float = 1.0) -> None:
    """Give a model TRL's head, once, which finds the log-probabilities of labels without whole logits."""
    # its buffer of logits is no wider than the vocabulary: TRL's has 32,768 columns, however small that is
    trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = min(TRL_COLUMNS, model.config.get_text_config().vocab_size)
    if not hasattr(model, "has_chunked_head"):
        add_fused_lm_head(model, temperature, outputs=("log_probs",))
        model.has_chunked_head = True


def invented_years(answer: str, row: Row) -> list[str]:
    """Return the years (1000 to 2099) in an answer that neither its prompt nor the chosen answer names."""
    named = YEAR.findall(" ".join(message["content"] for message in row["messages"]))
    return [year for year in YEAR.findall(answer) if year not in named]
