"""Seconds, bytes sent and bills: known formulas, and what must hold for any plan."""

from dataclasses import replace

import pytest

from bench.published import published_runs
from common.base.run_config import RunConfig
from common.hardware.devices import CPU_DEVICE, cpu_device, find_gpu
from common.planning.architectures import Architecture, as_classifier, read_architecture
from common.planning.job import ALL_LINEAR, BatchShape, Job
from common.planning.plans import make_plan
from common.planning.shares import part_of_rank, whole_model
from common.planning.step_speed import StepFlops, step_flops
from common.planning.time_plan import (
    MIN_CALIBRATION_STEPS,
    Cluster,
    Speed,
    calibration_from,
    fast_enough_from_gbit,
    parse_link,
    speed_of,
    step_time,
    traffic,
)

LLAMA = read_architecture("llama-3.1-8b")
BART = read_architecture("bart-large-cnn")
ROBERTA = read_architecture("roberta-large")
A100, V100 = find_gpu("a100-80gb"), find_gpu("v100-16gb")
BATCH = BatchShape(4, 512, 512)
FULL = Job(technique="full", parallel="single", batch=BATCH)


def flops_of(job: Job, architecture: Architecture = LLAMA) -> StepFlops:
    return step_flops(architecture, job, whole_model(architecture))


def test_full_training_takes_six_operations_per_weight_and_token() -> None:
    """And a little for attention; four with frozen weights, and a third more with checkpointing."""
    full = flops_of(FULL).total
    per_weight = BATCH.tokens * (LLAMA.parameters - LLAMA.embedding_parameters)
    assert full / per_weight == pytest.approx(6, rel=0.03)
    assert flops_of(replace(FULL, technique="lora")).total / per_weight == pytest.approx(4, rel=0.05)
    assert flops_of(replace(FULL, gradient_checkpointing=True)).total / full == pytest.approx(4 / 3, rel=0.03)


def test_linear_layers_alone_need_no_gradients_of_the_head_s_weights() -> None:
    every, linears, only_v = (flops_of(replace(FULL, target_modules=names)) for names in ((), ALL_LINEAR, ("v_proj",)))
    head = 2 * BATCH.tokens * LLAMA.vocab * LLAMA.hidden
    assert every.weight_gradients - linears.weight_gradients == pytest.approx(head)
    assert every.forward == linears.forward
    assert only_v.weight_gradients == pytest.approx(2 * BATCH.tokens * LLAMA.by_part()["v_proj"])


def test_gpipe_computes_the_losses_logits_twice() -> None:
    one_f_one_b = replace(FULL, parallel="pp", devices=2, micro_batches=4)
    more = flops_of(replace(one_f_one_b, schedule="gpipe")).total - flops_of(one_f_one_b).total
    assert more == pytest.approx(2 * BATCH.tokens * LLAMA.vocab * LLAMA.hidden)


def test_what_a_ring_sends() -> None:
    ddp = replace(FULL, parallel="ddp", devices=4)
    of_ddp = 2 * 3 / 4 * LLAMA.parameters * 2
    root = LLAMA.parameters - LLAMA.stacks[0].layers * LLAMA.stacks[0].layer_parameters  # gathered once, not twice
    expected = {
        "ddp": of_ddp,
        "zero2": of_ddp,
        "zero3": 1.5 * of_ddp - 3 / 4 * 1e9 * 2,  # a billion weights stay
        "fsdp": 1.5 * of_ddp - 3 / 4 * root * 2,
    }
    assert {way: sum(traffic(LLAMA, replace(ddp, parallel=way))) for way in expected} == pytest.approx(expected)
    assert sum(traffic(LLAMA, replace(ddp, technique="lora"))) < 0.01 * of_ddp
    assert sum(traffic(LLAMA, FULL)) == 0
    mixed, bf16 = (
        sum(traffic(LLAMA, replace(ddp, parallel="fsdp", precision=name))) for name in ("bf16-mixed", "bf16")
    )
    assert mixed - bf16 == pytest.approx(3 / 4 * LLAMA.parameters * 2)  # gradients as they are added up: in fp32


