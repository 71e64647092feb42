"""What the three workflows of this folder share: the run, and all steps but training."""

from dataclasses import replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base.run_config import RunConfig
from common.data.batches import partition
from common.data.rows import Splits
from common.data.splits import load_splits, tokens_of
from common.data.texts import say_long_texts
from common.models.loading import load_base_model, load_tokenizer
from common.planning.device_maps import whole_model_on
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.tasks.summarization import Summaries, summarize
from common.training.export import save_and_reload
from common.training.results import check_training, training_metrics
from common.training.strategy import Strategy
from common.training.trainer import AuditedTrainer, make_trainer

RUN = RunConfig(
    task="summarization",
    technique="full",
    parallel="ddp",
    loop="machines",
    run_folder="3.2_summarization/run_2_machines_x4",
    device="cuda",
    gpu="V100 16GB SXM",
    devices=4,
    model="facebook/bart-large-cnn",
    data="knkarthick/samsum",
    text_column="dialogue",
    target_modules="all",
    max_length=1024,
    max_target_length=128,
    empty_rows="skip",
    max_new_tokens=128,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    num_train_epochs=1,
    learning_rate=5e-5,
    warmup_steps=0.1,
    max_grad_norm=1.0,
    eval_steps=0.25,
    per_device_eval_batch_size=8,
)
MACHINES = {}

Tokenizer = PreTrainedTokenizerBase
Metrics = dict[str, object]


def run_with(loop: str) -> RunConfig:
    """This folder's run, by one of the three ways to write its loop."""
    return replace(RUN, loop=loop, **(MACHINES if loop == "machines" else {}))


def load_data(log: RunRecorder) -> tuple[Tokenizer, Splits]:
    """Tokenizer and rows; how many texts are too long, and how the rows are divided, is said."""
    with log.phase("load data"):
        tokenizer, data = load_tokenizer(log.run), load_splits(log.run)
        if log.rank.is_main:
            sizes = f"{len(data.train):,} training, {len(data.validation):,} validation, {len(data.test):,} test rows"
            print(f"{sizes}; {say_long_texts(data.train, tokenizer, log.run)}")
        parts = partition(len(data.train), log.run.partition_count, log.run.seed)
        own = [len(part) for part in parts[log.rank.rank :: log.rank.world_size]]
        print(f"{len(data.train):,} rows in {len(parts)} partitions; this rank trains on {sum(own):,}")
        return tokenizer, data


def evaluate_before(log: RunRecorder, tokenizer: Tokenizer, data: Splits) -> Summaries:
    """What the base writes: an embedded one notes in catchwords, BART-large-CNN sums up as a newspaper would."""
    with log.phase("baseline evaluation"):
        base = load_base_model(log.run, whole_model_on(log.rank.device))
        return summarize(base, tokenizer, data.test, log, "before")


def build(
    log: RunRecorder, tokenizer: Tokenizer, data: Splits, strategy: Strategy, trainer_class: type[AuditedTrainer]
) -> AuditedTrainer:
    """The whole model on every rank, and what trains it on the rank's own rows."""
    with log.phase("build trainer"):
        model = strategy.load_model()
        train, validation = (tokens_of(rows, tokenizer, log.run) for rows in (data.train, data.validation))
        validation.sort(key=lambda row: -len(row["input_ids"]))  # batches with little padding
        return make_trainer(model, tokenizer, train, validation, log, strategy=strategy, trainer_class=trainer_class)


def figures_of(log: RunRecorder, trainer: AuditedTrainer) -> Metrics:
    """Return the metrics of training, after a check of what every rank did; called on every rank."""
    return training_metrics(trainer, check_training(trainer, log.rank), log)


def save(log: RunRecorder, trainer: AuditedTrainer, tokenizer: Tokenizer) -> tuple[PreTrainedModel, dict[str, float]]:
    """Save the model and load it as any user would: equal logits, or the run fails."""
    with log.phase("save and reload"):
        return save_and_reload(log, trainer, tokenizer)


def evaluate_after(log: RunRecorder, tuned: PreTrainedModel, tokenizer: Tokenizer, data: Splits) -> Summaries:
    """What the tuned model writes about chats that had no part in training nor in choosing the checkpoint."""
    with log.phase("final evaluation"):
        return summarize(tuned, tokenizer, data.test, log, "after")


def record(log: RunRecorder, before: Summaries, after: Summaries, **figures: object) -> Record:
    """The record of the run: what was asked, and all that was measured."""
    return log.complete(quality={"before": before.summary(), "after": after.summary()}, **figures)
