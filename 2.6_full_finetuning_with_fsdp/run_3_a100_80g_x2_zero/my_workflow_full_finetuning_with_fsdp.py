r"""Full fine-tuning with sharding: ranks share the rows as with DDP, and divide what each of them would hold.

From this folder:
    torchrun --nproc_per_node 2 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_full_finetuning_with_fsdp.py
    torchrun --nproc_per_node 2 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_full_finetuning_with_fsdp.py --technique lora

Against 2.4: (1) ranks start and are counted, (2) each holds its part of weights, gradients and optimizer states,
(3) gradients are divided after each backward pass, and summed between copies of the model after a step's last one,
(4) the effective batch grows with the ranks, and the learning rate with the square root of that, (5) checkpoints have
a part of every rank, (6) at the end the parts become one model, (7) the upper bound is measured beside it.
"""

from my_utils_full_finetuning_with_fsdp import load_for_zero, measure_ceiling, zero_engine

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.run_start import run_started
from common.data.rows import Splits
from common.models.divided import mesh_of
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.training.ddp import data_parallel, exchanging, load_replica
from common.training.fsdp import load_parts, shard
from common.training.loop import TrainingLoop
from common.training.optimizers import make_optimizer
from common.training.steps import Metrics, Tokenizer, evaluate_after, evaluate_before, load_data, record, save, sum_up
from common.training.usage import Held

RUN = RunConfig(
    technique="full",
    parallel="zero3",  # (1) the stage
    run_folder="2.6_full_finetuning_with_fsdp/run_3_a100_80g_x2_zero",
    device="cuda",
    gpu="A100 80GB SXM",
    devices=2,
    model="Qwen/Qwen2.5-7B-Instruct",
    precision="bf16",
    max_length=1024,  # tokens; longer rows are truncated
    per_device_train_batch_size=8,
    num_train_epochs=3,
    learning_rate=1e-5,
    learning_rate_scaling="sqrt",  # (3)
    per_device_eval_batch_size=8,
    gradient_checkpointing=True,  # without it rows of 1,024 tokens do not fit
)


def train_with_fsdp(log: RunRecorder, tokenizer: Tokenizer, data: Splits) -> TrainingLoop:
    """Train with FSDP: weights are gathered layer by layer, gradients are summed and divided."""
    with log.phase("build trainer"):
        mesh = mesh_of(log.rank, log.run)
        model = shard(load_parts(log.run, log.rank, mesh), log.run, mesh)  # (2)
        loop = TrainingLoop(model, tokenizer, data, log)
    with log.phase("training"):
        for step in loop.steps():
            for batch, is_last in step:
                model.set_requires_all_reduce(is_last)  # (3)
                loss = loop.loss(batch, step.label_count)
                (loss * log.rank.world_size).backward()  # FSDP takes the mean, each loss is a part of one sum
            loop.update()
    return loop


def train_with_zero(log: RunRecorder, tokenizer: Tokenizer, data: Splits) -> TrainingLoop:
    """Train with DeepSpeed's ZeRO, whose engine divides what the stage says, exchanges and steps."""
    with log.phase("build trainer"):
        model = load_for_zero(log.run, log.rank)
        optimizer = make_optimizer(model, log.run)
    with log.phase("training"):
        engine = zero_engine(model, optimizer, log.run)  # (2)
        loop = TrainingLoop(engine, tokenizer, data, log, optimizer)
        for step in loop.steps():
            for batch, is_last in step:
                engine.set_gradient_accumulation_boundary(is_last)  # (3)
                loss = loop.loss(batch, step.label_count)
                engine.backward(loss * log.rank.world_size, scale_wrt_gas=False)  # it takes the mean, too
            loop.update()
    return loop


def train_with_ddp(log: RunRecorder, tokenizer: Tokenizer, data: Splits) -> TrainingLoop:
    """Train with DDP, for comparison: every rank holds everything."""
    with log.phase("build trainer"):
        replica = data_parallel(load_replica(log.run, log.rank), log.rank)
        loop = TrainingLoop(replica, tokenizer, data, log)
    with log.phase("training"):
        for step in loop.steps():
            for batch, is_last in step:
                with exchanging(replica, is_last):
                    (loop.loss(batch, step.label_count) * log.rank.world_size).backward()
            loop.update()
    return loop


def train(log: RunRecorder, tokenizer: Tokenizer, data: Splits) -> TrainingLoop:
    """Train with checkpoints of all ranks' parts (5)."""
    parallelism = log.run.parallelism
    if parallelism.uses_fsdp:
        return train_with_fsdp(log, tokenizer, data)
    return (train_with_zero if parallelism.uses_deepspeed else train_with_ddp)(log, tokenizer, data)


def tell_held(loop: TrainingLoop) -> Metrics:
    """Sum up the training, and print what one device would hold, beside what each rank has said."""
    figures = sum_up(loop)
    if loop.rank.is_main and "held" in figures:
        print(f"one device would hold: {Held(**figures['held']['whole'])}")
    return figures


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run, on this rank."""
    with run_started(run) as log:
        tokenizer, data = load_data(log)
        before = evaluate_before(log, tokenizer, data)
        loop = train(log, tokenizer, data)
        trained = tell_held(loop)
        tuned, differences = save(log, loop, tokenizer)  # (6)
        ceiling = measure_ceiling(loop, trained.get("held"))  # (7)
        after = evaluate_after(log, tuned, tokenizer, data)
        return record(log, before, after, **trained, largest_logit_differences=differences, machine_ceiling=ceiling)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
