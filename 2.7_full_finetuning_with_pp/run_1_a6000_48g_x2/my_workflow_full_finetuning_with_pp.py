r"""Full fine-tuning with pipeline parallel: each rank holds a stage of the model, and micro-batches keep all busy.

From this folder:
    torchrun --nproc_per_node 2 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_full_finetuning_with_pp.py
    torchrun --nproc_per_node 2 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_full_finetuning_with_pp.py --schedule gpipe
    torchrun --nproc_per_node 2 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_full_finetuning_with_pp.py --technique lora

Against 2.4: (1) layers are placed before anything is loaded, (2) a rank loads its stage only, (3) the passes of a step
are ordered by a schedule of micro-batches, (4) what the pipeline brings is measured, (5) the stages are saved as one
model.
"""

from my_utils_full_finetuning_with_pp import measure, stage_table

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.run_start import run_started
from common.data.batches import longest_batch
from common.data.rows import Splits
from common.models.placement import Placement, place_stages
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.training.loop import TrainingLoop
from common.training.pipeline import Pipeline, trained_stage
from common.training.steps import Tokenizer, evaluate_after, evaluate_before, load_data, record, save, sum_up

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


def place(log: RunRecorder, data: Splits) -> Placement:
    """Choose which stage holds which layers (1), so that no device is fuller than it must be in training."""
    with log.phase("place layers"):
        batch = longest_batch(data.train, log.run.per_device_train_batch_size, log.run)
        placement = place_stages(log.run, batch, log.gpu())
        if log.rank.is_main:
            print(stage_table(placement).to_string(index=False))
        return placement


def train(log: RunRecorder, placement: Placement, tokenizer: Tokenizer, data: Splits) -> TrainingLoop:
    """Train this rank's stage, to which hidden states come from the stage before, and gradients from the next one."""
    with log.phase("build trainer"):
        stage = trained_stage(log.run, placement.stage_map, log.rank)  # (2)
        pipeline = Pipeline(stage, log.run, log.rank)
        loop = TrainingLoop(pipeline, tokenizer, data, log, plan=placement.plan)
    with log.phase("training"):
        for step in loop.steps():
            for batch, _ in step:
                loop.add_loss(pipeline.train_step(batch, step.label_count))  # (3)
            loop.update()
    return loop


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run, on this rank."""
    with run_started(run) as log:
        tokenizer, data = load_data(log)
        placement = place(log, data)
        before = evaluate_before(log, tokenizer, data)
        loop = train(log, placement, tokenizer, data)
        trained = sum_up(loop)
        pipeline = measure(loop)  # (4)
        tuned, differences = save(log, loop, tokenizer)  # (5)
        after = evaluate_after(log, tuned, tokenizer, data)
        figures = {"placement": placement.for_record(), "pipeline": pipeline, "largest_logit_differences": differences}
        return record(log, before, after, **trained, **figures)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
