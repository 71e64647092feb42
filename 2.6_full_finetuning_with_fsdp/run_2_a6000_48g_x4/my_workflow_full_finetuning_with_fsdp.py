r"""Full fine-tuning with sharding: ranks share the rows as with DDP, and divide what each of them would hold.

From this folder:
    torchrun --nproc_per_node 4 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_full_finetuning_with_fsdp.py
    torchrun --nproc_per_node 4 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_full_finetuning_with_fsdp.py --technique lora

Against 2.4: (1) ranks start and are counted, (2) each holds its part of weights, gradients and optimizer states,
(3) the effective batch grows with the ranks, and the learning rate with the square root of that, (4) checkpoints have a
part of every rank, (5) at the end the parts become one model, (6) the machine's ceiling is measured beside it.
"""

from collections.abc import Sequence
from typing import Any

from my_utils_full_finetuning_with_fsdp import held_table

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.run_start import run_started
from common.data.rows import Splits, Tokens
from common.data.splits import tokens_of
from common.planning.device_maps import whole_model_on
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.training.ceiling import can_measure_ceiling, measure_machine_ceiling
from common.training.ddp import Ddp
from common.training.loop import LoopTrainer
from common.training.steps import Metrics, Tokenizer, evaluate_after, evaluate_before, load_data, record, save, train
from common.training.strategy import strategy_class, whole_model_to_train
from common.training.trainer import make_trainer

RUN = RunConfig(
    technique="full",
    parallel="fsdp",  # (1)
    run_folder="2.6_full_finetuning_with_fsdp/run_2_a6000_48g_x4",
    device="cuda",
    gpu="RTX A6000 48GB",
    devices=4,
    model="Qwen/Qwen2.5-7B-Instruct",
    precision="bf16-mixed",
    max_length=1024,  # tokens; longer rows are truncated
    per_device_train_batch_size=8,
    num_train_epochs=3,
    learning_rate=1e-5,
    learning_rate_scaling="sqrt",  # (3)
    per_device_eval_batch_size=8,
    gradient_checkpointing=True,  # without it rows of 1,024 tokens do not fit
)


def build_trainer(log: RunRecorder, tokenizer: Tokenizer, rows: Sequence[Tokens], data: Splits) -> LoopTrainer:
    """Load this rank's part of the model (2), and build the trainer of rows and model."""
    with log.phase("build trainer"):
        validation = tokens_of(data.validation, tokenizer, log.run)
        makes_strategy = Ddp if log.run.parallelism.replicates else strategy_class(log.run)  # DDP in the same loop
        strategy = makes_strategy(log.run, log.rank)
        model = strategy.load_model()
        return make_trainer(model, tokenizer, rows, validation, log, strategy=strategy, trainer_class=LoopTrainer)


def train_shards(log: RunRecorder, trainer: LoopTrainer) -> Metrics:
    """Train with checkpoints of all ranks' parts (4), and print what each rank held."""
    figures = train(log, trainer)
    if log.rank.is_main and figures["held"]:
        print(held_table(figures["held"]).to_string())
    return figures


def measure_ceiling(log: RunRecorder, trainer: LoopTrainer, held: dict[str, Any] | None) -> dict[str, float] | None:
    """Measure the highest possible speed-up (6); on CPU only, of a model small enough to be whole on each rank."""
    if not can_measure_ceiling(log.run, held):
        return None
    with log.phase("machine ceiling"):
        whole = whole_model_to_train(log.run, whole_model_on(log.rank.device))
        return measure_machine_ceiling(trainer, log.rank, whole)


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run, on this rank."""
    with run_started(run) as log:
        tokenizer, data, rows = load_data(log)
        before = evaluate_before(log, None, tokenizer, data)
        trainer = build_trainer(log, tokenizer, rows, data)
        trained = train_shards(log, trainer)
        tuned, differences = save(log, trainer, tokenizer)  # (5)
        ceiling = measure_ceiling(log, trainer, trained["held"])
        after = evaluate_after(log, tuned, tokenizer, data)
        return record(log, before, after, **trained, largest_logit_differences=differences, machine_ceiling=ceiling)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
