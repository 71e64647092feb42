r"""Summarization across machines, one rank on each: a plain training loop on torch.distributed.

On each machine, from this folder (addresses, numbers and ranks are yours):
    python my_workflow_summarization_machines.py --master 10.0.0.1:29500 --machines 4 --machine_rank 0
    torchrun --nnodes 4 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint 10.0.0.1:29400 \
        my_workflow_summarization_machines.py
    srun python my_workflow_summarization_machines.py
or on one machine, with ranks or virtual hosts that stand for machines:
    torchrun --standalone --nproc_per_node 4 my_workflow_summarization_machines.py
    python -m common.virtual_hosts --mbit 100 -- python my_workflow_summarization_machines.py --master {master} \
        --machines {hosts} --machine_rank {rank}

The members meet (1), and see that all have the same rows and libraries. Each trains on its own part of the rows. After
each backward pass (2), or during it, gradients are summed over all members; so every member takes the same step (3).

A member that is lost ends the others, with one sentence. `torchrun --nnodes 2:4 --max_restarts 3 ...` (and the rest as
above) starts those that are left again, after the newest checkpoint and with the same steps: they divide the lost one's
rows among them. (Where more may come than were there at first, pass --partitions with the most there can be.)
"""

from dataclasses import replace

from my_utils_summarization import build, load_data, run_with
from torch.nn.utils import clip_grad_norm_

from common.base.parsing import parse_overrides
from common.base.run_config import RunConfig
from common.checks.run_start import run_started
from common.data.splits import load_splits
from common.records.store import Record
from common.runtime.machines import member_of
from common.runtime.membership import run_as_member, world_joined
from common.runtime.rendezvous import find_meeting, meeting_options
from common.tasks.summarization import summarize
from common.training.replicas import GradientExchange, PlainLoop, Replicas
from common.training.steps import record, save, score_after, score_before, train

RUN = run_with(loop="machines")


def training_loop(loop: PlainLoop) -> None:
    """Train; validation, checkpoints and the schedule come with each of the loop's steps."""
    exchange = GradientExchange(loop.model, loop.strategy.run)
    for step in loop.steps():
        for batch, is_last in step:
            with exchange.part(is_last):
                exchange.backward(loop.loss_of(exchange.model, batch, step.num_items_in_batch))
        exchange.complete()  # (2)
        if loop.args.max_grad_norm:
            clip_grad_norm_(loop.model.parameters(), loop.args.max_grad_norm)
        loop.update()  # (3)


def workflow(run: RunConfig, resumes: bool = False) -> Record:
    """Take all steps of the run, on this rank; `resumes` from the newest checkpoint of a start that lost a member."""
    with run_started(run, resumes) as log:
        strategy = Replicas(log)
        tokenizer, data = load_data(log)
        before = score_before(log, tokenizer, data, summarize)
        trainer = build(log, tokenizer, data, strategy, PlainLoop)
        trained = train(log, trainer, training_loop)
        tuned, differences = save(log, trainer, tokenizer)
        after = score_after(log, tuned, tokenizer, data, summarize)
        return record(log, before, after, **trained, largest_logit_differences=differences)


def join_and_work() -> None:
    """Meet the others, with as many members as there are, and work."""
    options, overrides = meeting_options(__doc__).parse_known_args()
    meeting = find_meeting(options.master, options.machines, options.machine_rank)
    run = parse_overrides(replace(RUN, devices=meeting.world_size), overrides)
    member = member_of(meeting.rank, run, load_splits(run).train)
    with world_joined(meeting, run, member, options.join_timeout_s) as world:  # (1)
        workflow(world.goes_on_with(run), resumes=world.start > 1)


if __name__ == "__main__":
    run_as_member(join_and_work)
