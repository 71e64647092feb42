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
from my_utils_summarization import build, load_data, run_with

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.run_start import run_started
from common.records.store import Record
from common.tasks.summarization import summarize
from common.training.replicas import PlainLoop, Replicas
from common.training.steps import record, save, score_after, score_before, train

RUN = run_with(loop="accelerate")


def training_loop(loop: PlainLoop) -> None:
    """Train; validation, checkpoints and the schedule come with each of the loop's steps."""
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(loop.model, loop.optimizer)  # (1) (2)
    for step in loop.steps():
        for batch, is_last in step:
            with nullcontext() if is_last else accelerator.no_sync(model):
                loss = loop.loss_of(model, batch, step.num_items_in_batch)
                # DDP takes the mean over ranks, but each loss is part of a sum
                accelerator.backward(loss * accelerator.num_processes)
        if loop.args.max_grad_norm:
            accelerator.clip_grad_norm_(model.parameters(), loop.args.max_grad_norm)
        loop.look_at_gradients()
        optimizer.step()
        optimizer.zero_grad()


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run, on this rank."""
    with run_started(run) as log:
        strategy = Replicas(log)
        tokenizer, data = load_data(log)
        before = score_before(log, tokenizer, data, summarize)
        trainer = build(log, tokenizer, data, strategy, PlainLoop)
        trained = train(log, trainer, training_loop)
        tuned, differences = save(log, trainer, tokenizer)
        after = score_after(log, tuned, tokenizer, data, summarize)
        return record(log, before, after, **trained, largest_logit_differences=differences)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
