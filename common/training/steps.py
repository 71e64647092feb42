"""Steps that the workflows share: load, evaluate before and after, train, save, and record."""

from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.data.row_checks import say_few_steps, say_once
from common.data.rows import Splits
from common.data.splits import load_splits, tokenized
from common.models.answering import load_answering, sharing_of
from common.models.loading import load_base_model, load_tokenizer, waiting_on_host
from common.models.shards import free_model
from common.planning.device_maps import whole_model_on
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.tasks.answers import Judge, evaluate, independent_judges
from common.tasks.forgetting import look_after, look_before
from common.training.export import (
    DeviceMap,
    save as save,  # a step, too
)
from common.training.loop import TrainingLoop
from common.training.results import check_training, count_steps, training_figures

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
    tokenizer: Tokenizer,
    data: Splits,
    score: Callable[..., Any] = evaluate,
    model: PreTrainedModel | None = None,
) -> Any:
    """Score what the base makes of the test rows before any training; None with `--baseline none`.

    `score`: the task's, say `classify`. Where answers are judged, it gets the base itself and an independent judge.
    Without a `model` the base is loaded for this step alone.
    """
    if log.run.baseline == "none":
        return None
    with log.phase("baseline evaluation"):
        base, judged_by = model or load_answering(log.run, log.rank), []
        if log.run.goal.is_judged:
            judged_by = [[Judge("base", base, tokenizer), *independent_judges(log.run, log.rank.device)]]
        look_before(log, base, tokenizer)
        found = score(base, tokenizer, data.test, *judged_by, log, "before")
        if model is None:
            free_model(base)
        return found


def sum_up(loop: TrainingLoop) -> Metrics:
    """Check and sum up what every rank did in training, for the record; on a CPU count the memory of a step."""
    with loop.log.phase("sum up"):
        world = check_training(loop)
        count_steps(loop)
        if loop.state.best_global_step == loop.state.global_step:
            say_once(say_few_steps(loop.log.data, loop.run))
        return training_figures(loop, world)


def evaluate_after(
    log: RunRecorder,
    tuned: PreTrainedModel,
    tokenizer: Tokenizer,
    data: Splits,
    score: Callable[..., Any] = evaluate,
    device_map: DeviceMap | None = None,
) -> Any:
    """Score what the tuned model makes of rows that had no part in training nor in choosing the checkpoint.

    `score`: the task's. Where answers are judged, it gets the tuned model itself, the base as before, and an
    independent judge. The base loads again (by `device_map`) while the tuned model waits in the host's memory, as a
    device holds one of them at a time; one in stages, whose answers are there, is freed.
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
        judged_by = [judges()] if log.run.goal.is_judged else []
        look_after(log, tuned)
        return score(tuned, tokenizer, data.test, *judged_by, log, "after")


def record(log: RunRecorder, before: Any, after: Any, **figures: object) -> Record:
    """Write the record of the run: what was asked, what the evaluations found, and all other `figures`."""
    found = {"before": before, "after": after}
    return log.complete(quality={when: each.summary() for when, each in found.items() if each}, **figures)
