r"""Full fine-tuning with pipeline parallel: each rank holds a stage of the model, and micro-batches keep all busy.

From this folder:
    torchrun --nproc_per_node 2 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_full_finetuning_with_pp.py
    torchrun --nproc_per_node 2 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_full_finetuning_with_pp.py --schedule gpipe
    torchrun --nproc_per_node 2 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_full_finetuning_with_pp.py --technique lora

Against 2.4: (1) layers are placed before anything is loaded, (2) a rank loads its stage only, (3) the trainer's step is
a schedule of micro-batches, (4) what the pipeline brings is measured, (5) the stages are saved as one model.
"""

from collections.abc import Sequence

from my_utils_full_finetuning_with_pp import stage_table

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.run_start import run_started
from common.data.batches import longest_batch
from common.data.rows import Splits, Tokens
from common.data.splits import tokens_of
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.training.loop import LoopTrainer
from common.training.pipeline_measure import measure_pipeline
from common.models.placement import Placement, place_stages
from common.training.steps import Metrics, Tokenizer, evaluate_after, evaluate_before, load_data, record, save, train
from common.training.strategy import strategy_class
from common.training.trainer import make_trainer

RUN = RunConfig(
    technique="full",
    parallel="pp",
    run_folder="2.7_full_finetuning_with_pp/run_1_a6000_48g_x2",
    device="cuda",
    gpu="RTX A6000 48GB",
    devices=2,
    micro_batches=8,  # of one row: the stages are idle for 1 / 9 of the time
    model="Qwen/Qwen2.5-7B-Instruct",
    precision="bf16",
    max_length=1024,  # tokens; longer rows are truncated
    per_device_train_batch_size=8,
    num_train_epochs=3,
    learning_rate=1e-5,
    per_device_eval_batch_size=8,
    pad_to_multiple_of=64,  # stages wait for each other at each new shape of a batch
)


def place(log: RunRecorder, rows: Sequence[Tokens]) -> Placement:
    """Choose which stage holds which layers (1), so that no device is fuller than it must be in training."""
    with log.phase("place layers"):
        placement = place_stages(log.run, longest_batch(rows, log.run.per_device_train_batch_size, log.run), log.gpu())
        if log.rank.is_main:
            print(stage_table(placement).to_string(index=False))
        return placement


def build_trainer(
    log: RunRecorder, placement: Placement, tokenizer: Tokenizer, rows: Sequence[Tokens], data: Splits
) -> LoopTrainer:
    """Load this rank's stage (2), and build its schedules (3) and the trainer of both."""
    with log.phase("build trainer"):
        strategy = strategy_class(log.run)(log.run, log.rank)
        stage = strategy.load_model(placement.stage_map)
        validation = tokens_of(data.validation, tokenizer, log.run)
        return make_trainer(stage, tokenizer, rows, validation, log, placement.plan, strategy, LoopTrainer)


def measure(log: RunRecorder, trainer: LoopTrainer) -> Metrics | None:
    """Time GPipe and 1F1B against naive model parallel (4); on CPU only, as a GPU may lack the memory."""
    if log.run.device == "cuda":
        return None
    with log.phase("measure the pipeline"):
        return measure_pipeline(trainer)


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run, on this rank."""
    with run_started(run) as log:
        tokenizer, data, rows = load_data(log)
        placement = place(log, rows)
        before = evaluate_before(log, None, tokenizer, data)
        trainer = build_trainer(log, placement, tokenizer, rows, data)
        trained = train(log, trainer)
        pipeline = measure(log, trainer)
        tuned, differences = save(log, trainer, tokenizer)  # (5)
        after = evaluate_after(log, tuned, tokenizer, data)
        figures = {"placement": placement.for_record(), "pipeline": pipeline, "largest_logit_differences": differences}
        return record(log, before, after, **trained, **figures)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
