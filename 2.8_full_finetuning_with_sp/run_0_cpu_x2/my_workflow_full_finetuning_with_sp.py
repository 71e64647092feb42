r"""Full fine-tuning with sequence parallel (Ulysses): ranks share the tokens of each row.

From this folder:
    torchrun --nproc_per_node 2 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_full_finetuning_with_sp.py
    torchrun --nproc_per_node 2 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_full_finetuning_with_sp.py --parallel fsdp --technique lora

Against 2.4: (1) ranks start, and groups of `--sp` ranks have the same rows, (2) in attention each rank exchanges its
tokens for heads, (3) each batch is this rank's part of the tokens of its rows, (4) gradients are summed over all ranks
in the last backward pass of a step, (5) the upper bound is measured beside it.
"""

from my_utils_full_finetuning_with_sp import divide_rows, measure_ceiling, summing

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.run_start import run_started
from common.data.rows import Splits
from common.models.divided import mesh_of
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.training.answer_logits import Model
from common.training.ddp import data_parallel, load_replica
from common.training.fsdp import load_parts, shard
from common.training.loop import TrainingLoop
from common.training.steps import Tokenizer, evaluate_after, evaluate_before, load_data, record, save, sum_up

RUN = RunConfig(
    technique="full",
    parallel="ddp",
    run_folder="2.8_full_finetuning_with_sp/run_0_cpu_x2",
    devices=2,
    sp_size=2,  # (1)
)


def load_and_divide(log: RunRecorder) -> Model:
    """Return the model to train, a whole one or its shards, whose attention exchanges tokens for heads."""
    run, rank = log.run, log.rank
    if run.parallelism.uses_fsdp:
        mesh = mesh_of(rank, run)
        model = load_parts(run, rank, mesh)
        divide_rows(model, run)  # (2)
        return shard(model, run, mesh)
    model = load_replica(run, rank)
    divide_rows(model, run)  # (2)
    return data_parallel(model, rank)


def train(log: RunRecorder, tokenizer: Tokenizer, data: Splits) -> TrainingLoop:
    """Train with rows whose tokens are divided among the ranks."""
    with log.phase("build trainer"):
        model = load_and_divide(log)
        loop = TrainingLoop(model, tokenizer, data, log)
    with log.phase("training"):
        for step in loop.steps():
            for batch, is_last in step:  # (3)
                with summing(model, is_last):  # (4)
                    loss = loop.loss(batch, step.label_count)  # of this rank's tokens, over the labels of all rows
                    (loss * log.rank.world_size).backward()  # DDP and FSDP divide the ranks' sum by their number
            loop.update()
    return loop


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run, on this rank."""
    with run_started(run) as log:
        tokenizer, data = load_data(log)
        before = evaluate_before(log, tokenizer, data)
        loop = train(log, tokenizer, data)
        trained = sum_up(loop)
        ceiling = measure_ceiling(loop)  # (5)
        tuned, differences = save(log, loop, tokenizer)
        after = evaluate_after(log, tuned, tokenizer, data)
        return record(log, before, after, **trained, largest_logit_differences=differences, machine_ceiling=ceiling)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
