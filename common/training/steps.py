"""Steps that the workflows share: load, evaluate before and after, train, save, and record."""

from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.data.rows import Splits
from common.data.splits import load_splits, tokenized
from common.models.answering import load_answering, sharing_of
from common.models.freeing import free_model
from common.models.loading import load_base_model, load_tokenizer, waiting_on_host
from common.planning.device_maps import whole_model_on
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.tasks.answers import Evaluation, Judge, evaluate, independent_judges
from common.training.counted_steps import count_steps
from common.training.export import DeviceMap
from common.training.export import save as save  # a step, too
from common.training.loop import TrainingLoop
from common.training.results import check_training, training_figures

Tokenizer = PreTrainedTokenizerBase
Metrics = dict[str, object]


def load(log: RunRecorder, device_map: DeviceMap | None = None) -> tuple[PreTrainedModel, Tokenizer, Splits]:
    """Load the base model (with qlora quantized as it is read) on this rank's device, its tokenizer, and the rows."""
    with log.phase("load model and data"):
        base = load_base_model(log.run, device_map or whole_model_on(log.rank.device))
        return base, load_tokenizer(log.run), load_splits(log.run)


def load_data(log: RunRecorder) -> tuple[Tokenizer, Splits]:
    """Load tokenizer and rows, and turn those of training and validation into tokens, where no model is needed yet."""
    with log.phase("load data"):
        tokenizer = load_tokenizer(log.run)
        return tokenizer, tokenized(load_splits(log.run), tokenizer, log.run)


def evaluate_before(
    log: RunRecorder,
    model: PreTrainedModel | None,
    tokenizer: Tokenizer,
    data: Splits,
    score: Callable[..., Evaluation] = evaluate,
) -> Evaluation | None:
    """Evaluate the base's answers to the test questions before any training; None with `--baseline none`.

    `score`: what a task does with them (with pictures `evaluate_looking`). The base also judges them, beside an
    independent judge. Without a `model` the base is loaded for this step alone: `load_answering`.
    """

    def judged(base: PreTrainedModel, tokenizer: Tokenizer, questions: Any, *about: Any) -> Evaluation:
        judges = [Judge("base", base, tokenizer), *independent_judges(log.run, log.rank.device)]
        return score(base, tokenizer, questions, judges, *about)

    return score_before(log, tokenizer, data, judged, model)


def sum_up(loop: TrainingLoop) -> Metrics:
    """Check and sum up what every rank did in training, for the record; on a CPU count the memory of a step."""
    with loop.log.phase("sum up"):
        world = check_training(loop)
        count_steps(loop)
        return training_figures(loop, world)


def evaluate_after(
    log: RunRecorder,
    tuned: PreTrainedModel,
    tokenizer: Tokenizer,
    data: Splits,
    device_map: DeviceMap | None = None,
    score: Callable[..., Evaluation] = evaluate,
) -> Evaluation:
    """Evaluate the tuned model's answers, judged by itself, by the base as before, and by an independent judge.

    The base loads again, by `device_map` where that says where. Meanwhile the tuned model waits in the host's memory,
    so that a device holds one of them at a time; one in stages, whose answers are there, is freed.
    """

    def judges() -> Iterator[Judge]:
        yield Judge("tuned", tuned, tokenizer)
        if sharing_of(tuned, log.rank).stages > 1:
            free_model(tuned)
        with waiting_on_host(tuned):
            base = load_answering(log.run, log.rank, device_map=device_map)
            yield Judge("base", base, tokenizer)
            free_model(base)
        yield from independent_judges(log.run, log.rank.device)

    with log.phase("final evaluation"):
        return score(tuned, tokenizer, data.test, judges(), log, "after")


def score_before(
    log: RunRecorder,
    tokenizer: Tokenizer,
    data: Splits,
    score: Callable[..., Any],
    model: PreTrainedModel | None = None,
) -> Any:
    """Score what the base finds in the test rows before any training; None with `--baseline none`.

    `score`: the task's, say `classify`. Without a `model` the base is loaded for this step alone: `load_answering`.
    """
    if log.run.baseline == "none":
        return None
    with log.phase("baseline evaluation"):
        base = model or load_answering(log.run, log.rank)
        found = score(base, tokenizer, data.test, log, "before")
        if model is None:
            free_model(base)
        return found


def score_after(
    log: RunRecorder, tuned: PreTrainedModel, tokenizer: Tokenizer, data: Splits, score: Callable[..., Any]
) -> Any:
    """Score what the tuned model finds in rows that had no part in training nor in choosing the checkpoint."""
    with log.phase("final evaluation"):
        return score(tuned, tokenizer, data.test, log, "after")


def record(log: RunRecorder, before: Any, after: Any, **figures: object) -> Record:
    """Write the record of the run: what was asked, what the evaluations found, and all other `figures`."""
    found = {"before": before, "after": after}
    return log.complete(quality={when: each.summary() for when, each in found.items() if each}, **figures)
