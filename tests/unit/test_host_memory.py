"""What a machine's own memory holds for its GPUs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from common.base.errors import BadInputError
from common.base.specs import PARALLELISMS
from common.hardware.devices import GIB, find_gpu
from common.planning.architectures import read_architecture
from common.planning.host_memory import host_terms
from common.planning.job import BatchShape, Job
from common.planning.plans import as_json, explanation, make_plan
from common.planning.time_plan import Cluster
from common.training.placement import check_host
from common.training.strategy import strategy_class

BATCH = BatchShape(1, 512, 511)
LLAMA = read_architecture("llama-3.1-8b")
WEIGHTS = 8_030_261_248
SHARDED = Job("full", "fsdp", BATCH, devices=8, precision="bf16-mixed")


def gib(job: Job, machines: int = 1) -> float:
    return sum(term.gib for term in host_terms(LLAMA, job, machines))


def test_the_copies_of_checkpoints_have_weights_twice_and_states() -> None:
    """Best weights may wait for a full state that is being written."""
    assert gib(SHARDED) == pytest.approx(WEIGHTS * (2 * 4 + 8) / GIB)
    assert gib(SHARDED, machines=2) == pytest.approx(WEIGHTS * (2 * 4 + 8) / 2 / GIB)
    hybrid = replace(SHARDED, dp_replicate_size=2)
    assert gib(hybrid, machines=2) == pytest.approx(WEIGHTS * (2 * 4 + 8) / GIB)  # whole copies on each machine


@pytest.mark.parametrize(("parallel", "devices"), [("single", 1), ("ddp", 8), ("mp", 2)])
def test_a_whole_model_is_copied_by_one_rank(parallel: str, devices: int) -> None:
    assert gib(replace(SHARDED, parallel=parallel, devices=devices)) == pytest.approx(WEIGHTS * (2 * 4 + 8) / GIB)


@pytest.mark.parametrize("parallel", [name for name, each in PARALLELISMS.items() if not each.saves_in_background])
def test_nothing_is_copied_where_training_waits_for_the_disk(parallel: str) -> None:
    devices = 1 if PARALLELISMS[parallel].is_single else 2
    assert gib(Job("full", parallel, BATCH, devices=devices)) == 0


def test_adapters_are_too_little_to_be_copied() -> None:
    assert gib(replace(SHARDED, technique="lora")) == 0


def test_what_is_offloaded_is_on_the_host() -> None:
    copied, offloaded = gib(SHARDED), gib(replace(SHARDED, offload=True))
    assert offloaded - copied == pytest.approx(WEIGHTS * (8 + 4 + 4) / GIB)  # states, weights, gradients
    zero = replace(SHARDED, parallel="zero3", precision="bf16", offload=True)
    assert gib(zero) == pytest.approx(WEIGHTS * 18 / GIB)  # DeepSpeed's own estimate
    assert gib(replace(zero, parallel="zero2")) == pytest.approx(WEIGHTS * 16 / GIB)


def test_the_plan_shows_it() -> None:
    cluster = Cluster((find_gpu("a100-80g"),) * 8)
    plan = make_plan(LLAMA, SHARDED, cluster, {})
    assert f"{plan.host_gib:.1f}" in explanation(plan)
    assert as_json("llama-3.1-8b", [plan], [], 100)["ranked"][0]["host_gib"] == plan.host_gib


def test_a_machine_without_room_for_what_is_offloaded_is_refused() -> None:
    cluster = Cluster((find_gpu("a100-80g"),) * 8)
    plan = make_plan(LLAMA, replace(SHARDED, offload=True), cluster, {})
    needed = int(WEIGHTS * 16)
    check_host(plan, needed + 1)
    with pytest.raises(BadInputError, match=f"{needed / GIB:.1f} GiB in the machine's own memory.* 60.0 GiB are free"):
        check_host(plan, 60 * GIB)


@pytest.mark.parametrize("name", [name for name, each in PARALLELISMS.items() if each.strategy])
def test_what_is_planned_to_be_saved_in_the_background_is(name: str) -> None:
    parallelism = PARALLELISMS[name]
    assert (
        strategy_class(SimpleNamespace(parallelism=parallelism)).saves_in_background == parallelism.saves_in_background
    )
