"""LoRA fine-tuning on one device.

From this folder:
    python my_workflow_lora_finetuning.py
    python my_workflow_lora_finetuning.py --batch_size 8 --learning_rate 1e-4

The notebook runs the same steps cell by cell.
"""

from my_utils_lora_finetuning import device_map
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.inputs import check_inputs
from common.data.messages import tokenize_rows
from common.data.rows import Splits
from common.data.splits import load_splits
from common.models.loading import add_lora, load_base_model, load_tokenizer
from common.records.store import Record
from common.runtime.rank import rank_started
from common.runtime.recorder import RunLog
from common.tasks.answers import Evaluation, Judge, evaluate, independent_judges
from common.training.export import merge_and_reload
from common.training.results import check_training, training_figures
from common.training.trainer import CountingTrainer, make_trainer

RUN = RunConfig(
    technique="lora",
    parallel="single",
    run_folder="2.1_lora_finetuning/run_2_h200_141g_x1",
    device="cuda",
    gpu="H200 141GB",
    model="Qwen/Qwen2.5-7B-Instruct",
    precision="bf16",
    per_device_train_batch_size=14,
    num_train_epochs=3,
    learning_rate=1e-5,
    per_device_eval_batch_size=8,
    gradient_checkpointing=True,
    use_reentrant=True,
)

Tokenizer = PreTrainedTokenizerBase
Figures = dict[str, object]


def load(log: RunLog) -> tuple[PreTrainedModel, Tokenizer, Splits]:
    """The base model on this device, its tokenizer, and the rows."""
    with log.phase("load model and data"):
        return load_base_model(log.run, device_map(log.rank)), load_tokenizer(log.run), load_splits(log.run)


def evaluate_before(log: RunLog, model: PreTrainedModel, tokenizer: Tokenizer, data: Splits) -> Evaluation:
    """The base's answers to the test questions, before it has seen an exhibit; the base also judges them."""
    with log.phase("baseline evaluation"):
        judges = [Judge("base", model, tokenizer), *independent_judges(log.run, log.rank.device)]
        return evaluate(model, tokenizer, data.test, judges, log, "before")


def build_trainer(log: RunLog, model: PreTrainedModel, tokenizer: Tokenizer, data: Splits) -> CountingTrainer:
    """Adapters on the frozen base, rows as tokens, and the trainer of both."""
    with log.phase("build trainer"):
        train = tokenize_rows(data.train, tokenizer, log.run.max_length)
        validation = tokenize_rows(data.validation, tokenizer, log.run.max_length)
        return make_trainer(add_lora(model, log.run), tokenizer, train, validation, log)


def train(log: RunLog, trainer: CountingTrainer) -> Figures:
    """Train, take the checkpoint with the lowest validation loss, check what every rank did, and sum it up."""
    with log.phase("training"):
        trainer.train()
        world = check_training(trainer, log.rank)
    return training_figures(trainer, world, log)


def merge(log: RunLog, trainer: CountingTrainer, tokenizer: Tokenizer) -> tuple[PreTrainedModel, dict[str, float]]:
    """Save adapter and merged model, and load both again: equal logits, or the run fails."""
    with log.phase("merge and reload"):
        return merge_and_reload(log, trainer, tokenizer, device_map(log.rank))


def evaluate_after(log: RunLog, tuned: PreTrainedModel, tokenizer: Tokenizer, data: Splits) -> Evaluation:
    """The tuned model's answers, judged by the base as before, by itself, and by an independent judge."""
    with log.phase("final evaluation"):
        base = load_base_model(log.run, device_map(log.rank))
        judges = [Judge("base", base, tokenizer), Judge("tuned", tuned, tokenizer)]
        judges += independent_judges(log.run, log.rank.device)
        return evaluate(tuned, tokenizer, data.test, judges, log, "after")


def record(log: RunLog, before: Evaluation, after: Evaluation, **figures: object) -> Record:
    """The record of the run: what was asked, and all that was measured."""
    return log.complete(quality={"before": before.summary(), "after": after.summary()}, **figures)


def workflow(run: RunConfig) -> Record:
    """The whole run."""
    with rank_started(run) as rank:
        check_inputs(run)
        log = RunLog(run, rank)
        model, tokenizer, data = load(log)
        before = evaluate_before(log, model, tokenizer, data)
        trainer = build_trainer(log, model, tokenizer, data)
        trained = train(log, trainer)
        tuned, differences = merge(log, trainer, tokenizer)
        after = evaluate_after(log, tuned, tokenizer, data)
        return record(log, before, after, **trained, largest_logit_differences=differences)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
