"""Full fine-tuning with sharding: ranks share the rows as with DDP, and divide what each of them would hold.

From this folder:
    torchrun --standalone --nproc_per_node 2 my_workflow_full_finetuning_with_fsdp.py
    torchrun --standalone --nproc_per_node 2 my_workflow_full_finetuning_with_fsdp.py --technique lora
    torchrun --standalone --nproc_per_node 2 my_workflow_full_finetuning_with_fsdp.py --parallel zero3

Against 2.4: (1) ranks start and are counted, (2) each holds its part of weights, gradients and optimizer states,
(3) the effective batch grows with the ranks, and the learning rate with the square root of that, (4) checkpoints have a
part of every rank, (5) at the end the parts become one model, (6) the machine's ceiling is measured beside it.
"""

from my_utils_full_finetuning_with_fsdp import held_table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.inputs import check_inputs
from common.data.rows import Splits
from common.data.splits import load_splits, tokens_of
from common.models.loading import load_base_model, load_tokenizer
from common.planning.device_maps import whole_model_on
from common.records.store import Record
from common.runtime.rank import rank_started
from common.runtime.recorder import RunRecorder
from common.tasks.answers import Evaluation, Judge, evaluate, independent_judges
from common.training.ceiling import measure_machine_ceiling
from common.training.ddp import Ddp
from common.training.export import save_and_reload
from common.training.loop import LoopTrainer
from common.training.results import check_training, training_metrics
from common.training.strategy import as_computed, strategy_class, whole_model_to_train
from common.training.trainer import make_trainer

RUN = RunConfig(
    technique="full",
    parallel="zero3",  # (1) the stage
    run_folder="2.6_full_finetuning_with_fsdp/run_3_a100_80g_x2_zero",
    device="cuda",
    gpu="A100 80GB SXM",
    devices=2,
    model="Qwen/Qwen2.5-7B-Instruct",
    precision="bf16",
    per_device_train_batch_size=8,
    num_train_epochs=3,
    learning_rate=1e-5,
    learning_rate_scaling="sqrt",  # (3)
    per_device_eval_batch_size=8,
    gradient_checkpointing=True,
)

Tokenizer = PreTrainedTokenizerBase
Metrics = dict[str, object]


def load_data(log: RunRecorder) -> tuple[Tokenizer, Splits]:
    """Tokenizer and rows."""
    with log.phase("load data"):
        return load_tokenizer(log.run), load_splits(log.run)


def evaluate_before(log: RunRecorder, tokenizer: Tokenizer, data: Splits) -> Evaluation:
    """The base's answers, each rank to its share of the questions, with the whole model: no gradients are needed."""
    with log.phase("baseline evaluation"):
        base = load_base_model(as_computed(log.run), whole_model_on(log.rank.device))
        judges = [Judge("base", base, tokenizer), *independent_judges(log.run, log.rank.device)]
        return evaluate(base, tokenizer, data.test, judges, log, "before")


def build_trainer(log: RunRecorder, tokenizer: Tokenizer, data: Splits) -> LoopTrainer:
    """This rank's part of the model (2), rows as tokens, and the trainer of both."""
    with log.phase("build trainer"):
        train = tokens_of(data.train, tokenizer, log.run)
        validation = tokens_of(data.validation, tokenizer, log.run)
        makes_strategy = Ddp if log.run.parallelism.replicates else strategy_class(log.run)  # DDP in the same loop
        strategy = makes_strategy(log.run, log.rank)
        model = strategy.load_model()
        return make_trainer(model, tokenizer, train, validation, log, strategy=strategy, trainer_class=LoopTrainer)


def train(log: RunRecorder, trainer: LoopTrainer) -> Metrics:
    """Train, take the checkpoint with the lowest validation loss (4), check what every rank did, and sum it up."""
    with log.phase("training"):
        trainer.train()
        world = check_training(trainer, log.rank)
    figures = {**training_metrics(trainer, world, log), **trainer.strategy.for_record()}
    if log.rank.is_main and figures["held"]:
        print(held_table(figures["held"]).to_string())
    return figures


def save(log: RunRecorder, trainer: LoopTrainer, tokenizer: Tokenizer) -> tuple[PreTrainedModel, dict[str, float]]:
    """Gather the parts into one model (5), and load it as any user would: the same logits, or the run fails."""
    with log.phase("save and reload"):
        return save_and_reload(log, trainer, tokenizer)


def measure_ceiling(log: RunRecorder, trainer: LoopTrainer) -> dict[str, float] | None:
    """What a speed-up on this machine can be at most (6); on CPU only, as one GPU may not hold the whole model."""
    if log.run.device == "cuda":
        return None
    with log.phase("machine ceiling"):
        whole = whole_model_to_train(log.run, whole_model_on(log.rank.device))
        return measure_machine_ceiling(trainer, log.rank, whole)


def evaluate_after(log: RunRecorder, tuned: PreTrainedModel, tokenizer: Tokenizer, data: Splits) -> Evaluation:
    """The tuned model's answers, judged by the base as before, by itself, and by an independent judge."""
    with log.phase("final evaluation"):
        base = load_base_model(as_computed(log.run), whole_model_on(log.rank.device))
        judges = [Judge("base", base, tokenizer), Judge("tuned", tuned, tokenizer)]
        judges += independent_judges(log.run, log.rank.device)
        return evaluate(tuned, tokenizer, data.test, judges, log, "after")


def record(log: RunRecorder, before: Evaluation, after: Evaluation, **figures: object) -> Record:
    """The record of the run: what was asked, and all that was measured."""
    return log.complete(quality={"before": before.summary(), "after": after.summary()}, **figures)


def workflow(run: RunConfig) -> Record:
    """The whole run, on this rank."""
    with rank_started(run) as rank:
        check_inputs(run)
        log = RunRecorder(run, rank)
        tokenizer, data = load_data(log)
        before = evaluate_before(log, tokenizer, data)
        trainer = build_trainer(log, tokenizer, data)
        trained = train(log, trainer)
        tuned, differences = save(log, trainer, tokenizer)
        ceiling = measure_ceiling(log, trainer)
        after = evaluate_after(log, tuned, tokenizer, data)
        return record(log, before, after, **trained, largest_logit_differences=differences, machine_ceiling=ceiling)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
