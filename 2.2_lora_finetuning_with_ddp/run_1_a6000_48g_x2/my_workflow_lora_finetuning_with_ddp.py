r"""LoRA fine-tuning with DDP: one process on each device, every one with the whole model.

From this folder:
    torchrun --nproc_per_node 2 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_lora_finetuning_with_ddp.py
    torchrun --nproc_per_node 2 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_lora_finetuning_with_ddp.py --batch_size 16
    accelerate launch --config_file my_accelerate_config.yaml my_workflow_lora_finetuning_with_ddp.py

Against 2.1: (1) each rank's model is a replica inside DDP, (2) each rank gets different examples, (3) the ranks'
gradients are exchanged in the last backward pass of a step, (4) gradient checkpointing is non-reentrant, (5) the
upper bound is measured beside the speed-up.
"""

from my_utils_lora_finetuning_with_ddp import measure_ceiling
from transformers import PreTrainedModel

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.run_start import run_started
from common.data.rows import Splits
from common.models.trained_weights import add_lora
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.training.ddp import data_parallel, exchanging
from common.training.loop import TrainingLoop
from common.training.steps import Tokenizer, evaluate_after, evaluate_before, load, record, save, sum_up

RUN = RunConfig(
    technique="lora",
    parallel="ddp",  # (1)
    run_folder="2.2_lora_finetuning_with_ddp/run_1_a6000_48g_x2",
    device="cuda",
    gpu="RTX A6000 48GB",
    devices=2,
    model="Qwen/Qwen2.5-7B-Instruct",
    precision="bf16",
    max_length=1024,  # tokens; longer rows are truncated
    per_device_train_batch_size=14,
    num_train_epochs=3,
    learning_rate=1e-5,
    per_device_eval_batch_size=8,
    gradient_checkpointing=True,  # (4) without it rows of 1,024 tokens do not fit
    lora_dropout=0.0,  # none of its 196 masks is drawn and kept in a pass
)


def train(log: RunRecorder, model: PreTrainedModel, tokenizer: Tokenizer, data: Splits) -> TrainingLoop:
    """Put adapters on this rank's replica, and train it with the others."""
    with log.phase("build trainer"):
        model = add_lora(model, log.run)
        replica = data_parallel(model, log.rank)  # (1) DistributedDataParallel, which `loop.loss` calls
        loop = TrainingLoop(replica, tokenizer, data, log)
    with log.phase("training"):
        for step in loop.steps():  # (2) yields this rank's rows alone
            for batch, is_last in step:
                # (3) before the last batch of a step gradients only add up on each rank
                with exchanging(replica, is_last):
                    loss = loop.loss(batch, step.label_count)  # a sum over this batch, over the labels of all ranks
                    (loss * log.rank.world_size).backward()  # DDP divides the ranks' sum by their number
            loop.update()  # clip the gradients, step, and forget them
    return loop


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run, on this rank."""
    with run_started(run) as log:
        model, tokenizer, data = load(log)
        before = evaluate_before(log, tokenizer, data, model=model)
        loop = train(log, model, tokenizer, data)
        trained = sum_up(loop)
        ceiling = measure_ceiling(loop)  # (5)
        tuned, differences = save(log, loop, tokenizer)
        after = evaluate_after(log, tuned, tokenizer, data)
        return record(log, before, after, **trained, largest_logit_differences=differences, machine_ceiling=ceiling)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
