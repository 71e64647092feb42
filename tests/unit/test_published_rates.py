"""The planner's times beside rates that others published, and what must hold where nothing is published."""

from collections import defaultdict
from dataclasses import replace
from itertools import product
from statistics import median

import pytest

from bench.published import beside_planned, content, published_runs, rates_not_used
from bench.tables.publications import RATES_BY_SOURCE, WELL_KNOWN, is_near
from common.base.paths import REPOSITORY
from common.hardware.devices import CATALOGUE, Gpu, cpu_device, find_gpu
from common.planning.architectures import Architecture, read_architecture
from common.planning.job import BatchShape, Job, Kernels
from common.planning.model_configs import MODEL_CONFIGS
from common.planning.plans import make_plan
from common.planning.published_rates import SLOWER, best_published, evidence, published_planned, published_rates
from common.planning.shares import whole_model
from common.planning.step_speed import GENERATIONS, UNKNOWN, computing_time, generation_of, step_bytes
from common.planning.time_plan import Cluster, speed_of, step_time

# sources that the constants do as well on when they are fitted without them (assets/README.md)
HELD_OUT = {"peft", "torchtitan", "automodel", "vectorlm", "ms-swift", "kempnerforge"}
LLAMA = read_architecture("llama-3.1-8b")
FROM_1B = [
    architecture
    for architecture in (read_architecture(path.stem) for path in sorted(MODEL_CONFIGS.glob("*.json")))
    if architecture.parameters >= 1e9
]
LORA = Job(technique="lora", parallel="single", batch=BatchShape(4, 1024, 1024))
FULL = replace(LORA, technique="full")
H100 = find_gpu("h100")


@pytest.mark.parametrize("sources", [None, HELD_OUT], ids=["all", "held out"])
def test_planned_rates_are_near_the_published_ones(sources: set[str] | None) -> None:
    rates = [rate for rate in published_rates() if sources is None or rate["source"] in sources]
    assert len(rates) >= (600 if sources is None else 48)
    assert median(abs(rate["ratio"] - 1) for rate in rates) <= 0.2
    assert sum(map(is_near, rates)) >= 0.9 * len(rates)


@pytest.mark.parametrize("technique", ["full", "lora", "qlora"])
def test_no_technique_is_planned_too_fast_or_too_slow(technique: str) -> None:
    ratios = [rate["ratio"] for rate in published_rates() if rate["technique"] == technique]
    assert len(ratios) > 50
    assert 0.9 < median(ratios) < 1.1


def test_every_point_names_its_source_and_every_exclusion_its_reason() -> None:
    assert all(rate.where.count("/") >= 1 and ":" in rate.where and rate.stated for rate in published_runs())
    assert all(entry["reason"] and entry["sources"] for entry in rates_not_used())
    assert set(WELL_KNOWN) <= {rate["label"] for rate in published_rates()}


def test_what_is_kept_of_published_runs_is_what_the_planner_says_of_them_now() -> None:
    assert published_planned() == content(), "run python -m bench.published"


def test_the_page_has_every_point() -> None:
    page = (REPOSITORY / "docs" / "published_rates.md").read_text(encoding="utf-8")
    assert all(f"<!-- table: {name} -->" in page for name in RATES_BY_SOURCE)
    assert sum(len(table([])) for table in RATES_BY_SOURCE.values()) == len(published_rates())
    assert all(f"https://github.com/{rate['repository']})" in page for rate in published_rates())


def planned_s(architecture: Architecture, job: Job, gpu: Gpu) -> float:
    share, speed = whole_model(architecture), speed_of(gpu, job, {})
    return step_time(architecture, job, Cluster((gpu,)), [share], [speed]).total_s


def extremes() -> list[Gpu]:
    """Of each generation, the GPUs with most and least memory bandwidth for their arithmetic."""
    by_ratio = sorted(CATALOGUE, key=lambda gpu: gpu.memory_bandwidth_gb_per_s / gpu.tflops_dense["fp16"])
    ends = [{gpu.generation: gpu for gpu in order} for order in (by_ratio, by_ratio[::-1])]
    return list({gpu.name: gpu for end in ends for gpu in end.values()}.values())


@pytest.mark.parametrize("gpu", extremes(), ids=lambda gpu: gpu.name)
def test_lora_is_never_slower_than_full_fine_tuning_of_the_same_rows(gpu: Gpu) -> None:
    precision = "bf16" if gpu.tflops_dense["bf16"] else "fp16-mixed"
    assert len(FROM_1B) >= 5
    for architecture, rows, length, checkpointed in product(FROM_1B, (1, 16), (256, 2048, 8192), (False, True)):
        settings = {"batch": BatchShape(rows, length, length), "precision": precision,
                    "gradient_checkpointing": checkpointed}  # fmt: skip
        lora_s, full_s = (planned_s(architecture, replace(job, **settings), gpu) for job in (LORA, FULL))
        assert lora_s <= full_s, (architecture.name, settings)


