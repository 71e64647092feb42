r"""Summarization across machines, one rank on each: a plain training loop on torch.distributed.

On each machine, from this folder (addresses, numbers and ranks are yours):
    python my_workflow_summarization_machines.py --master 10.0.0.1:29500 --machines 4 --machine_rank 0
    torchrun --nnodes 4 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint 10.0.0.1:29400 \
        my_workflow_summarization_machines.py
    srun python my_workflow_summarization_machines.py
or on one machine, with ranks or virtual hosts that stand for machines:
    torchrun --standalone --nproc_per_node 2 my_workflow_summarization_machines.py
    python -m common.virtual_hosts --mbit 100 -- python my_workflow_summarization_machines.py --master {master} \
        --machines {hosts} --machine_rank {rank}

The members meet (1), and see that all have the same rows and libraries. Each trains on its own part of the rows. After
each backward pass (2), or during it, gradients are summed over all members; so every member takes the same step (3).

A member that is lost ends the others, with one sentence. `torchrun --nnodes 2:4 --max_restarts 3 ...` (and the rest as
above) starts those that are left again, after the newest checkpoint and with the same steps: they divide the lost one's
rows among them. (Where more may come than were there at first, pass --partitions with the most there can be.)
"""

from dataclasses import replace

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
from torch.nn.utils import clip_grad_norm_

from common.base.parsing import parse_overrides
from common.base.run_config import RunConfig
from common.checks.inputs import check_inputs
from common.data.splits import load_splits
from common.records.store import Record
from common.runtime.membership import member_of, run_as_member, world_joined
from common.runtime.rank import rank_started
from common.runtime.recorder import RunRecorder
from common.runtime.rendezvous import find_meeting, meeting_options
from common.training.replicas import GradientExchange, PlainLoop, Replicas

RUN = run_with(loop="machines")


def train(log: RunRecorder, loop: PlainLoop) -> Metrics:
    """Train; validation, checkpoints and the schedule come with each of the loop's steps."""
    run = log.run
    with log.phase("training"):
        exchange = GradientExchange(loop.model, run)
        for step in loop.steps():
            for batch, is_last in step:
                with exchange.part(is_last):
                    exchange.backward(loop.loss_of(exchange.model, batch, step.num_items_in_batch))
            exchange.complete()  # (2)
            if run.max_grad_norm:
                clip_grad_norm_(loop.model.parameters(), run.max_grad_norm)
            loop.update()  # (3)
    return figures_of(log, loop)


def workflow(run: RunConfig, resumes: bool = False) -> Record:
    """The whole run, on this rank; `resumes`: after the newest checkpoint of its last start, which lost a member."""
    with rank_started(run) as rank:
        check_inputs(run)
        log = RunRecorder(run, rank, resumes)
        tokenizer, data = load_data(log)
        before = evaluate_before(log, tokenizer, data)
        loop = build(log, tokenizer, data, Replicas(log), PlainLoop)
        trained = train(log, loop)
        tuned, differences = save(log, loop, tokenizer)
        after = evaluate_after(log, tuned, tokenizer, data)
        return record(log, before, after, **trained, largest_logit_differences=differences)


def join_and_work() -> None:
    """Meet the others, with as many members as there are, and work."""
    options, overrides = meeting_options(__doc__).parse_known_args()
    meeting = find_meeting(options.master, options.machines, options.machine_rank)
    run = parse_overrides(replace(RUN, devices=meeting.world_size), overrides)
    member = member_of(meeting, run, load_splits(run).train)
    with world_joined(meeting, run, member, options.join_timeout_s) as world:  # (1)
        workflow(world.goes_on_with(run), resumes=world.start > 1)


if __name__ == "__main__":
    run_as_member(join_and_work)
