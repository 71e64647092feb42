"""What a machine's own memory holds for its GPUs."""

from dataclasses import replace

import pytest

from common.base.errors import BadInputError
from common.base.specs import PARALLELISMS
from common.checks.planner_command import as_json
from common.hardware.devices import GIB, find_gpu
from common.models.placement import check_host
from common.planning.architectures import read_architecture
from common.planning.host_memory import LEAST_FILES, file_bytes, host_moments
from common.planning.job import BatchShape, Job
from common.planning.plan_texts import explanation
from common.planning.plans import make_plan
from common.planning.time_plan import Cluster

BATCH = BatchShape(1, 512, 511)
LLAMA = read_architecture("llama-3.1-8b")
WEIGHTS = 8_030_261_248
MACHINE = Cluster((find_gpu("a100-80g"),) * 8)
SHARDED = Job("full", "fsdp", BATCH, devices=8, precision="bf16-mixed")


def gib(job: Job, machines: int = 1, phase: str = "training") -> float:
    return sum(term.gib for term in host_moments(LLAMA, job, machines)[phase])


COPIES = WEIGHTS * (4 + 8)
OFFLOADED = replace(SHARDED, offload=True)
ZERO = replace(OFFLOADED, parallel="zero3", precision="bf16")


@pytest.mark.parametrize("parallel", [name for name, each in PARALLELISMS.items() if not each.saves_in_background])
def test_nothing_is_copied_where_training_waits_for_the_disk(parallel: str) -> None:
    devices = 1 if PARALLELISMS[parallel].is_single else 2
    assert gib(Job("full", parallel, BATCH, devices=devices)) == 0


LORA = replace(SHARDED, technique="lora", precision="bf16")


@pytest.mark.parametrize(
    ("job", "machines", "phase", "expected_bytes"),
    [
        (SHARDED, 1, "training", COPIES),
        (SHARDED, 2, "training", COPIES / 2),
        (replace(SHARDED, dp_replicate_size=2), 2, "training", COPIES),  # whole copies on each machine
        # one rank copies a whole model
        (replace(SHARDED, parallel="single", devices=1), 1, "training", COPIES),
        (replace(SHARDED, parallel="ddp"), 1, "training", COPIES),
        (replace(SHARDED, parallel="mp", devices=2), 1, "training", COPIES),
        (replace(SHARDED, technique="lora"), 1, "training", 0),  # too little to be copied
        (OFFLOADED, 1, "training", COPIES + WEIGHTS * (8 + 4 + 4)),  # states, weights, gradients
        (ZERO, 1, "training", WEIGHTS * 18),  # DeepSpeed's own estimate
        (replace(ZERO, parallel="zero2"), 1, "training", WEIGHTS * 16),
        (SHARDED, 1, "loading", 128_256 * 4096 * 4),  # each of 8 ranks an eighth of the embeddings
        (replace(SHARDED, parallel="zero3"), 1, "loading", 8 * 128_256 * 4096 * 2),  # a whole weight on each
        (replace(OFFLOADED, precision="bf16"), 1, "loading", WEIGHTS * 2 + 128_256 * 4096 * 2),
        (SHARDED, 1, "saving", file_bytes(WEIGHTS * 4)),  # and not the model
        (replace(SHARDED, parallel="pp"), 2, "saving", WEIGHTS * 4 / 2 / LEAST_FILES),  # each rank a file of its stage
        (LORA, 1, "merging", WEIGHTS * 2 / LEAST_FILES),
        (LORA, 2, "merging", WEIGHTS / LEAST_FILES),
        (replace(LORA, devices=64), 2, "merging", WEIGHTS * 2 / LEAST_FILES),  # 32 layers: 32 stages, all on machine 0
        (replace(LORA, technique="qlora"), 2, "merging", WEIGHTS),  # on the host, where the GPU has no room
        (replace(LORA, parallel="ddp"), 1, "merging", WEIGHTS * 2),  # rank 0 alone
        (replace(LORA, technique="qlora", parallel="ddp"), 1, "merging", WEIGHTS * 2),
        (replace(LORA, technique="qlora", parallel="single", devices=1), 1, "merging", 2 * WEIGHTS * 2),  # in 2.3
        (SHARDED, 1, "merging", 0),
    ],
)
def test_a_phase_holds_on_the_host_what_it_copies_offloads_loads_saves_or_merges(
    job: Job, machines: int, phase: str, expected_bytes: float
) -> None:
    """Copies of checkpoints and what is offloaded; of models a weight in loading, a file in saving, merged stages."""
    assert gib(job, machines, phase) == pytest.approx(expected_bytes / GIB)


def test_the_plan_shows_it() -> None:
    plan = make_plan(LLAMA, SHARDED, MACHINE, {})
    assert f"{plan.host_gib:.1f}" in explanation(plan)
    assert as_json("llama-3.1-8b", [plan], [], 100)["ranked"][0]["host_gib"] == plan.host_gib


def test_a_machine_without_room_for_what_is_offloaded_is_refused() -> None:
    plan, needed = make_plan(LLAMA, OFFLOADED, MACHINE, {}), WEIGHTS * 16
    check_host(plan, needed + 1)
    with pytest.raises(BadInputError, match=f"{needed / GIB:.1f} GiB in the machine's own memory.* 60.0 GiB are free"):
        check_host(plan, 60 * GIB)
