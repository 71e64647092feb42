"""2.6's parallelisms on one GPU: a world of one rank, whose collectives are NCCL's."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from common.base.run_config import RunConfig
from common.models.divided import mesh_of
from common.models.shards import host_copy, local_part
from common.runtime.world import BACKENDS, Rank
from common.training.checkpoints import UnfinishedCheckpoint
from common.training.fsdp import shard
from common.training.part import Part, part_class

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


def part_of(run: RunConfig, rank: Rank, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> Part:
    """What the only rank holds of `model`, of which `Shards` alone would want half."""
    monkeypatch.setattr("common.training.fsdp.check_fully_sharded", lambda *_: None)
    sharded = run.parallelism.uses_fsdp
    module = shard(model, run, mesh_of(rank, run)) if sharded else DistributedDataParallel(model)
    part = part_class(run)(module, run, rank)
    part.optimizer = torch.optim.AdamW(part.model.parameters(), lr=0.01)
    return part


def stepped(part: Part, steps: int = STEPS) -> list[float]:
    """Take steps of the same rows; return their losses."""
    ids, losses = torch.arange(2, 42).view(4, 10), []
    for _ in range(steps):
        loss = part.loss(part.inputs_for_loss({"input_ids": ids, "labels": ids}), 36)
        loss.backward()
        losses.append(loss.item())
        part.clip_gradients(part.run.max_grad_norm)
        part.step()
        part.forget_gradients()
    return losses


def run_of(**settings: str | int) -> RunConfig:
    return RunConfig(technique="full", device="cuda", max_grad_norm=1.0, **settings)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_mixed_precision_computes_in_bf16_the_losses_of_fp32(
    rank: Rank, llama: LlamaForCausalLM, parallel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_fp32 = part_of(run_of(precision="fp32"), rank, deepcopy(llama), monkeypatch)
    run = run_of(precision="bf16-mixed", parallel=parallel, devices=2)
    mixed, formats = part_of(run, rank, llama, monkeypatch), set()
    for name, module in mixed.model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_hook(lambda _, __, output: formats.add(output.dtype))
    exact, found = stepped(in_fp32), stepped(mixed)
    assert formats == {torch.bfloat16}
    assert {weight.dtype for weight in mixed.model.parameters()} == {torch.float32}
    assert found == pytest.approx(exact, rel=0.02)
    assert exact[0] > 1.1 * exact[-1]


def held(part: Part) -> list[torch.Tensor]:
    """Copies of weights and optimizer states."""
    states = [value for state in part.optimizer.state.values() for value in state.values()]
    return [local_part(each).detach().cpu().clone() for each in (*part.model.parameters(), *states)]


def test_shards_are_written_from_their_copy_while_steps_are_taken(
    rank: Rank, llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = part_of(run_of(precision="bf16-mixed", parallel="fsdp", devices=2), rank, llama, monkeypatch)
    stepped(part)
    then, folder = held(part), tmp_path / "checkpoint-4"
    unfinished, group = UnfinishedCheckpoint(folder, {}, commits=True), dist.new_group(backend=BACKENDS["cpu"])
    with unfinished.being_written() as aside, ThreadPoolExecutor(1) as thread:
        write = partial(part.write, aside, host_copy(part.state(is_full=True)), group)
        unfinished.written = thread.submit(unfinished.write_and_hash, write)
        stepped(part)
    assert not any(map(torch.equal, held(part), then))
    unfinished.commit()
    part.load(folder, is_full=True)
    assert all(map(torch.equal, held(part), then))
