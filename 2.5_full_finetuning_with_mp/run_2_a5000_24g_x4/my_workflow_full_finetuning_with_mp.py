"""Full fine-tuning with model parallel: one process, and the model's layers divided among its devices.

From this folder:
    python my_workflow_full_finetuning_with_mp.py
    python my_workflow_full_finetuning_with_mp.py --device_map even
    python my_workflow_full_finetuning_with_mp.py --device_map my_map.json

The notebook runs the same steps cell by cell. Against 2.4: (1) layers are placed before the model loads, so that no
device is fuller than it must be, (2) the model loads by that map, (3) a spy proves that every stage works.
"""

from my_utils_full_finetuning_with_mp import check_stages, custom_device_map, set_trained_layers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.inputs import check_inputs
from common.data.batches import longest_batch
from common.data.messages import tokenize_rows
from common.data.rows import Splits, Tokens
from common.data.splits import load_splits
from common.models.loading import load_base_model, load_tokenizer
from common.records.store import Record
from common.runtime.rank import rank_started
from common.runtime.recorder import RunLog
from common.tasks.answers import Evaluation, Judge, evaluate, independent_judges
from common.training.export import save_and_reload
from common.training.placement import Placement, place_stages, placement_table
from common.training.results import check_training, training_figures
from common.training.trainer import CountingTrainer, make_trainer

RUN = RunConfig(
    technique="full",
    parallel="mp",
    run_folder="2.5_full_finetuning_with_mp/run_2_a5000_24g_x4",
    device="cuda",
    gpu="RTX A5000 24GB",
    devices=4,
    model="Qwen/Qwen2.5-7B-Instruct",
    precision="bf16",
    per_device_train_batch_size=5,
    num_train_epochs=3,
    learning_rate=1e-5,
    per_device_eval_batch_size=8,
    gradient_checkpointing=True,
    use_reentrant=True,
)

Tokenizer = PreTrainedTokenizerBase
Figures = dict[str, object]


def load_data(log: RunLog) -> tuple[Tokenizer, Splits, list[Tokens]]:
    """Tokenizer, rows, and the training rows as tokens."""
    with log.phase("load data"):
        tokenizer, data = load_tokenizer(log.run), load_splits(log.run)
        return tokenizer, data, tokenize_rows(data.train, tokenizer, log.run.max_length)


def place(log: RunLog, train: list[Tokens]) -> Placement:
    """The device map (1), beside Accelerate's own and an even split."""
    with log.phase("place layers"):
        batch = longest_batch(train, log.run.per_device_train_batch_size)
        print(placement_table(log.run, batch, log.gpu()).to_string(index=False))
        return place_stages(log.run, batch, log.gpu())


def load(log: RunLog, placement: Placement) -> tuple[PreTrainedModel, Figures]:
    """The base model, each layer on its device (2), and what the spy saw (3)."""
    with log.phase("load model"):
        model = load_base_model(log.run, custom_device_map(log, placement))
        seen = check_stages(log, model, placement)
        if log.run.device == "cpu":
            print("on CPU there is one device: the map splits nothing here; its hooks and their order were checked")
        print(f"stages in the order of their work: {seen['order']}")
        return model, seen


def evaluate_before(log: RunLog, model: PreTrainedModel, tokenizer: Tokenizer, data: Splits) -> Evaluation:
    """The base's answers to the test questions, before it has seen an exhibit; the base also judges them."""
    with log.phase("baseline evaluation"):
        judges = [Judge("base", model, tokenizer), *independent_judges(log.run, log.rank.device)]
        return evaluate(model, tokenizer, data.test, judges, log, "before")


def build_trainer(
    log: RunLog, placement: Placement, model: PreTrainedModel, tokenizer: Tokenizer, train: list[Tokens], data: Splits
) -> CountingTrainer:
    """The layers to train, and the trainer of rows and model."""
    with log.phase("build trainer"):
        print(set_trained_layers(model, log.run).to_string(index=False))
        validation = tokenize_rows(data.validation, tokenizer, log.run.max_length)
        return make_trainer(model, tokenizer, train, validation, log, placement.plan)


def train_model(log: RunLog, trainer: CountingTrainer) -> Figures:
    """Train, take the checkpoint with the lowest validation loss, check what was done, and sum it up."""
    with log.phase("training"):
        trainer.train()
        world = check_training(trainer, log.rank)
    return training_figures(trainer, world, log)


def save(
    log: RunLog, placement: Placement, trainer: CountingTrainer, tokenizer: Tokenizer
) -> tuple[PreTrainedModel, dict[str, float]]:
    """Save the model, and load it again by the same map: equal logits, or the run fails."""
    with log.phase("save and reload"):
        return save_and_reload(log, trainer, tokenizer, custom_device_map(log, placement))


def evaluate_after(
    log: RunLog, placement: Placement, tuned: PreTrainedModel, tokenizer: Tokenizer, data: Splits
) -> Evaluation:
    """The tuned model's answers, judged by the base as before, by itself, and by an independent judge."""
    with log.phase("final evaluation"):
        base = load_base_model(log.run, custom_device_map(log, placement))
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
        tokenizer, data, train = load_data(log)
        placement = place(log, train)
        model, seen = load(log, placement)
        before = evaluate_before(log, model, tokenizer, data)
        trainer = build_trainer(log, placement, model, tokenizer, train, data)
        trained = train_model(log, trainer)
        tuned, differences = save(log, placement, trainer, tokenizer)
        after = evaluate_after(log, placement, tuned, tokenizer, data)
        figures = {"placement": placement.for_record(), "stages_seen": seen, "largest_logit_differences": differences}
        return record(log, before, after, **trained, **figures)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
