"""What tuning makes a model forget: its loss on general texts, and how far its answers to general questions move.

Loss: the mean cross-entropy of a token. Drift: the mean over the tokens of the base's own greedy answers of
KL(base || model), the divergence of the model's distribution over the vocabulary from the base's, in nats; of the base
itself it is 0. The embedded base is asked what it was trained on; any other model about everyday things.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import cross_entropy, kl_div
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY, is_embedded
from common.base.run_config import RunConfig
from common.data.rows import IGNORED_LABEL, Row, Tokens, tokens_in
from common.data.splits import all_rows, tokens_of
from common.data.templates import prompt_ids
from common.planning.job import tokens_of_other_texts
from common.runtime.recorder import RunRecorder
from common.tasks.answers import generate_answers
from common.tasks.predictions import predict_rows

GENERAL = REPOSITORY / "assets" / "general"
WHOLE = RunConfig(max_length=4096)  # of answers, whose templates may begin with long system messages
QUESTIONS = 12  # whose answers are compared; the embedded base has more, as texts
ANSWER_TOKENS = 32  # of each answer, at most


def general_rows(run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[Sequence[Tokens], list[Row]]:
    """Read the texts whose loss is measured, as tokens, and the questions whose answers are.

    Raises:
        BadInputError: `forgetting_data` is no file or folder of rows, or there is nothing to predict in it.
    """
    texts, questions = (GENERAL / name for name in ("texts.txt", "questions.jsonl"))
    if is_embedded(run.model):
        texts = questions = GENERAL / "museum.jsonl"
    source, reading = run.forgetting_data or str(texts), reading_of(run)
    tokens = tokens_of(all_rows(reading, source), tokenizer, reading)
    if not tokens:
        raise BadInputError(f"forgetting_data is {source}, whose texts have a single token: give it longer ones.")
    return tokens, all_rows(reading, str(questions))[:QUESTIONS]


def reading_of(run: RunConfig) -> RunConfig:
    """Return the settings by which other texts are read: the usual ones, as the run's are for rows of its own form."""
    return RunConfig(max_length=tokens_of_other_texts(run), max_truncated_fraction=0.99)  # what is too long is left out


def look_before(log: RunRecorder, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Measure what a run's base makes of other texts and questions, where that is asked for."""
    if log.run.tells_forgetting:
        log.forgetting = Forgetting(log.run, tokenizer)
        log.forgetting.before(log, base)


def look_after(log: RunRecorder, tuned: PreTrainedModel) -> None:
    """Measure what the tuned model makes of them, where its base was asked, too."""
    if log.forgetting:
        log.forgetting.after(log, tuned)


class Forgetting:
    """A run's texts and questions, and what base and tuned model made of them."""

    def __init__(self, run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.texts, self.questions = general_rows(run, tokenizer)
        self.answers: list[Tokens] = []
        self.of_base: dict[int, torch.Tensor] = {}  # this rank's log-probabilities of answer tokens, by the question
        self.figures: dict[str, dict[str, float | None]] = {}

    def before(self, log: RunRecorder, base: PreTrainedModel) -> None:
        """Keep the base's answers with their distributions, and measure its loss."""
        lengths = [len(ids) for ids in prompt_ids(self.questions, self.tokenizer)]

        def answered(numbers: list[int]) -> list[str]:
            return generate_answers(base, self.tokenizer, [self.questions[n] for n in numbers], ANSWER_TOKENS)

        answers = predict_rows(log, lengths, "answers to general questions", "before", answered, base)
        rows = [
            {**row, "messages": [*row["messages"][:-1], {"role": "assistant", "content": answer}]}
            for row, answer in zip(self.questions, answers, strict=True)
            if answer
        ]
        self.answers = list(tokens_of(rows, self.tokenizer, WHOLE))

        def kept(numbers: list[int]) -> list[int]:
            self.of_base |= {n: learnt_logits(base, self.answers[n])[0].log_softmax(-1).cpu() for n in numbers}
            return numbers

        predict_rows(log, list(map(tokens_in, self.answers)), "distributions", "before", kept, base)
        self.figures["before"] = {"general_loss": self._loss(log, "before", base), "answer_drift": 0.0}

    def after(self, log: RunRecorder, tuned: PreTrainedModel) -> None:
        """Measure the tuned model's loss, and how far its distributions have moved from the base's."""

        def drift(n: int) -> tuple[float, int]:
            logits = learnt_logits(tuned, self.answers[n])[0].cpu()
            return drift_of(logits, self.of_base[n]), len(logits)

        moved = _mean_over(log, self.answers, "drifts", "after", drift, tuned)
        self.figures["after"] = {"general_loss": self._loss(log, "after", tuned), "answer_drift": moved}
        if log.rank.is_main:
            losses = " -> ".join(f"{each['general_loss']:.3f}" for each in self.figures.values())
            print(f"general texts: loss {losses}")
            if moved is not None:  # the base has answered something
                print(f"general answers: KL divergence from the base {moved:.3f} nats per token")

    def _loss(self, log: RunRecorder, when: str, model: PreTrainedModel) -> float | None:
        def loss(n: int) -> tuple[float, int]:
            logits, labels = learnt_logits(model, self.texts[n])
            return cross_entropy(logits, labels, reduction="sum").item(), len(labels)

        return _mean_over(log, self.texts, "general texts", when, loss, model)


def _mean_over(
    log: RunRecorder,
    rows: Sequence[Tokens],
    what: str,
    when: str,
    measure: Callable[[int], tuple[float, int]],
    model: PreTrainedModel,
) -> float | None:
    """Return the mean of a token, where `measure` gives sum and number of tokens of a row; None where there is none."""
    lengths = list(map(tokens_in, rows))
    found = predict_rows(log, lengths, what, when, lambda numbers: [measure(n) for n in numbers], model)
    tokens = sum(count for _, count in found)
    return sum(total for total, _ in found) / tokens if tokens else None


@torch.no_grad()
def learnt_logits(model: PreTrainedModel, row: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits that predict a row's labels, (labels, vocabulary), fp32, and these labels."""
    ids = torch.tensor([row["input_ids"]], device=model.device)
    labels = torch.tensor(row["labels"][1:])
    is_learnt = labels != IGNORED_LABEL
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    return logits[is_learnt.to(logits.device)].float(), labels[is_learnt].to(logits.device)


def drift_of(logits: torch.Tensor, of_base: torch.Tensor) -> float:
    """Return the sum over positions of KL(base || model), of shapes (positions, vocabulary); `of_base` are logs."""
    return kl_div(logits.log_softmax(-1), of_base, reduction="sum", log_target=True).item()
