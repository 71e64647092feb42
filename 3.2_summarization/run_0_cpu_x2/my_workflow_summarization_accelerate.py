r"""Summarization with a rank on each device: a plain training loop with Accelerate.

From this folder:
    accelerate launch --config_file my_accelerate_config.yaml my_workflow_summarization_accelerate.py
    torchrun --nproc_per_node 2 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_summarization_accelerate.py

`Accelerator.prepare` gets (1) the model, around which it puts DDP, and (2) the optimizer. It does not get the rows,
which it would divide by repeating some where they do not divide evenly, nor the learning-rate schedule, which it would
move on once for every rank at each step.
"""

from contextlib import nullcontext

from accelerate import Accelerator
from my_utils_summarization import load_data, run_with, summarize

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.run_start import run_started
from common.data.rows import Splits
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.training.ddp import load_replica
from common.training.loop import TrainingLoop
from common.training.optimizers import make_optimizer
from common.training.steps import Tokenizer, evaluate_after, evaluate_before, record, save, sum_up

RUN = run_with(loop="accelerate")


def train(log: RunRecorder, tokenizer: Tokenizer, data: Splits) -> TrainingLoop:
    """Train; validation, checkpoints and the schedule come with each of the loop's steps."""
    with log.phase("build trainer"):
        accelerator = Accelerator()
        model = load_replica(log.run, log.rank)
        model, optimizer = accelerator.prepare(model, make_optimizer(model, log.run))  # (1) (2)
        loop = TrainingLoop(model, tokenizer, data, log, optimizer)
    with log.phase("training"):
        for step in loop.steps():
            for batch, is_last in step:
                with nullcontext() if is_last else accelerator.no_sync(model):
                    loss = loop.loss(batch, step.label_count)
                    # DDP takes the mean over ranks, but each loss is part of a sum
                    accelerator.backward(loss * accelerator.num_processes)
            loop.update()
    return loop


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run, on this rank."""
    with run_started(run) as log:
        tokenizer, data = load_data(log)
        before = evaluate_before(log, tokenizer, data, summarize)
        loop = train(log, tokenizer, data)
        trained = sum_up(loop)
        tuned, differences = save(log, loop, tokenizer)
        after = evaluate_after(log, tuned, tokenizer, data, summarize)
        return record(log, before, after, **trained, largest_logit_differences=differences)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
