"""What the three workflows of this folder share: the run, its data, and what is trained."""

from dataclasses import replace

from common.base.run_config import RunConfig
from common.data.batches import longest_first, partition
from common.data.rows import Splits
from common.data.splits import load_splits, tokens_of
from common.data.texts import say_long_texts
from common.models.loading import load_tokenizer
from common.runtime.recorder import RunRecorder
from common.training.steps import Tokenizer
from common.training.strategy import Strategy
from common.training.trainer import AuditedTrainer, make_trainer

RUN = RunConfig(
    task="summarization",
    technique="full",
    parallel="ddp",
    run_folder="3.2_summarization/run_1_v100_16g_x4",
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


def run_with(loop: str) -> RunConfig:
    """Return this folder's run, by one of its three loops."""
    return replace(RUN, loop=loop, **(MACHINES if loop == "machines" else {}))


def load_data(log: RunRecorder) -> tuple[Tokenizer, Splits]:
    """Load tokenizer and rows, and print how many texts are too long, and how the rows are divided."""
    with log.phase("load data"):
        tokenizer, data = load_tokenizer(log.run), load_splits(log.run)
        if log.rank.is_main:
            sizes = f"{len(data.train):,} training, {len(data.validation):,} validation, {len(data.test):,} test rows"
            print(f"{sizes}; {say_long_texts(data.train, tokenizer, log.run)}")
        parts = partition(len(data.train), log.run.partition_count, log.run.seed)
        own = [len(part) for part in parts[log.rank.rank :: log.rank.world_size]]
        print(f"{len(data.train):,} rows in {len(parts)} partitions; this rank trains on {sum(own):,}")
        return tokenizer, data


def build(
    log: RunRecorder, tokenizer: Tokenizer, data: Splits, strategy: Strategy, trainer_class: type[AuditedTrainer]
) -> AuditedTrainer:
    """Load the whole model on every rank, and build what trains it on the rank's own rows."""
    with log.phase("build trainer"):
        model = strategy.load_model()
        rows, validation = (tokens_of(split, tokenizer, log.run) for split in (data.train, data.validation))
        validation = longest_first(validation)
        return make_trainer(model, tokenizer, rows, validation, log, strategy=strategy, trainer_class=trainer_class)