def test_hybrid_sharding_gathers_within_a_copy_and_averages_gradients_between_copies() -> None:
    hybrid = replace(FULL, parallel="fsdp", devices=8, dp_replicate_size=2)
    of_four, nothing = traffic(LLAMA, replace(FULL, parallel="fsdp", devices=4))
    assert traffic(LLAMA, hybrid) == pytest.approx((of_four, 2 * 1 / 2 * LLAMA.parameters * 2 / 4))
    assert (nothing, hybrid.shard_ranks, hybrid.sharing) == (0, 4, "fsdp-2x4")


def test_hybrid_sharding_gathers_by_the_link_in_a_machine_and_its_rings_share_the_network() -> None:
    machines = Cluster((find_gpu("a100-80g"),) * 8, nodes=2)
    hybrid = replace(FULL, parallel="fsdp", devices=8, dp_replicate_size=2)
    shares, speeds = [whole_model(LLAMA)] * 8, [Speed(1e20, "a test's")] * 8
    gathered, averaged = traffic(LLAMA, hybrid)
    in_machine, network = (link.gb_per_s * 1e9 for link in (machines.link_among(4), machines.slowest_link))
    assert in_machine > 10 * network
    step = step_time(LLAMA, hybrid, machines, shares, speeds)
    in_all_s = gathered / in_machine + 4 * averaged / network
    assert step.compute_s + step.exposed_s == pytest.approx(in_all_s)  # what computing does not hide
    accumulated = step_time(LLAMA, replace(hybrid, accumulation_steps=4), machines, shares, speeds)
    assert accumulated.sent_gb * 1e9 == pytest.approx(gathered + averaged / 4)  # copies average once per update


def test_tensor_parallel_divides_layers_and_waits_for_its_sums() -> None:
    job = replace(FULL, parallel="tp", devices=4)
    hidden = BATCH.tokens * ROBERTA.hidden
    sums = ROBERTA.layers * (2 * 2 + 2 * 4)  # two in bf16, and their inputs' gradients in fp32
    between = ROBERTA.layers * 2 * BATCH.tokens * job.lora_rank * 2
    for changes, summed in (
        ({}, hidden * sums),
        ({"gradient_checkpointing": True}, hidden * (sums + ROBERTA.layers * 2 * 2)),
        # nothing before the first layer's attention is trained
        ({"target_modules": ("query",)}, hidden * (sums - 4)),
        ({"target_modules": ("output.dense",)}, hidden * (sums - 2 * 4)),
        ({"technique": "lora", "target_modules": ("query", "value")}, hidden * (sums - 4) + between),
    ):
        assert sum(traffic(ROBERTA, replace(job, **changes))) == 2 * 3 / 4 * summed, changes
    one_flops, flops = (flops_of(each, part_of_rank(ROBERTA, each)).total for each in (FULL, job))
    head = 6 * BATCH.tokens * ROBERTA.vocab * ROBERTA.hidden
    assert flops - head == pytest.approx((one_flops - head) / 4, rel=0.01)
    many = BatchShape(64, 512, 512)  # few rows would wait for launches, which are as many on each rank
    one, four = (
        make_plan(ROBERTA, replace(each, batch=many), Cluster((A100,) * each.devices), {}).time for each in (FULL, job)
    )
    assert one.compute_s / 4 < four.compute_s < one.compute_s / 2  # norms and head are whole on each
    sent_s = four.sent_gb / Cluster((A100,) * 4).slowest_link.gb_per_s
    assert four.exposed_s == pytest.approx(sent_s)  # nothing hides it
    assert sent_s > 0


def test_a_classifier_s_head_takes_next_to_nothing() -> None:
    flops = flops_of(replace(FULL, batch=BatchShape(4, 512, 1, classes=3)), as_classifier(ROBERTA, 3)).total
    layers = sum(linear.inputs * linear.outputs for linear in ROBERTA.stacks[0].linears) * ROBERTA.layers
    assert flops / (BATCH.tokens * layers) == pytest.approx(6, rel=0.1)


