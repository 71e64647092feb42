"""Shards of two CPU ranks that are written while steps are taken: test_saves starts it by torchrun, and a folder."""

import sys
import time
from pathlib import Path

import torch
from accelerate import PartialState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from common.base.run_config import RunConfig
from common.models.shards import local_part
from common.runtime.world import Rank
from common.training.checkpoints import UnfinishedCheckpoint, verify
from common.training.fsdp import Fsdp
from tests.unit.ranks import tell

RUN = RunConfig(technique="full", parallel="fsdp", devices=2)


def divided(rank: Rank) -> Fsdp:
    """A toy model in shards, and its optimizer."""
    torch.manual_seed(0)
    strategy = Fsdp(RUN, rank)
    strategy.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    fully_shard(strategy.model, mesh=init_device_mesh("cpu", (2,)))
    strategy.optimizer = torch.optim.AdamW(strategy.model.parameters(), lr=0.1)
    return strategy


def held_after(steps: int, strategy: Fsdp) -> list[torch.Tensor]:
    """Take steps, in which ranks send to each other; copy this rank's shards of weights and states, and the counts."""
    for _ in range(steps):
        strategy.model(torch.ones(4, 64)).square().mean().backward()
        strategy.update()
    states = [value for state in strategy.optimizer.state.values() for value in state.values()]
    return [local_part(each).detach().clone() for each in (*strategy.model.parameters(), *states)]


def main() -> None:
    """Two steps, a checkpoint while three more are taken, and that checkpoint loaded again."""
    torch.set_num_threads(1)
    rank = Rank(PartialState(cpu=True, backend="gloo").process_index, 2, "cpu", "torchrun")
    strategy, folder = divided(rank), Path(sys.argv[1]) / "checkpoint-2"
    then = held_after(2, strategy)
    unfinished = UnfinishedCheckpoint(folder, {}, 0, commits=rank.is_main)
    with unfinished.being_written() as partial:
        unfinished.background = strategy.write_in_background(partial, strategy.copied(is_full=True))
    later, has_name = held_after(3, strategy), folder.exists()
    while not unfinished.is_written():
        time.sleep(0.01)
    unfinished.commit()
    verify(folder)
    strategy.load(folder)
    loaded = held_after(0, strategy)
    tell({
        "has_name": has_name,
        "differs": not any(map(torch.equal, later, then)),
        "equal": len(loaded) == len(then) and all(map(torch.equal, loaded, then)),
    })  # fmt: skip


if __name__ == "__main__":
    main()
