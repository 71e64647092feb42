"""What tuning makes a model forget: its loss on other texts, and how far its answers to other questions move.

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
from common.runtime.recorder import RunRecorder
from common.tasks.answers import generate_answers
from common.tasks.predictions import predict_rows

GENERAL = REPOSITORY / "assets" / "general"
AS_GIVEN = {  # other rows are not in the form of the run's own
    **dict.fromkeys(("dataset_config", "dataset_revision", "prompt_column", "completion_column"), ""),
    **{"train_on": "assistant", "long_texts": "cut"},
}
ANSWER_TOKENS = 32  # of an answer whose drift is measured, at most
NO_DATA = "none"


def is_measured(run: RunConfig) -> bool:
    """Return whether a run tells what its model forgets; one of random weights knows nothing."""
    is_asked = NO_DATA not in (run.forgetting_data, run.baseline)
    return is_asked and run.goal.learns_answers and run.weights == "pretrained"


def general_rows(run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[Sequence[Tokens], list[Row]]:
    """Read the texts whose loss is measured, as tokens, and the questions whose answers are.

    Raises:
        BadInputError: `forgetting_data` is no file or folder of rows, or there is nothing to predict in it.
    """
    texts, questions = (GENERAL / name for name in ("texts.txt", "questions.jsonl"))
    if is_embedded(run.model):
        texts = questions = GENERAL / "museum.jsonl"
    source, run = run.forgetting_data or str(texts), run.changed_to(**AS_GIVEN)
    tokens = tokens_of(all_rows(run, source), tokenizer, run)
    if not tokens:
        raise BadInputError(f"forgetting_data is {source}, whose texts have a single token: give it longer ones.")
    return tokens, all_rows(run, str(questions))


def look_before(log: RunRecorder, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Measure what a run's base makes of other texts and questions, where that is asked for."""
    if is_measured(log.run):
        log.forgetting = Forgetting(log, tokenizer)
        log.forgetting.before(base)


def look_after(log: RunRecorder, tuned: PreTrainedModel) -> None:
    """Measure what the tuned model makes of them, where its base was asked, too."""
    if log.forgetting:
        log.forgetting.after(tuned)


class Forgetting:
    """A run's texts and questions, and what base and tuned model made of them."""

    def __init__(self, log: RunRecorder, tokenizer: PreTrainedTokenizerBase) -> None:
        self.log, self.tokenizer = log, tokenizer
        self.run = log.run.changed_to(**AS_GIVEN)
        self.texts, self.questions = general_rows(log.run, tokenizer)
        self.answers: list[Tokens] = []
        self.of_base: dict[int, torch.Tensor] = {}  # this rank's log-probabilities of answer tokens, by the question
        self.figures: dict[str, dict[str, float]] = {}

    def before(self, base: PreTrainedModel) -> None:
        """Keep the base's answers with their distributions, and measure its loss."""
        lengths = [len(ids) for ids in prompt_ids(self.questions, self.tokenizer)]

        def answered(numbers: list[int]) -> list[str]:
            return generate_answers(base, self.tokenizer, [self.questions[n] for n in numbers], ANSWER_TOKENS)

        answers = predict_rows(self.log, lengths, "answers to other questions", "before", answered, base)
        rows = [
            {**row, "messages": [*row["messages"][:-1], {"role": "assistant", "content": answer}]}
            for row, answer in zip(self.questions, answers, strict=True)
            if answer
        ]
        self.answers = list(tokens_of(rows, self.tokenizer, self.run))

        def kept(numbers: list[int]) -> list[tuple[float, int]]:
            self.of_base |= {n: learnt_logits(base, self.answers[n])[0].log_softmax(-1).cpu() for n in numbers}
            return [(0.0, 1)] * len(numbers)

        self._mean_over(self.answers, "distributions", "before", kept, base)
        self.figures["before"] = {"general_loss": self._loss("before", base), "answer_drift": 0.0}

    def after(self, tuned: PreTrainedModel) -> None:
        """Measure the tuned model's loss, and how far its distributions have moved from the base's."""

        def drifts(numbers: list[int]) -> list[tuple[float, int]]:
            found = ((learnt_logits(tuned, self.answers[n])[0].cpu(), self.of_base[n]) for n in numbers)
            return [(drift_of(logits, of_base), len(logits)) for logits, of_base in found]

        drift = self._mean_over(self.answers, "drifts", "after", drifts, tuned)
        self.figures["after"] = {"general_loss": self._loss("after", tuned), "answer_drift": drift}
        if self.log.rank.is_main:
            losses = " -> ".join(f"{each['general_loss']:.3f}" for each in self.figures.values())
            print(f"other texts: loss {losses}; answers to other questions drift by {drift:.3f} nats a token")

    def _loss(self, when: str, model: PreTrainedModel) -> float:
        def losses(numbers: list[int]) -> list[tuple[float, int]]:
            found = (learnt_logits(model, self.texts[n]) for n in numbers)
            return [(cross_entropy(*each, reduction="sum").item(), len(each[1])) for each in found]

        return self._mean_over(self.texts, "other texts", when, losses, model)

    def _mean_over(
        self,
        rows: Sequence[Tokens],
        what: str,
        when: str,
        measure: Callable[[list[int]], list[tuple[float, int]]],
        model: PreTrainedModel,
    ) -> float:
        """Return the mean of a token, where `measure` returns the sum and the number of tokens of each row."""
        found = predict_rows(self.log, list(map(tokens_in, rows)), what, when, measure, model)
        total, tokens = map(sum, zip(*found, strict=True))
        return total / tokens


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
