r"""Summarization across machines, one rank on each: a plain training loop on torch.distributed.

From this folder:
    torchrun --nproc_per_node 2 --rdzv_backend c10d --rdzv_conf store_type=file \
        my_workflow_summarization_machines.py
or on virtual hosts that stand for machines (docs/several_machines.md says how to start it on your own):
    python ../../tests/network/virtual_hosts.py --mbit 100 -- torchrun --nnodes 2 --nproc_per_node 1 \
        --rdzv_backend c10d --rdzv_endpoint {master}:29400 my_workflow_summarization_machines.py --devices 2 --nodes 2

The machines meet (1), and see that all have the same rows and libraries. Each trains on its own part of the rows. After
each backward pass (2), or during it, gradients are summed over all machines; so every one takes the same step (3).

A machine that is lost ends the others. With `torchrun --nnodes 2:4 --max_restarts 3 ...` (and the rest as above) those
that are left start again, after the newest checkpoint and with the same steps: they divide the lost one's rows.
"""

from my_utils_summarization import GradientExchange, load_data, run_with, summarize

from common.base.command_line import run_from_command_line
from common.base.run_config import RunConfig
from common.checks.run_start import run_started
from common.data.rows import Splits
from common.records.store import Record
from common.runtime.recorder import RunRecorder
from common.training.ddp import load_replica
from common.training.loop import TrainingLoop
from common.training.steps import Tokenizer, evaluate_after, evaluate_before, record, save, sum_up

RUN = run_with(loop="machines")


def train(log: RunRecorder, tokenizer: Tokenizer, data: Splits) -> TrainingLoop:
    """Train; validation, checkpoints and the schedule come with each of the loop's steps."""
    with log.phase("build trainer"):
        exchange = GradientExchange(load_replica(log.run, log.rank), log.run)
        loop = TrainingLoop(exchange.model, tokenizer, data, log)
    with log.phase("training"):
        for step in loop.steps():
            for batch, is_last in step:
                with exchange.part(is_last):
                    exchange.backward(loop.loss(batch, step.label_count))
            exchange.complete()  # (2)
            loop.update()  # (3)
    return loop


def workflow(run: RunConfig) -> Record:
    """Take all steps of the run, on this rank."""
    with run_started(run) as log:  # (1)
        tokenizer, data = load_data(log)
        before = evaluate_before(log, tokenizer, data, summarize)
        loop = train(log, tokenizer, data)
        trained = sum_up(loop)
        tuned, differences = save(log, loop, tokenizer)
        after = evaluate_after(log, tuned, tokenizer, data, summarize)
        return record(log, before, after, **trained, largest_logit_differences=differences)


if __name__ == "__main__":
    run_from_command_line(workflow, RUN)
