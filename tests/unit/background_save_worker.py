"""Shards of two CPU ranks that are written while steps are taken: test_saves starts it with torchrun, and a folder.

Rank 0 prints a line of JSON.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather_object
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from common.base.run_config import RunConfig
from common.models.shards import local_part
from common.runtime.world import Rank
from common.training.checkpoints import UnfinishedCheckpoint, verify
from common.training.fsdp import Fsdp

RUN = RunConfig(technique="full", parallel="fsdp", devices=2)


def divided(rank: Rank) -> Fsdp:
    """A toy model in shards, and its optimizer."""
    torch.manual_seed(0)
    strategy = Fsdp(RUN, rank)
    strategy.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    fully_shard(strategy.model, mesh=init_device_mesh("cpu", (2,)))
    strategy.optimizer = torch.optim.AdamW(strategy.model.parameters(), lr=0.1)
    return strategy


def step(strategy: Fsdp) -> None:
    """One step, in which ranks send to each other."""
    strategy.model(torch.ones(4, 64)).square().mean().backward()
    strategy.update()


def held(strategy: Fsdp) -> list[torch.Tensor]:
    """A copy of this rank's shards of weights and states, and of the steps that the optimizer has counted."""
    states = [value for state in strategy.optimizer.state.values() for value in state.values()]
    return [local_part(each).detach().clone() for each in (*strategy.model.parameters(), *states)]


def main() -> None:
    """Two steps, a checkpoint while three more are taken, and that checkpoint loaded again."""
    torch.set_num_threads(1)
    state = PartialState(cpu=True, backend="gloo")
    rank = Rank(state.process_index, 2, "cpu", "torchrun")
    strategy, folder = divided(rank), Path(sys.argv[1]) / "checkpoint-2"
    for _ in range(2):
        step(strategy)
    then = held(strategy)
    unfinished = UnfinishedCheckpoint(folder, {}, 0, commits=rank.is_main)
    with unfinished.being_written() as partial:
        unfinished.background = strategy.write_in_background(partial, strategy.copied(is_full=True))
    for _ in range(3):
        step(strategy)
    has_name = folder.exists()
    while not unfinished.is_written():
        time.sleep(0.01)
    unfinished.commit()
    verify(folder)
    differs = [not torch.equal(now, before) for now, before in zip(held(strategy), then, strict=True)]
    strategy.load(folder)
    equal = [torch.equal(now, before) for now, before in zip(held(strategy), then, strict=True)]
    said = gather_object([{"has_name": has_name, "differs": all(differs), "equal": all(equal)}])
    if rank.is_main:
        print(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
