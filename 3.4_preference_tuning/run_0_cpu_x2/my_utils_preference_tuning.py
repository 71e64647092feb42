"""What only this folder needs: the reference, and a picture of the given answers' log-probabilities."""

from dataclasses import replace

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from transformers import PreTrainedModel

from common.data.rows import Splits
from common.data.splits import tokenized
from common.runtime.recorder import RunRecorder
from common.tasks.preferences import PreferenceEvaluation, with_reference
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
