"""Summarization on the devices of one machine: a plain training loop with Accelerate.

From this folder:
    accelerate launch --config_file my_accelerate_config.yaml my_workflow_summarization_accelerate.py
    torchrun --standalone --nproc_per_node 2 my_workflow_summarization_accelerate.py

`Accelerator.prepare` gets (1) the model, around which it puts DDP, and (2) the optimizer. It does not get the rows,
which it would divide by repeating some where they do not divide evenly, nor the learning-rate schedule, which it would
move on once for every rank at each step.
"""

from contextlib import nullcontext

from accelerate import Accelerator
from my_utils_summarization import (
    Metrics,
    build,
    evaluate_after,
    evaluate_before,
    figures_of,
    load_data,
    record,
    run_with,
    save,
)

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.inputs import check_inputs
from common.records.store import Record
from common.runtime.rank import rank_started
from common.runtime.recorder import RunRecorder
from common.training.replicas import PlainLoop, Replicas

RUN = run_with(loop="accelerate")


def train(log: RunRecorder, loop: PlainLoop) -> Metrics:
    """Train; validation, checkpoints and the schedule come with each of the loop's steps."""
    run, ranks = log.run, log.rank.world_size
    with log.phase("training"):
        accelerator = Accelerator()
        model, optimizer = accelerator.prepare(loop.model, loop.optimizer)  # (1) (2)
        for step in loop.steps():
            for batch, is_last in step:
                with nullcontext() if is_last else accelerator.no_sync(model):
                    loss = loop.loss_of(model, batch, step.num_items_in_batch)
                    accelerator.backward(loss * ranks)  # DDP takes the mean over ranks, but each loss is part of a sum
            if run.max_grad_norm:
                accelerator.clip_grad_norm_(model.parameters(), run.max_grad_norm)
            loop.look_at_gradients()
            optimizer.step()
            optimizer.zero_grad()
    return figures_of(log, loop)


def workflow(run: RunConfig) -> Record:
    """The whole run, on this rank."""
    with rank_started(run) as rank:
        check_inputs(run)
        log = RunRecorder(run, rank)
        tokenizer, data = load_data(log)
        before = evaluate_before(log, tokenizer, data)
        loop = build(log, tokenizer, data, Replicas(log), PlainLoop)
        trained = train(log, loop)
        tuned, differences = save(log, loop, tokenizer)
        after = evaluate_after(log, tuned, tokenizer, data)
        return record(log, before, after, **trained, largest_logit_differences=differences)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
