"""LoRA fine-tuning on one device.

From this folder:
    python my_workflow_lora_finetuning.py
    python my_workflow_lora_finetuning.py --batch_size 8 --learning_rate 1e-4

The notebook runs the same steps cell by cell.
"""

from transformers import PreTrainedModel

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.inputs import check_inputs
from common.data.rows import Splits
from common.data.splits import tokens_of
from common.models.loading import add_lora
from common.records.store import Record
from common.runtime.rank import rank_started
from common.runtime.recorder import RunRecorder
from common.training.export import save_and_reload
from common.training.steps import Tokenizer, evaluate_after, evaluate_before, load, record, train
from common.training.trainer import AuditedTrainer, make_trainer

RUN = RunConfig(
    technique="lora",
    parallel="single",
    run_folder="2.1_lora_finetuning/run_1_a6000_48g_x1",
    device="cuda",
    gpu="RTX A6000 48GB",
    model="Qwen/Qwen2.5-7B-Instruct",
    precision="bf16",
    per_device_train_batch_size=14,
    num_train_epochs=3,
    learning_rate=1e-5,
    per_device_eval_batch_size=8,
    gradient_checkpointing=True,
    use_reentrant=True,
)


def build_trainer(log: RunRecorder, model: PreTrainedModel, tokenizer: Tokenizer, data: Splits) -> AuditedTrainer:
    """Put adapters on the frozen base, turn rows into tokens, and build the trainer of both."""
    with log.phase("build trainer"):
        rows, validation = (tokens_of(split, tokenizer, log.run) for split in (data.train, data.validation))
        return make_trainer(add_lora(model, log.run), tokenizer, rows, validation, log)


def merge(log: RunRecorder, trainer: AuditedTrainer, tokenizer: Tokenizer) -> tuple[PreTrainedModel, dict[str, float]]:
    """Save adapter and merged model, and load both again: equal logits, or the run fails."""
    with log.phase("merge and reload"):
        return save_and_reload(log, trainer, tokenizer)


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run."""
    with rank_started(run) as rank:
        check_inputs(run)
        log = RunRecorder(run, rank)
        model, tokenizer, data = load(log)
        before = evaluate_before(log, model, tokenizer, data)
        trainer = build_trainer(log, model, tokenizer, data)
        trained = train(log, trainer)
        tuned, differences = merge(log, trainer, tokenizer)
        after = evaluate_after(log, tuned, tokenizer, data)
        return record(log, before, after, **trained, largest_logit_differences=differences)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
