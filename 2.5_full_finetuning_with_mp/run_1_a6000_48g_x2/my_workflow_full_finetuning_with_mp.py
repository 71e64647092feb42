"""Full fine-tuning with model parallel: one process, and the model's layers divided among its devices.

From this folder:
    python my_workflow_full_finetuning_with_mp.py
    python my_workflow_full_finetuning_with_mp.py --device_map even
    python my_workflow_full_finetuning_with_mp.py --device_map my_map.json

The notebook runs the same steps cell by cell. Against 2.4: (1) layers are placed before the model loads, so that no
device is fuller than it must be, (2) the model loads by that map, (3) a spy proves that every stage works.
"""

from collections.abc import Sequence

from my_utils_full_finetuning_with_mp import check_stages, custom_device_map, set_trained_layers
from transformers import PreTrainedModel

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.run_start import run_started
from common.data.batches import longest_batch
from common.data.rows import Splits, Tokens
from common.data.splits import tokens_of
from common.models.loading import load_base_model
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.models.placement import Placement, place_stages, placement_table
from common.training.steps import (
    Metrics,
    Tokenizer,
    evaluate_after,
    evaluate_before,
    load_data,
    record,
    save,
    train,
)
from common.training.trainer import AuditedTrainer, make_trainer

RUN = RunConfig(
    technique="full",
    parallel="mp",
    run_folder="2.5_full_finetuning_with_mp/run_1_a6000_48g_x2",
    device="cuda",
    gpu="RTX A6000 48GB",
    devices=2,
    model="Qwen/Qwen2.5-7B-Instruct",
    precision="bf16",
    max_length=1024,  # tokens; longer rows are truncated
    per_device_train_batch_size=8,
    num_train_epochs=3,
    learning_rate=1e-5,
    per_device_eval_batch_size=8,
    gradient_checkpointing=True,  # without it rows of 1,024 tokens fill the card (45.7 of 47.4 GiB)
    use_reentrant=True,  # as in the published runs
)


def place(log: RunRecorder, rows: Sequence[Tokens]) -> Placement:
    """Compute the device map (1), and print it beside Accelerate's own and an even split."""
    with log.phase("place layers"):
        batch = longest_batch(rows, log.run.per_device_train_batch_size, log.run)
        print(placement_table(log.run, batch, log.gpu()).to_string(index=False))
        return place_stages(log.run, batch, log.gpu())


def load(log: RunRecorder, placement: Placement) -> tuple[PreTrainedModel, Metrics]:
    """Load the base model, each layer on its device (2), and return what the spy saw (3), too."""
    with log.phase("load model"):
        model = load_base_model(log.run, custom_device_map(log, placement))
        seen = check_stages(log, model, placement)
        if log.run.device == "cpu":
            print("on CPU there is one device: the map splits nothing here; its hooks and their order were checked")
        print(f"stages in the order of their work: {seen['order']}")
        return model, seen


def build_trainer(
    log: RunRecorder,
    placement: Placement,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    rows: Sequence[Tokens],
    data: Splits,
) -> AuditedTrainer:
    """Switch on the layers to train, and build the trainer of rows and model."""
    with log.phase("build trainer"):
        print(set_trained_layers(model, log.run).to_string(index=False))
        validation = tokens_of(data.validation, tokenizer, log.run)
        return make_trainer(model, tokenizer, rows, validation, log, placement.plan)


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run."""
    with run_started(run) as log:
        tokenizer, data, rows = load_data(log)
        placement = place(log, rows)
        model, seen = load(log, placement)
        before = evaluate_before(log, model, tokenizer, data)
        trainer = build_trainer(log, placement, model, tokenizer, rows, data)
        trained = train(log, trainer)
        tuned, differences = save(log, trainer, tokenizer, custom_device_map(log, placement))
        after = evaluate_after(log, tuned, tokenizer, data, custom_device_map(log, placement))
        figures = {"placement": placement.for_record(), "stages_seen": seen, "largest_logit_differences": differences}
        return record(log, before, after, **trained, **figures)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
