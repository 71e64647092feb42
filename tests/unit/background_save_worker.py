"""Shards of two CPU ranks that are written while steps are taken: test_saves starts it by torchrun, and a folder."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from common.base.run_config import RunConfig
from common.models.shards import host_copy, local_part
from common.runtime.world import Rank
from common.training.checkpoints import UnfinishedCheckpoint, verify
from common.training.fsdp import Shards, shard
from tests.unit.ranks import tell

RUN = RunConfig(technique="full", parallel="fsdp", devices=2)
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def divided(rank: Rank) -> Shards:
    """A toy model in shards, and its optimizer."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **TINY))
    part = Shards(shard(model, RUN, init_device_mesh("cpu", (2,))), RUN, rank)
    part.optimizer = torch.optim.AdamW(part.model.parameters(), lr=0.1)
    return part


def held_after(steps: int, part: Shards) -> list[torch.Tensor]:
    """Take steps, in which ranks send to each other; copy this rank's shards of weights and states, and the counts."""
    ids = torch.arange(8).view(2, 4)
    for _ in range(steps):
        part.model(input_ids=ids, labels=ids).loss.backward()
        part.step()
        part.forget_gradients()
    states = [value for state in part.optimizer.state.values() for value in state.values()]
    return [local_part(each).detach().clone() for each in (*part.model.parameters(), *states)]


def main() -> None:
    """Two steps, a checkpoint while three more are taken, and that checkpoint loaded again."""
    torch.set_num_threads(1)
    rank = Rank(PartialState(cpu=True, backend="gloo").process_index, 2, "cpu", "torchrun")
    part, folder, group = divided(rank), Path(sys.argv[1]) / "checkpoint-2", dist.new_group(backend="gloo")
    then = held_after(2, part)
    unfinished = UnfinishedCheckpoint(folder, {}, commits=rank.is_main)
    write = partial(part.write, unfinished.partial, host_copy(part.state(is_full=True)), group)
    unfinished.written = ThreadPoolExecutor(1).submit(unfinished.write_and_hash, write)
    later, has_name = held_after(3, part), folder.exists()
    while not unfinished.is_written():
        time.sleep(0.01)
    unfinished.commit()
    verify(folder)
    part.load(folder, is_full=True)
    loaded = held_after(0, part)
    tell({
        "has_name": has_name,
        "differs": not any(map(torch.equal, later, then)),
        "equal": len(loaded) == len(then) and all(map(torch.equal, loaded, then)),
    })  # fmt: skip


if __name__ == "__main__":
    main()
