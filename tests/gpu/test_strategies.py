"""2.6's strategies on one GPU: a world of one rank, whose collectives are NCCL's."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from common.training.strategy import Strategy
from transformers import LlamaConfig, LlamaForCausalLM

from common.base.run_config import RunConfig
from common.models.divided import mesh_of
from common.models.shards import local_part
from common.runtime.world import BACKENDS, Rank
from common.training.checkpoints import UnfinishedCheckpoint
from common.training.ddp import Ddp
from common.training.fsdp import Fsdp, shard

STEPS = 4


@pytest.fixture
def rank(device: str, first_device: str, tmp_path: Path) -> Iterator[Rank]:
    """The only rank of a process group."""
    dist.init_process_group(BACKENDS[device], init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Rank(0, 1, first_device, "torchrun")
    dist.destroy_process_group()


@pytest.fixture
def llama(device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1)  # fmt: skip
    return LlamaForCausalLM(config).to(device).train()


def prepared(strategy: Strategy, model: torch.nn.Module) -> Strategy:
    """Train `model` by the strategy, as a run does; `Fsdp.prepare` alone would want the shards of two ranks."""
    if isinstance(strategy, Fsdp):
        mesh = mesh_of(strategy.rank, strategy.run)
        strategy.shard_group, model = mesh["shard"].get_group(), shard(model, strategy.run, mesh)
    strategy.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    (Strategy if isinstance(strategy, Fsdp) else type(strategy)).prepare(strategy, optimizer, None)
    return strategy


def stepped(strategy: Strategy, steps: int = STEPS) -> list[float]:
    """Take steps of the same rows; return their losses."""
    ids, losses = torch.arange(2, 42).view(4, 10), []
    for _ in range(steps):
        batch = strategy.inputs_for_loss({"input_ids": ids, "labels": ids})
        losses.append(float(strategy.backward(batch, 36, is_last=True)))
        strategy.finish_gradients()
        strategy.update()
    return losses


def run_of(**settings: str | int) -> RunConfig:
    return RunConfig(technique="full", device="cuda", max_grad_norm=1.0, **settings)


@pytest.mark.parametrize("make", [Ddp, Fsdp])
def test_a_strategy_of_mixed_precision_computes_in_bf16_the_losses_of_fp32(
    rank: Rank, llama: LlamaForCausalLM, make: type[Strategy]
) -> None:
    in_fp32 = prepared(Strategy(run_of(precision="fp32"), rank), deepcopy(llama))
    run = run_of(precision="bf16-mixed", parallel="ddp" if make is Ddp else "fsdp", devices=2)
    mixed, formats = prepared(make(run, rank), llama), set()
    for name, module in mixed.model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_hook(lambda _, __, output: formats.add(output.dtype))
    exact, found = stepped(in_fp32), stepped(mixed)
    assert formats == {torch.bfloat16}
    assert {weight.dtype for weight in mixed.model.parameters()} == {torch.float32}
    assert found == pytest.approx(exact, rel=0.02)
    assert exact[0] > 1.1 * exact[-1]


def held(strategy: Strategy) -> list[torch.Tensor]:
    """Copies of weights and optimizer states."""
    states = [value for state in strategy.optimizer.state.values() for value in state.values()]
    return [local_part(each).detach().cpu().clone() for each in (*strategy.model.parameters(), *states)]


def test_shards_are_written_from_their_copy_while_steps_are_taken(
    rank: Rank, llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    strategy = prepared(Fsdp(run_of(precision="bf16-mixed", parallel="fsdp", devices=2), rank), llama)
    stepped(strategy)
    then, folder = held(strategy), tmp_path / "checkpoint-4"
    unfinished = UnfinishedCheckpoint(folder, {}, 0, commits=True)
    with unfinished.being_written() as partial:
        unfinished.background = strategy.write_in_background(partial, strategy.copied(is_full=True))
    stepped(strategy)
    assert not any(map(torch.equal, held(strategy), then))
    unfinished.commit()
    strategy.load(folder)
    assert all(map(torch.equal, held(strategy), then))