def test_what_is_published_agrees_from_4b_parameters_on() -> None:
    """Of steps published with LoRA and with full fine-tuning, LoRA is slower in few, all of smaller models."""
    steps = defaultdict(lambda: defaultdict(list))
    for run in published_runs():
        settings = replace(run.jobs[0], technique="full", lora_rank=8, target_modules=(), precision="bf16")
        key = run.architecture, run.cluster.gpus[0], run.source, settings
        steps[key][run.jobs[0].technique].append(run.tokens_per_s)
    both = {key: rates for key, rates in steps.items() if {"lora", "full"} <= rates.keys()}
    slower = [key for key, rates in both.items() if median(rates["lora"]) < median(rates["full"])]
    assert (len(slower), len(both)) == (10, 47)
    assert all(architecture.parameters < 4e9 and job.batch.length >= 4096 for architecture, _, _, job in slower)


def test_short_rows_wait_for_the_launches_and_long_ones_do_not() -> None:
    short, long, fewer = (
        computing_time(LLAMA, replace(LORA, batch=BatchShape(1, length, length), **changes), whole_model(LLAMA), H100)
        for length, changes in ((64, {}), (4096, {}), (64, {"kernels": "fused"}))
    )
    assert short.total_s == short.launches_s == long.launches_s < long.total_s
    assert fewer.total_s < short.total_s


@pytest.mark.parametrize("kernels", ["fused", "compiled"])
def test_other_kernel_sets_move_less_and_are_faster(kernels: Kernels) -> None:
    share, other = whole_model(LLAMA), replace(LORA, kernels=kernels)
    assert step_bytes(LLAMA, other, share) < 0.8 * step_bytes(LLAMA, LORA, share)
    assert planned_s(LLAMA, other, H100) < 0.9 * planned_s(LLAMA, LORA, H100)


def test_four_bits_cost_as_many_seconds_whatever_the_tokens() -> None:
    """They are unpacked in each pass: the fewer tokens, the more of a step that is."""
    few_s, many_s = (
        planned_s(LLAMA, replace(LORA, technique="qlora", batch=batch), H100)
        - planned_s(LLAMA, replace(LORA, batch=batch), H100)
        for batch in (BatchShape(4, 1024, 1024), BatchShape(16, 1024, 1024))
    )
    assert few_s == pytest.approx(many_s, rel=0.01)
    assert few_s > 0


def test_the_best_published_run_of_its_kind_gives_the_second_figure() -> None:
    qwen, job = read_architecture("qwen2.5-7b"), replace(LORA, batch=BatchShape(2, 4096, 4096))
    plan = make_plan(qwen, job, Cluster((H100,)), {})
    assert plan.tokens_per_s < plan.tokens_per_s_best
    best = best_published("lora", "Hopper", 32_000_000_000)
    run = next(run for run in published_runs() if beside_planned(run)["label"] == best["label"])
    same = make_plan(run.architecture, run.jobs[0], run.cluster, {})
    assert (best["source"], run.architecture.name) == ("surogate", "qwen3-32b")
    assert same.tokens_per_s_best == pytest.approx(best["tokens_per_s"], rel=0.01)  # the very run


def test_nine_in_ten_published_rates_are_no_slower_than_at_most() -> None:
    times = sorted(1 / rate["ratio"] for rate in published_rates())  # as long as planned
    assert times[int(0.9 * len(times))] <= SLOWER


def test_where_nothing_is_published_there_is_no_second_figure_and_it_is_said() -> None:
    t4, a6000, by_hand = find_gpu("t4"), find_gpu("a6000"), replace(H100, name="mine", generation="")
    plan = make_plan(LLAMA, replace(LORA, precision="fp16-mixed"), Cluster((t4,)), {})
    assert plan.tokens_per_s_best is None
    assert "no benchmark of this GPU" in evidence(t4)
    assert "published rates are of it" in evidence(H100)
    assert "no benchmark of this GPU" in evidence(a6000)
    assert "RTX A5000 24GB" in evidence(a6000)
    assert generation_of(by_hand) == generation_of(cpu_device()) == UNKNOWN
    assert UNKNOWN.reached <= min(each.reached for each in GENERATIONS if each.name not in ("CDNA", "RDNA"))
