r"""LoRA fine-tuning with DDP: one process on each device, every one with the whole model.

From this folder:
    torchrun --nproc_per_node 2 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_lora_finetuning_with_ddp.py
    torchrun --nproc_per_node 2 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_lora_finetuning_with_ddp.py --batch_size 16
    accelerate launch --config_file my_accelerate_config.yaml my_workflow_lora_finetuning_with_ddp.py

Against 2.1: (1) ranks start and are counted, (2) the model sits on its rank's device, (3) gradient checkpointing is
non-reentrant, (4) the machine's ceiling is measured beside the speed-up.
"""

from my_utils_lora_finetuning_with_ddp import device_map

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.run_start import run_started
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.training.ceiling import measure_machine_ceiling
from common.training.steps import build_trainer, evaluate_after, evaluate_before, load, merge, record, train
from common.training.trainer import AuditedTrainer

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
    gradient_checkpointing=True,  # (3) without it rows of 1,024 tokens do not fit
    lora_dropout=0.0,  # none of its 196 masks is drawn and kept in a pass
)


def measure_ceiling(log: RunRecorder, trainer: AuditedTrainer) -> dict[str, float] | None:
    """Measure the highest possible speed-up (4); on CPU only, as one GPU may not hold the global batch."""
    if log.run.device == "cuda":
        return None
    with log.phase("machine ceiling"):
        return measure_machine_ceiling(trainer, log.rank)


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run, on this rank."""
    with run_started(run) as log:
        model, tokenizer, data = load(log, device_map(log.rank))  # (2)
        before = evaluate_before(log, model, tokenizer, data)
        trainer = build_trainer(log, model, tokenizer, data)
        trained = train(log, trainer)
        ceiling = measure_ceiling(log, trainer)
        tuned, differences = merge(log, trainer, tokenizer)
        after = evaluate_after(log, tuned, tokenizer, data)
        return record(log, before, after, **trained, largest_logit_differences=differences, machine_ceiling=ceiling)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