def test_an_encoder_decoder_works_on_texts_and_summaries_each_in_its_stack() -> None:
    """Each token takes six operations per weight that reads it; cross attention's keys and values read the text."""
    flops = flops_of(replace(FULL, batch=BatchShape(4, 512, labelled=64, target_length=64)), BART)
    sizes = {True: 0, False: BART.vocab * BART.hidden}  # of what reads the text, and of what reads the summary
    for stack in BART.stacks:
        for linear in stack.linears:
            reads_text = stack.kind == "encoder" or linear.reads_encoder
            sizes[reads_text] += stack.layers * linear.inputs * linear.outputs
    products = 6 * 4 * (512 * sizes[True] + 64 * sizes[False])
    scores = 3 * 4 * 4 * BART.hidden * 12 * (512 * 512 + 64 * 64 / 2 + 64 * 512)
    assert flops.total == pytest.approx(products + scores)
    assert [linear.name for linear in BART.stacks[1].linears if linear.reads_encoder] == ["k_proj", "v_proj"]


@pytest.mark.parametrize(("parallel", "times"), [("ddp", 4), ("fsdp", 1)])
def test_accumulation_sends_and_updates_once_for_several_micro_batches(parallel: str, times: int) -> None:
    """DDP keeps gradients until the last one; FSDP gathers weights for each."""
    slow = Cluster((A100,) * 4, link=parse_link("ethernet-1", A100))
    job = replace(FULL, parallel=parallel, devices=4)
    step, part = (make_plan(LLAMA, replace(job, accumulation_steps=steps), slow, {}).time for steps in (1, 4))
    assert part.compute_s == step.compute_s
    found = [part.optimizer_s, part.sent_gb, part.exposed_s]
    assert found == pytest.approx([step.optimizer_s / 4, step.sent_gb / times, step.exposed_s / times])


@pytest.mark.parametrize(("precision", "rows", "rows_per_s"), [("fp32", 8, 33.36), ("fp16-mixed", 16, 125.44)])
def test_fp32_is_slower_than_half_precision_as_published(precision: str, rows: int, rows_per_s: float) -> None:
    """BERT-large on a V100: 33.36 rows of 128 tokens per second, and 125.44 (NVIDIA's DeepLearningExamples)."""
    bert = next(rate for rate in published_runs() if rate.source == "nvidia-bert")
    job = replace(bert.jobs[0], batch=BatchShape(rows, 128, 128), precision=precision)
    plan = make_plan(bert.architecture, job, Cluster((V100,)), {})
    assert plan.tokens_per_s == pytest.approx(rows_per_s * 128, rel=0.35)


def test_one_after_the_other_takes_as_long_as_one_and_micro_batches_less() -> None:
    alone, naive, piped = (
        make_plan(
            LLAMA, replace(FULL, batch=BatchShape(16, 1024, 1024), **changes), Cluster((A100,) * devices), {}
        ).time
        for devices, changes in (
            (1, {}),
            (4, {"parallel": "mp", "devices": 4}),
            (4, {"parallel": "pp", "devices": 4, "micro_batches": 4}),
        )
    )
    assert naive.compute_s + naive.bubble_s == pytest.approx(alone.compute_s, rel=0.05)
    assert piped.total_s < 0.65 * naive.total_s  # the last stage, with the head, computes longest
    assert piped.bubble_s / (piped.bubble_s + piped.compute_s) == pytest.approx((4 - 1) / (4 + 4 - 1), rel=0.02)


def test_a_slower_link_never_helps() -> None:
    job = replace(FULL, parallel="ddp", devices=4)
    times = [
        make_plan(LLAMA, job, Cluster((A100,) * 4, link=parse_link(link, A100)), {}).time.total_s
        for link in ("nvlink", "pcie", "ethernet-100", "ethernet-49", "ethernet-25", "ethernet-1")
    ]
    assert times == sorted(times)
    assert times[-1] > 5 * times[0]


