"""Sharding: what is refused, what DeepSpeed is told, and what is counted."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.nn.utils import get_total_norm
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.checks.inputs import check_folder
from common.models.divided import load_rows, mesh_of
from common.models.shards import local_part
from common.runtime.rank import exchange_timeout
from common.runtime.world import Rank
from common.training import zero
from common.training.deepspeed_config import deepspeed_config
from common.training.fsdp import check_fully_sharded, describe_wrapping, mixed_precision, shard
from common.training.pipeline_parallel import Stage
from common.training.saver import Saver
from common.training.usage import SentBytes, check_part, part_bytes
from common.training.zero import ZeroPart, check_deepspeed

FSDP = RunConfig(
    technique="full", parallel="fsdp", devices=2, run_folder="2.6_full_finetuning_with_fsdp/run_0_cpu_x2"
)  # fmt: skip
ZERO = replace(FSDP, parallel="zero3")
PERSISTENT = "stage3_param_persistence_threshold"


def toy() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=2, **sizes))


# -- bad input


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"devices": 1}, "parallel is fsdp, but there is 1 device, and nothing to divide: pass --devices 2 or more"),
        ({"parallel": "zero2", "optim": "adafactor"}, "optim is adafactor, which DeepSpeed's ZeRO cannot div"),
        ({"optim": "paged_adamw_8bit"}, "optim is paged_adamw_8bit, which FSDP cannot divide: choose one of"),
        ({"technique": "qlora", "parallel": "zero3"}, "technique is qlora, but parallel is zero3"),
        (
            {"precision": "bf16-mixed", "parallel": "zero2"},
            "DeepSpeed's bf16 keeps an fp32 copy of the weights already",
        ),
        ({"precision": "fp16-mixed"}, "precision is fp16-mixed, which fsdp does not scale losses for"),
        ({"gradient_checkpointing": True, "use_reentrant": True}, "use_reentrant is True, which is for single and mp"),
        ({"offload": "cpu"}, "offload is cpu, but device is cpu"),
        ({"parallel": "single", "devices": 1, "offload": "cpu"}, "offload is cpu, which is for fsdp and zero"),
        ({"dp_replicate_size": 2}, "dp_replicate_size is 2, but 2 devices cannot form 2 equal groups of two or more"),
        ({"dp_replicate_size": 4, "devices": 6}, "dp_replicate_size is 4, but 6 devices cannot form 4 equal groups"),
        ({"dp_replicate_size": 2, "devices": 4, "parallel": "zero3"}, "dp_replicate_size is 2, which is for fsdp"),
    ],
)
def test_what_contradicts_sharding_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        replace(FSDP, **changes)


def test_zero_without_deepspeed_or_on_a_cpu_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInputError, match="DeepSpeed's, which is not installed: `make deepspeed`"):
        check_deepspeed()
    monkeypatch.setattr(zero.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(zero.shutil, "which", lambda name: None)
    with pytest.raises(BadInputError, match="no C\\+\\+ compiler"):
        check_deepspeed()


def test_the_folder_s_workflow_does_sharding_and_ddp_and_nothing_else() -> None:
    for changes in (*({"parallel": way} for way in ("ddp", "fsdp", "zero1", "zero2", "zero3")), {"technique": "lora"}):
        check_folder(replace(ZERO, **changes))
    with pytest.raises(BadInputError, match=r"parallel is pp, but the workflow of 2\.6"):
        check_folder(replace(FSDP, parallel="pp", micro_batches=2))
    with pytest.raises(BadInputError, match="parallel is fsdp"):
        check_folder(RunConfig(parallel="fsdp", devices=2, run_folder="2.2_lora_finetuning_with_ddp/run_0_cpu_x2"))


# -- truth checks


def test_a_whole_model_is_no_sharded_one() -> None:
    with pytest.raises(RuntimeError, match=r"21 of 21 weights were to be sharded, but are whole on every rank"):
        check_fully_sharded(toy(), 2)


@pytest.mark.parametrize("local", [48, 50, 52])
def test_a_rank_holds_its_part(local: int) -> None:
    check_part("weights", local, (50, 50))


@pytest.mark.parametrize("local", [0, 47, 53, 100])
def test_a_rank_with_less_or_more_than_its_part_is_refused(local: int) -> None:
    with pytest.raises(RuntimeError, match="This rank holds"):
        check_part("weights", local, (50, 50))


def test_a_rank_may_hold_as_much_as_weights_cut_along_their_first_dimension_leave_it() -> None:
    """Of 8 rows that 3 ranks divide, the last one has 2 and the others 3; of 4 rows the last one has none."""
    adapter = [torch.empty(8, 16), torch.empty(4, 8)]
    parts = part_bytes(adapter, 3)
    assert (parts, part_bytes([torch.empty(8, 4)], 2)) == ((2 * 16 * 4, (3 * 16 + 2 * 8) * 4), (64, 64))
    for rank in range(3):
        check_part(
            "weights", sum(part.nbytes for weight in adapter for part in weight.chunk(3)[rank : rank + 1]), parts
        )
    for wrong in (0, (8 * 16 + 4 * 8) * 4):
        with pytest.raises(RuntimeError, match="This rank holds"):
            check_part("weights", wrong, parts)


def test_a_layer_within_another_one_is_divided_first_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As hybrids have them: PyTorch refuses the inner one after the outer one."""
    model, divided = toy(), Mock()
    outer, inner = model.model.layers
    outer.inside = inner
    for layer in (outer, inner):
        layer.set_modules_to_forward_prefetch = layer.set_modules_to_backward_prefetch = Mock()
    monkeypatch.setattr("common.training.fsdp.fully_shard", divided)
    shard(model, FSDP, Mock())
    assert [call.args[0] for call in divided.call_args_list] == [inner, outer, model]
    assert "together in the root: 8,224 weights" in describe_wrapping(model)  # embeddings, head and last norm


