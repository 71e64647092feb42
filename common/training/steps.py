"""Steps that the workflows of chat models share: load, evaluate before and after, train, and record."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.data.rows import Splits
from common.data.splits import load_splits
from common.models.loading import load_base_model, load_tokenizer
from common.planning.device_maps import whole_model_on
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.tasks.answers import Evaluation, Judge, evaluate, independent_judges
from common.training.results import check_training, training_metrics
from common.training.trainer import AuditedTrainer

Tokenizer = PreTrainedTokenizerBase
Metrics = dict[str, object]


def load(log: RunRecorder) -> tuple[PreTrainedModel, Tokenizer, Splits]:
    """Load the base model (with qlora quantized as it is read) on this rank's device, its tokenizer, and the rows."""
    with log.phase("load model and data"):
        base = load_base_model(log.run, whole_model_on(log.rank.device))
        return base, load_tokenizer(log.run), load_splits(log.run)


def evaluate_before(log: RunRecorder, model: PreTrainedModel, tokenizer: Tokenizer, data: Splits) -> Evaluation:
    """Evaluate the base's answers to the test questions, each rank's to its share of them, before any training.

    The base also judges them, beside an independent judge.
    """
    with log.phase("baseline evaluation"):
        judges = [Judge("base", model, tokenizer), *independent_judges(log.run, log.rank.device)]
        return evaluate(model, tokenizer, data.test, judges, log, "before")


def train(log: RunRecorder, trainer: AuditedTrainer) -> Metrics:
    """Train, take the checkpoint with the lowest validation loss, check what every rank did, and sum it up."""
    with log.phase("training"):
        trainer.train()
        world = check_training(trainer, log.rank)
    return training_metrics(trainer, world, log)


def evaluate_after(
    log: RunRecorder,
    tuned: PreTrainedModel,
    tokenizer: Tokenizer,
    data: Splits,
    device_map: dict[str, str | int] | None = None,
) -> Evaluation:
    """Evaluate the tuned model's answers, judged by the base as before, by itself, and by an independent judge.

    The base loads again, by `device_map` where it is not to be on this rank's device.
    """
    with log.phase("final evaluation"):
        base = load_base_model(log.run, device_map or whole_model_on(log.rank.device))
        judges = [
            Judge("base", base, tokenizer),
            Judge("tuned", tuned, tokenizer),
            *independent_judges(log.run, log.rank.device),
        ]
        return evaluate(tuned, tokenizer, data.test, judges, log, "after")


def record(log: RunRecorder, before: Evaluation, after: Evaluation, **figures: object) -> Record:
    """Write the record of the run: what was asked, and all that was measured."""
    return log.complete(quality={"before": before.summary(), "after": after.summary()}, **figures)
