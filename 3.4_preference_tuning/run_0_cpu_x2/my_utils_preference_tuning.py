"""What only this folder needs: the reference, the scores of answers beside the given ones, and a picture of these."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from transformers import PreTrainedModel

from common.data.pairs import encode_pairs
from common.data.rows import Row, Splits, answer_of, said_in
from common.data.splits import tokenized
from common.runtime.recorder import RunRecorder
from common.tasks.answers import answer_rows, report_evaluation
from common.tasks.preferences import LabelEvaluation, Pair, log_probs_of, scored, with_reference
from common.tasks.sampling import distinct_share
from common.training.steps import Tokenizer


def find_reference(log: RunRecorder, model: PreTrainedModel, tokenizer: Tokenizer, data: Splits) -> Splits:
    """Say how many weights are trained and where the reference is; in full fine-tuning find its log-probabilities.

    Returns:
        The pairs as tokens, in full fine-tuning with the log-probabilities that the model gives to both answers before
        training.
    """
    pairs = tokenized(data, tokenizer, log.run)
    trained, total = model.num_parameters(only_trainable=True), model.num_parameters()
    if log.run.method.has_adapters:
        reference = "this model with its adapters switched off"
    else:
        reference = "this model before its first step, whose log-probabilities of all answers are found now"
    if log.rank.is_main:
        print(f"trained: {trained:,} of {total:,} weights; the reference is {reference}")
    if log.run.method.has_adapters:
        return pairs
    with log.phase("reference"):
        train, validation = (
            with_reference(rows, model, tokenizer, log, which)
            for which, rows in (("training", pairs.train), ("validation", pairs.validation))
        )
        return replace(pairs, train=train, validation=validation)


@dataclass(frozen=True)
class PreferenceEvaluation(LabelEvaluation):
    """What a model answers to all prompts, and how likely it finds both given answers, and the reference did."""

    log_probs: list[Pair]
    reference_log_probs: list[Pair] | None  # None where this is the reference
    beta: float

    def __str__(self) -> str:
        written, found = super().__str__(), self.summary()
        if found["chosen_reward"] is None:
            return written
        return (
            f"{written}; of the given answers: accuracy of preferences {found['preference_accuracy']:.3f}, reward of "
            f"the chosen {found['chosen_reward']:+.2f}, margin {found['reward_margin']:.2f}"
        )

    def summary(self) -> dict[str, float | int | None]:
        """Return the metrics for the record; before training there are no rewards."""
        pairs = zip(self.log_probs, self.reference_log_probs, strict=True) if self.reference_log_probs else []
        rewards = [(self.beta * (now[0] - before[0]), self.beta * (now[1] - before[1])) for now, before in pairs]
        return {
            "preference_accuracy": _mean(chosen > rejected for chosen, rejected in rewards),
            "reward_margin": _mean(chosen - rejected for chosen, rejected in rewards),
            "chosen_reward": _mean(chosen for chosen, _ in rewards),
            "chosen_likelier_share": _mean(chosen > rejected for chosen, rejected in self.log_probs),
            **super().summary(),
        }


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None


def evaluate_preferences(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    rows: Sequence[Row],
    log: RunRecorder,
    when: str,
    reference: PreferenceEvaluation | None = None,
) -> PreferenceEvaluation:
    """As `answers.evaluate`, without judges: answer each prompt, and find how likely its two given answers are."""
    answers, _ = answer_rows(model, tokenizer, rows, log, when)
    log_probs = log_probs_of(model, tokenizer, encode_pairs(list(rows), tokenizer), log, "pairs", when)
    answered = [
        {
            **scored(number, row, answer),
            "chosen": answer_of(row),
            "rejected": said_in(row["rejected"][0]),
            "chosen_log_prob": chosen,
            "rejected_log_prob": rejected,
        }
        for number, (row, answer, (chosen, rejected)) in enumerate(zip(rows, answers, log_probs, strict=True))
    ]
    distinct, of_reference = distinct_share(model, tokenizer, rows, log, when), reference and reference.log_probs
    evaluation = PreferenceEvaluation(answered, distinct, log_probs, of_reference, log.run.beta)
    report_evaluation(evaluation, rows, log, when)
    return evaluation


def draw_log_probs(log: RunRecorder, before: PreferenceEvaluation, after: PreferenceEvaluation) -> Figure | None:
    """Draw how likely both given answers were before and are after, and write it into the results folder; on rank 0."""
    if not log.rank.is_main:
        return None
    evaluations = {"before tuning": before, "after tuning": after}
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True, layout="constrained")
    for number, (axis, answer) in enumerate(zip(axes, ("chosen", "rejected"), strict=True)):
        values = {when: [pair[number] for pair in each.log_probs] for when, each in evaluations.items()}
        lowest, highest = min(map(min, values.values())), max(map(max, values.values()))
        for when, each in values.items():
            axis.hist(each, bins=30, range=(lowest, highest), alpha=0.6, label=when)
        axis.set(title=f"{answer} answers", xlabel="log-probability (nats)")
        axis.locator_params(axis="x", nbins=5)
    axes[0].set_ylabel("test pairs")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    figure.savefig(log.folder / "log_probs.png", dpi=100)
    return figure