def test_many_machines_bill_more_until_their_network_is_fast() -> None:
    """Seed 5's comparison: one machine of four V100 against four machines of one."""
    job = Job(technique="full", parallel="ddp", devices=4, batch=BATCH, precision="fp16-mixed")
    together, apart = Cluster((V100,) * 4), Cluster((V100,) * 4, nodes=4)
    slow = replace(apart, link=parse_link("ethernet-10", V100))
    bill, target = (make_plan(BART, job, cluster, {}).epoch_usd(1000) for cluster in (slow, together))
    assert bill > target
    alone_s = make_plan(BART, job, together, {}).time.total_s
    gbit, never, cheap = (
        fast_enough_from_gbit(BART, job, each, alone_s * together.usd_per_second / each.usd_per_second, {})
        for each in (replace(apart, usd_per_hour=usd) for usd in (apart.usd_per_hour, 100.0, 0.01))
    )
    assert never is None
    assert cheap < gbit


def record_of(run: RunConfig, tokens_per_s: float, devices: tuple[str, ...] = ("NVIDIA A100-SXM4-80GB",)) -> dict:
    """Return the record of a run with rows of 512 tokens."""
    return {
        "status": "completed",
        "technique": run.technique,
        "parallel": run.parallel,
        "config": run.to_dict(),
        "environment": {"devices": list(devices)},
        "planned": {"batch": {"rows": run.per_device_train_batch_size, "length": 600, "labelled": 600}},
        "steps": MIN_CALIBRATION_STEPS,
        "tokens_per_s": tokens_per_s,
        "flops_per_token": 1e6,
        "world": [{"samples": 100, "tokens": 51_200}] * len(devices),
    }


def test_kept_runs_say_how_many_times_as_fast_their_gpu_is() -> None:
    run = RunConfig(
        technique="full", device="cuda", gpu=A100.name, model="llama-3.1-8b", weights="random", precision="bf16",
        target_modules="all", per_device_train_batch_size=4, max_length=600,
    )  # fmt: skip
    modelled = BATCH.tokens / make_plan(LLAMA, FULL, Cluster((A100,)), {}).time.compute_s
    record = record_of(run, 1.5 * modelled)
    unused = [
        {**record, "status": "failed"},
        {**record, "planned": None},
        {**record, "steps": MIN_CALIBRATION_STEPS - 1},
        record_of(run, modelled, ("NVIDIA A100-SXM4-80GB",) * 2),
        record_of(run, modelled, ("an unheard-of card",)),
    ]
    assert calibration_from(unused) == calibration_from([record], "summarization") == {}
    calibration = calibration_from([record])
    assert calibration == {A100.name: [pytest.approx(1.5)]}
    for job in (FULL, replace(FULL, technique="lora", batch=BatchShape(1, 64, 64))):
        uncalibrated, calibrated = (make_plan(LLAMA, job, Cluster((A100,)), known) for known in ({}, calibration))
        assert uncalibrated.time.compute_s == pytest.approx(1.5 * calibrated.time.compute_s)
    assert "measured 1.50 times as fast, median of 1 records" in speed_of(A100, FULL, calibration).source
    assert "measured" not in speed_of(A100, FULL, {}).source


@pytest.mark.parametrize(("technique", "again"), [("full", 4 / 3), ("lora", 3 / 2)])
def test_kept_runs_say_how_many_operations_a_cpu_does(technique: str, again: float) -> None:
    """Checkpointing's second forward pass is a third more of full training's, and half more of LoRA's."""
    run = RunConfig(technique=technique, target_modules="all-linear")
    records = [record_of(replace(run, gradient_checkpointing=on), 1000.0, ("a CPU",)) for on in (False, True)]
    assert calibration_from(records) == {CPU_DEVICE: [1e9, pytest.approx(again * 1e9)]}
    job = replace(FULL, precision="fp32")
    plan = make_plan(LLAMA, job, Cluster((cpu_device(),)), {CPU_DEVICE: [1e9]})
    assert plan.time.compute_s == pytest.approx(flops_of(job).total / 1e9)
