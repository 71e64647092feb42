"""LoRA fine-tuning with DDP: one process on each device, every one with the whole model.

From this folder:
    torchrun --standalone --nproc_per_node 2 my_workflow_lora_finetuning_with_ddp.py
    torchrun --standalone --nproc_per_node 2 my_workflow_lora_finetuning_with_ddp.py --batch_size 16
    accelerate launch --config_file my_accelerate_config.yaml my_workflow_lora_finetuning_with_ddp.py

Against 2.1: (1) ranks start and are counted, (2) the model sits on its rank's device, (3) gradient checkpointing is
non-reentrant, (4) the machine's ceiling is measured beside the speed-up.
"""

from my_utils_lora_finetuning_with_ddp import device_map
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
from common.training.ceiling import measure_machine_ceiling
from common.training.export import merge_and_reload
from common.training.results import check_training, training_figures
from common.training.trainer import CountingTrainer, make_trainer

RUN = RunConfig(
    technique="lora",
    parallel="ddp",  # (1)
    run_folder="2.2_lora_finetuning_with_ddp/run_1_a6000_48g_x2",
    device="cuda",
    gpu="RTX A6000 48GB",
    devices=2,
    model="Qwen/Qwen2.5-7B-Instruct",
    precision="bf16",
    per_device_train_batch_size=14,
    num_train_epochs=3,
    learning_rate=1e-5,
    per_device_eval_batch_size=8,
    gradient_checkpointing=True,  # (3)
)

Tokenizer = PreTrainedTokenizerBase
Figures = dict[str, object]


def load(log: RunLog) -> tuple[PreTrainedModel, Tokenizer, Splits]:
    """The base model on this rank's device (2), its tokenizer, and the rows."""
    with log.phase("load model and data"):
        return load_base_model(log.run, device_map(log.rank)), load_tokenizer(log.run), load_splits(log.run)


def evaluate_before(log: RunLog, model: PreTrainedModel, tokenizer: Tokenizer, data: Splits) -> Evaluation:
    """The base's answers, each rank to its share of the questions, before the base has seen an exhibit."""
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


def measure_ceiling(log: RunLog, trainer: CountingTrainer) -> dict[str, float] | None:
    """What a speed-up on this machine can be at most (4); on CPU only, as one GPU may not hold the global batch."""
    if log.run.device == "cuda":
        return None
    with log.phase("machine ceiling"):
        return measure_machine_ceiling(trainer, log.rank)


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
    """The whole run, on this rank."""
    with rank_started(run) as rank:
        check_inputs(run)
        log = RunLog(run, rank)
        model, tokenizer, data = load(log)
        before = evaluate_before(log, model, tokenizer, data)
        trainer = build_trainer(log, model, tokenizer, data)
        trained = train(log, trainer)
        ceiling = measure_ceiling(log, trainer)
        tuned, differences = merge(log, trainer, tokenizer)
        after = evaluate_after(log, tuned, tokenizer, data)
        return record(log, before, after, **trained, largest_logit_differences=differences, machine_ceiling=ceiling)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