def test_mixed_precision_gathers_16_bits_and_adds_up_in_32() -> None:
    policy = mixed_precision(replace(FSDP, precision="bf16-mixed"))
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert mixed_precision(FSDP).param_dtype is None


# -- DeepSpeed's settings


def test_deepspeed_is_told_the_stage_and_the_run_s_own_settings() -> None:
    run = replace(ZERO, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_grad_norm=0.5)
    config = deepspeed_config(run, hidden_size=128)
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    assert [config[name] for name in names] == [4, 2, 0.5]
    assert config["bf16"]["enabled"] is False
    in_use = config["zero_optimization"]
    assert (in_use["stage"], in_use[PERSISTENT], "auto" in in_use.values()) == (3, 1280, False)
    assert PERSISTENT not in deepspeed_config(replace(ZERO, parallel="zero1"))["zero_optimization"]
    on_gpu = replace(ZERO, device="cuda", gpu="A100 80GB SXM", offload="cpu")
    assert deepspeed_config(on_gpu)["zero_optimization"]["offload_param"]["device"] == "cpu"


# -- traffic


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """Of which this process is the first; the others are not there, and their collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
def test_what_copies_and_shards_exchange_may_take_as_long_as_any_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(FSDP, devices=4, dp_replicate_size=2, step_timeout_s=77)
    make, allowed_s = distributed_c10d._new_process_group_helper, []

    def watched(*args: Any, timeout: timedelta, **kwargs: Any) -> Any:
        allowed_s.append(timeout.total_seconds())
        return make(*args, timeout=timeout, **kwargs)

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", watched)
    mesh = mesh_of(Rank(0, 4, "cpu", "torchrun"), run)
    assert allowed_s == [exchange_timeout(run).total_seconds()] * 4
    assert [dist.get_process_group_ranks(mesh[name].get_group()) for name in ("replicate", "shard")] == [[0, 2], [0, 1]]


@pytest.mark.usefixtures("one_rank")
def test_saving_in_the_background_has_the_runs_time_out(tmp_path: Path) -> None:
    part = Mock(is_whole=False, **{"state.return_value": {}})
    saver = Mock(part=part, group=None, log=Mock(run=FSDP), rank=Rank(0, 2, "cpu", "torchrun"))
    Saver._write(saver, tmp_path, is_full=True)
    assert saver.group._get_backend(torch.device("cpu")).options._timeout == exchange_timeout(FSDP)


def test_collectives_count_as_in_a_ring_of_their_own_group(four_ranks: None) -> None:
    pair, part, whole = dist.new_group([0, 1]), torch.zeros(25), torch.zeros(100)
    with SentBytes() as sent:
        dist.all_reduce(whole)
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
    assert sent.bytes_by_collective == {"allreduce_": 400, "_allgather_base_": 400, "_reduce_scatter_base_": 400}
    assert sent.sent_bytes == 3 / 4 * (2 + 1 + 1) * 400
    with SentBytes() as of_pair:
        dist.all_reduce(whole, group=pair)
        wait_tensor(all_reduce(whole, "sum", pair))
    assert of_pair.sent_bytes == 1 / 2 * 2 * 2 * 400


def test_the_root_s_step_counts_its_ranks() -> None:
    assert (FSDP.world_size, FSDP.data_parallel_ranks, FSDP.devices, FSDP.effective_batch_size) == (2, 2, 2, 32)
    assert replace(FSDP, learning_rate_scaling="sqrt").peak_learning_rate == pytest.approx(1e-3 * 2**0.5)


# -- on machines with several GPUs


@pytest.mark.usefixtures("one_rank")
def test_scales_of_offloaded_4_bit_weights_are_where_these_are_computed_with() -> None:
    """`meta` stands in for a GPU."""
    pytest.importorskip("bitsandbytes")
    run = replace(FSDP, technique="qlora", precision="bf16", device="cuda", gpu="A100 80GB SXM", offload="cpu")
    mesh = mesh_of(Rank(0, 1, "cpu", "torchrun"), run)
    model = load_rows(run, Rank(0, 1, "meta", "torchrun"), mesh)
    quantized = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert local_part(quantized.weight).device.type == "cpu"
    tensors = [value for value in quantized.quant_state.as_dict().values() if torch.is_tensor(value)]
    assert {value.device.type for value in tensors} == {"meta"}


def test_a_stage_without_gradients_takes_part_in_the_norm_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL sums nothing that is on the CPU; `meta` stands in for a GPU."""
    summed: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: summed.append(tensor))
    stage = Stage.__new__(Stage)
    stage.model, stage.rank = torch.nn.Linear(1, 1, device="meta"), Rank(1, 2, "meta", "torchrun")
    stage._tied_weight = lambda: None
    stage.clip_gradients(1.0)
    assert [each.device.type for each in summed] == ["meta"]


def test_gradients_that_deepspeed_keeps_are_looked_at() -> None:
    part = ZeroPart.__new__(ZeroPart)
    part.model = torch.nn.Linear(1, 1)
    kept = {0: [torch.tensor([1.0]), torch.tensor([torch.nan])], 1: None}
    part.module = SimpleNamespace(optimizer=SimpleNamespace(averaged_gradients=kept))
    assert torch.isnan(get_total_norm(part.gradients()))
    part.model.weight.grad = torch.full((1, 1), 2.0)
    assert [gradient.item() for gradient in part.gradients()][::2] == [1.0, 2.0]
