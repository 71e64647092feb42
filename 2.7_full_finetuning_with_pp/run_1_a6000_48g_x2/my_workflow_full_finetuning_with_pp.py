"""Full fine-tuning with pipeline parallel: each rank holds a stage of the model, and micro-batches keep all busy.

From this folder:
    torchrun --standalone --nproc_per_node 2 my_workflow_full_finetuning_with_pp.py
    torchrun --standalone --nproc_per_node 2 my_workflow_full_finetuning_with_pp.py --schedule gpipe
    torchrun --standalone --nproc_per_node 2 my_workflow_full_finetuning_with_pp.py --technique lora

Against 2.4: (1) layers are placed before anything is loaded, (2) a rank loads its stage only, (3) the trainer's step is
a schedule of micro-batches, (4) what the pipeline brings is measured, (5) the stages are saved as one model.
"""

from my_utils_full_finetuning_with_pp import stage_table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.inputs import check_inputs
from common.data.batches import longest_batch
from common.data.rows import Splits, Tokens
from common.data.splits import load_splits, tokens_of
from common.models.loading import load_base_model, load_tokenizer
from common.planning.device_maps import whole_model_on
from common.records.store import Record
from common.runtime.rank import rank_started
from common.runtime.recorder import RunRecorder
from common.tasks.answers import Evaluation, Judge, evaluate, independent_judges
from common.training.export import save_and_reload
from common.training.loop import LoopTrainer
from common.training.pipeline_measure import measure_pipeline
from common.training.placement import Placement, place_stages
from common.training.results import check_training, training_metrics
from common.training.strategy import strategy_class
from common.training.trainer import make_trainer

RUN = RunConfig(
    technique="full",
    parallel="pp",
    run_folder="2.7_full_finetuning_with_pp/run_1_a6000_48g_x2",
    device="cuda",
    gpu="RTX A6000 48GB",
    devices=2,
    micro_batches=8,
    model="Qwen/Qwen2.5-7B-Instruct",
    precision="bf16",
    per_device_train_batch_size=8,
    num_train_epochs=3,
    learning_rate=1e-5,
    per_device_eval_batch_size=8,
    gradient_checkpointing=True,
)

Tokenizer = PreTrainedTokenizerBase
Metrics = dict[str, object]


def load_data(log: RunRecorder) -> tuple[Tokenizer, Splits, list[Tokens]]:
    """Tokenizer, rows, and the training rows as tokens."""
    with log.phase("load data"):
        tokenizer, data = load_tokenizer(log.run), load_splits(log.run)
        return tokenizer, data, tokens_of(data.train, tokenizer, log.run)


def place(log: RunRecorder, train: list[Tokens]) -> Placement:
    """Which stage holds which layers (1), so that no device is fuller than it must be in training."""
    with log.phase("place layers"):
        placement = place_stages(log.run, longest_batch(train, log.run.per_device_train_batch_size), log.gpu())
        if log.rank.is_main:
            print(stage_table(placement).to_string(index=False))
        return placement


def evaluate_before(log: RunRecorder, tokenizer: Tokenizer, data: Splits) -> Evaluation:
    """The base's answers, each rank to its share of the questions, with the whole model: no gradients are needed."""
    with log.phase("baseline evaluation"):
        base = load_base_model(log.run, whole_model_on(log.rank.device))
        judges = [Judge("base", base, tokenizer), *independent_judges(log.run, log.rank.device)]
        return evaluate(base, tokenizer, data.test, judges, log, "before")


def build_trainer(
    log: RunRecorder, placement: Placement, tokenizer: Tokenizer, train: list[Tokens], data: Splits
) -> LoopTrainer:
    """This rank's stage (2), its schedules (3), and the trainer of both."""
    with log.phase("build trainer"):
        strategy = strategy_class(log.run)(log.run, log.rank)
        stage = strategy.load_model(placement.stage_map)
        validation = tokens_of(data.validation, tokenizer, log.run)
        return make_trainer(stage, tokenizer, train, validation, log, placement.plan, strategy, LoopTrainer)


def train_stages(log: RunRecorder, trainer: LoopTrainer) -> Metrics:
    """Train, take the checkpoint with the lowest validation loss, check what every stage did, and sum it up."""
    with log.phase("training"):
        trainer.train()
        world = check_training(trainer, log.rank)
    return {**training_metrics(trainer, world, log), **trainer.strategy.for_record()}


def measure(log: RunRecorder, trainer: LoopTrainer) -> Metrics | None:
    """GPipe and 1F1B against naive model parallel, and where the rest goes (4); on CPU only, for a GPU's memory."""
    if log.run.device == "cuda":
        return None
    with log.phase("measure the pipeline"):
        return measure_pipeline(trainer, tell=print)


def save(log: RunRecorder, trainer: LoopTrainer, tokenizer: Tokenizer) -> tuple[PreTrainedModel, dict[str, float]]:
    """Save the stages as one model (5), and load it as any user would: the pipeline's logits, or the run fails."""
    with log.phase("save and reload"):
        return save_and_reload(log, trainer, tokenizer)


def evaluate_after(log: RunRecorder, tuned: PreTrainedModel, tokenizer: Tokenizer, data: Splits) -> Evaluation:
    """The tuned model's answers, judged by the base as before, by itself, and by an independent judge."""
    with log.phase("final evaluation"):
        base = load_base_model(log.run, whole_model_on(log.rank.device))
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
        tokenizer, data, train = load_data(log)
        placement = place(log, train)
        before = evaluate_before(log, tokenizer, data)
        trainer = build_trainer(log, placement, tokenizer, train, data)
        trained = train_stages(log, trainer)
        pipeline = measure(log, trainer)
        tuned, differences = save(log, trainer, tokenizer)
        after = evaluate_after(log, tuned, tokenizer, data)
        figures = {"placement": placement.for_record(), "pipeline": pipeline, "largest_logit_differences": differences}
        return record(log, before, after, **trained, **figures)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
