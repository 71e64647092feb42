"""The arithmetic of memory: known sums, and what must hold for any job."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.architectures import Architecture, read_architecture
from common.hardware import GIB
from common.memory_plan import (
    ALL_LINEAR,
    OPTIMIZER_BYTES,
    PARTS,
    BatchShape,
    Job,
    Share,
    device_memory,
    quantized_weights,
    trained_parameters,
    whole_model,
)
from common.run_config import BadInputError
from common.time_plan import sent_bytes

LLAMA = read_architecture("llama-3.1-8b")
BATCH = BatchShape(2, 512, 511)
FULL = Job(technique="full", parallel="single", batch=BATCH)
LORA = replace(FULL, technique="lora")


def parts(job: Job, architecture: Architecture = LLAMA) -> dict[str, float]:
    return device_memory(architecture, job, whole_model(architecture)).parts_gib


def bytes_per_weight(gib: float) -> float:
    return gib * GIB / LLAMA.parameters


def test_sixteen_bytes_per_trained_weight_as_in_the_seed() -> None:
    """bf16 weight and gradient 2 + 2, momentum, variance and fp32 copy 4 + 4 + 4: what ZeRO keeps of each weight."""
    job = replace(FULL, precision="bf16", parallel="zero1", devices=2, batch=BatchShape(1, 8, 7))
    device = parts(job)
    assert parts(replace(job, precision="bf16-mixed")) == device
    assert bytes_per_weight(device["weights"]) == pytest.approx(2, rel=0.02)
    assert bytes_per_weight(device["gradients"]) == pytest.approx(2, rel=0.02)
    assert bytes_per_weight(device["optimizer"] * 2) == pytest.approx(12, rel=0.02)  # two ranks share it


def test_pure_bf16_takes_eight_bytes_and_fp32_sixteen() -> None:
    tiny = BatchShape(1, 8, 7)
    for precision, expected in (("bf16", 8), ("fp32", 16)):
        device = parts(replace(FULL, precision=precision, batch=tiny))
        resting = device["weights"] + device["gradients"] + device["optimizer"]
        assert bytes_per_weight(resting) == pytest.approx(expected, rel=0.03)


def test_rank_8_on_1024_by_1024_is_a_64th() -> None:
    linear = replace(LLAMA.stacks[0].linears[0], inputs=1024, outputs=1024)
    assert linear.parameters / linear.lora_parameters(8) == 64


def test_lora_trains_what_peft_says() -> None:
    assert trained_parameters(LLAMA, LORA) == 20_971_520
    assert trained_parameters(LLAMA, replace(LORA, target_modules=("q_proj", "v_proj"))) == 3_407_872


def test_full_fine_tuning_may_train_the_linear_layers_alone() -> None:
    linears = replace(FULL, target_modules=ALL_LINEAR)
    by_part = LLAMA.by_part()
    count = sum(number for part, number in by_part.items() if part not in ("embeddings", "norms", "head"))
    assert trained_parameters(LLAMA, linears) == count
    named = replace(FULL, target_modules=("q_proj", "down_proj"))
    assert trained_parameters(LLAMA, named) == by_part["q_proj"] + by_part["down_proj"]
    qwen = read_architecture("qwen2.5-7b")
    (query, *_) = qwen.stacks[0].linears
    assert query.bias
    only_q = replace(FULL, target_modules=("q_proj",))
    assert trained_parameters(qwen, only_q) == qwen.layers * (query.inputs + 1) * query.outputs
    assert (FULL.trains_all, linears.trains_all, LORA.trains_all) == (True, False, False)
    # in fp32, with few tokens, both are highest in a moment that has all gradients
    every, frozen_ends = (parts(replace(job, precision="fp32", batch=BatchShape(1, 8, 7))) for job in (FULL, linears))
    assert frozen_ends["weights"] == every["weights"]
    for part in ("gradients", "optimizer"):
        assert frozen_ends[part] / every[part] == pytest.approx(count / LLAMA.parameters, rel=1e-3)
    assert trained_parameters(LLAMA, replace(LORA, target_modules=ALL_LINEAR)) == trained_parameters(LLAMA, LORA)


def test_a_head_without_last_layers_and_embeddings_alone_are_counted() -> None:
    """A first device with both ends, one with embeddings and one with the head hold what they name, and no more."""
    tied = read_architecture("llama-3.2-1b")
    job = replace(FULL, parallel="mp", devices=2)
    ways = ((True, True), (True, False), (False, True), (False, False))
    ends, embeddings, head, none = (device_memory(tied, job, Share((8,), *held)) for held in ways)
    adapted = [device_memory(tied, replace(job, technique="lora"), Share((8,), *held)) for held in ways]
    assert [memory.parts_gib["logits"] > 0 for memory in adapted] == [True, False, True, False]
    matrix_gib = tied.embedding_parameters * 2 / GIB
    more = {name: memory.parts_gib["weights"] - none.parts_gib["weights"]
            for name, memory in (("ends", ends), ("embeddings", embeddings), ("head", head))}  # fmt: skip
    assert more == pytest.approx(dict.fromkeys(more, matrix_gib), rel=1e-4)  # tied: one matrix, or a copy of it
    assert trained_parameters(tied, job, Share((8,), True, True)) == pytest.approx(
        trained_parameters(tied, job, Share((8,), False, True)), rel=1e-4
    )
    tail = replace(job, batch=BatchShape(1, 8, 7))
    first, both = (device_memory(tied, tail, Share((8,), True, has_head)) for has_head in (False, True))
    assert first.parts_gib["gradients"] == pytest.approx(first.parts_gib["weights"])
    assert both.peak_gib > first.peak_gib + matrix_gib  # two gradients of the tied matrix are added up there


@pytest.mark.parametrize(
    ("quantization", "expected_bytes"),
    [("nf4", 0.5 + 4 / 64), ("nf4-double", 0.5 + 0.127 / 8), ("int8", 1.0)],
)
def test_quantized_weights_with_their_constants(quantization: str, expected_bytes: float) -> None:
    job = replace(LORA, technique="qlora", quantization=quantization)
    memory = device_memory(LLAMA, job, whole_model(LLAMA))
    (term,) = [term for term in memory.terms if term.what.endswith("weights of the layers")]
    quantized = sum(linear.inputs * linear.outputs for linear in LLAMA.stacks[0].linears) * LLAMA.layers
    assert term.count / quantized == pytest.approx(expected_bytes, rel=1e-3)


def test_fsdp_divides_4_bit_numbers_but_not_their_scales() -> None:
    job = replace(LORA, technique="qlora", batch=BatchShape(1, 8, 7))
    one, many = (
        {term.what: term for term in device_memory(LLAMA, each, whole_model(LLAMA)).terms}
        for each in (job, replace(job, parallel="fsdp", devices=4))
    )
    quantized = quantized_weights(LLAMA)
    layers = "nf4 weights of the layers"
    assert many[layers].count == quantized * 0.5 / 4
    assert many["scales of their blocks"].count == quantized * 4 / 64  # no parameter of a module: whole on each rank
    assert one[layers].count == pytest.approx(quantized * 0.5625)
    rest = "embeddings, norms and head, cast to fp32"
    assert many[rest].count == one[rest].count / 4
    stack = LLAMA.stacks[0]
    matrices = sum(linear.inputs * linear.outputs for linear in stack.linears)
    adapters = sum(linear.lora_parameters(job.lora_rank) for linear in stack.linears)
    gathered = matrices * 0.5 + (stack.layer_parameters - matrices + adapters) * 2
    assert many["gathered layers"].count == 2 * gathered
    assert "autocast's copy of the head" in one
    assert "autocast's copy of the head" not in many  # it is gathered in 16 bits
    sent = sent_bytes(LLAMA, replace(job, parallel="fsdp", devices=4))
    assert sent < 0.5 * sent_bytes(LLAMA, replace(LORA, parallel="fsdp", devices=4))


def test_sharding_divides_what_it_says() -> None:
    def divided(parallel: str, precision: str = "fp32") -> dict[str, float]:
        one = parts(replace(FULL, precision=precision, batch=BatchShape(1, 8, 7)))
        many = parts(replace(FULL, precision=precision, parallel=parallel, devices=8, batch=BatchShape(1, 8, 7)))
        return {part: one[part] / many[part] for part in ("weights", "gradients", "optimizer")}

    with_copy = 8 * 2 / 3  # DeepSpeed keeps an fp32 copy beside Adam's two states
    assert divided("zero1") == pytest.approx({"weights": 1, "gradients": 1, "optimizer": with_copy}, rel=0.1)
    assert divided("zero2") == pytest.approx({"weights": 1, "gradients": 8, "optimizer": with_copy}, rel=0.1)
    assert divided("zero3") == pytest.approx({"weights": 8, "gradients": 8, "optimizer": with_copy}, rel=0.1)
    assert divided("fsdp") == pytest.approx({"weights": 8, "gradients": 8, "optimizer": 8}, rel=0.1)


def test_a_pipeline_s_first_stage_holds_more_micro_batches() -> None:
    job = replace(FULL, parallel="pp", devices=4, micro_batches=8, batch=BatchShape(8, 512, 511))
    first, last = (
        device_memory(LLAMA, job, Share((8,), has_embeddings=stage == 0, has_head=stage == 3, in_flight=4 - stage))
        for stage in (0, 3)
    )
    assert first.parts_gib["activations"] > 3 * last.parts_gib["activations"]
    assert first.parts_gib["logits"] == 0


def test_micro_batches_in_flight() -> None:
    one_f_one_b = Job("lora", "pp", BatchShape(8, 64, 63), devices=4, micro_batches=8)
    assert [one_f_one_b.in_flight(stage) for stage in range(4)] == [4, 3, 2, 1]
    few = replace(one_f_one_b, micro_batches=2)
    assert [few.in_flight(stage) for stage in range(4)] == [2, 2, 2, 1]
    gpipe = replace(one_f_one_b, schedule="gpipe")
    assert [gpipe.in_flight(stage) for stage in range(4)] == [8] * 4
    assert replace(one_f_one_b, parallel="mp", micro_batches=1).in_flight(0) == 1


def test_gpipe_holds_every_micro_batch_on_every_stage() -> None:
    job = replace(FULL, parallel="pp", devices=2, micro_batches=8, batch=BatchShape(8, 512, 511))
    peaks = {}
    for schedule in ("1f1b", "gpipe"):
        scheduled = replace(job, schedule=schedule)
        shares = [Share((16,), stage == 0, stage == 1, scheduled.in_flight(stage)) for stage in range(2)]
        peaks[schedule] = [device_memory(LLAMA, scheduled, share) for share in shares]
    for early, late in zip(peaks["1f1b"], peaks["gpipe"], strict=True):
        assert late.parts_gib["activations"] > 2 * early.parts_gib["activations"]
    assert peaks["gpipe"][1].parts_gib["logits"] > 3 * peaks["1f1b"][1].parts_gib["logits"]  # log-probabilities wait


@pytest.mark.parametrize("optimizer", OPTIMIZER_BYTES)
def test_every_optimizer_is_counted(optimizer: str) -> None:
    states = parts(replace(FULL, optimizer=optimizer, batch=BatchShape(1, 8, 7)))["optimizer"]
    fewest, most = {"sgd": (0, 0)}.get(optimizer, (2, 8.01))
    assert fewest <= bytes_per_weight(states) <= most


jobs = st.builds(
    Job,
    technique=st.sampled_from(["lora", "qlora", "full"]),
    parallel=st.just("single"),
    batch=st.builds(
        BatchShape,
        rows=st.integers(1, 16),
        length=st.integers(2, 4096),
        labelled=st.integers(1, 2),
        padded=st.booleans(),
    ),
    precision=st.sampled_from(["bf16", "bf16-mixed", "fp16-mixed", "fp32"]),
    attention=st.sampled_from(["eager", "sdpa", "flash"]),
    optimizer=st.sampled_from([*OPTIMIZER_BYTES]),
    gradient_checkpointing=st.booleans(),
    lora_rank=st.integers(1, 64),
    target_modules=st.sampled_from([(), ALL_LINEAR]),
    lora_dropout=st.sampled_from([0.0, 0.1]),
    accumulation_steps=st.integers(1, 2),
)
models = st.sampled_from(["llama-3.2-1b", "qwen2.5-7b", "roberta-large", "bart-large-cnn"])


@settings(max_examples=150, deadline=None)
@given(job=jobs, model=models)
def test_parts_are_sums_of_terms_and_more_work_never_takes_less(job: Job, model: str) -> None:
    architecture = read_architecture(model)
    memory = device_memory(architecture, job, whole_model(architecture))
    assert all(term.count > 0 and term.part in PARTS for term in memory.terms)
    assert sum(memory.parts_gib.values()) == pytest.approx(sum(term.gib for term in memory.terms))
    for more in (
        replace(job, batch=replace(job.batch, rows=job.batch.rows + 1)),
        replace(job, batch=replace(job.batch, length=job.batch.length + 64)),
        replace(job, lora_rank=job.lora_rank + 1),
    ):
        assert device_memory(architecture, more, whole_model(architecture)).peak_gib >= memory.peak_gib


@settings(max_examples=60, deadline=None)
@given(job=jobs, model=models)
def test_checkpointing_never_keeps_more_before_the_backward_pass(job: Job, model: str) -> None:
    architecture = read_architecture(model)
    kept = {}
    for on in (False, True):
        switched = replace(job, gradient_checkpointing=on, batch=replace(job.batch, rows=8, length=512))
        memory = device_memory(architecture, switched, whole_model(architecture))
        kept[on] = memory.peak_gib
    assert kept[True] <= kept[False]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"optimizer": "lion"}, "'lion' is not known to the planner"),
        ({"devices": 2}, "single uses one GPU, not 2"),
        ({"parallel": "ddp"}, "needs at least two GPUs, not 1"),
        ({"micro_batches": 2}, "is for --parallel pp"),
        ({"parallel": "pp", "devices": 2, "micro_batches": 3}, "pass --batch-size 3"),
        ({"technique": "qlora", "parallel": "zero3", "devices": 2}, "ZeRO does not divide weights in 4 bits"),
        ({"parallel": "mp", "devices": 2, "offload": True}, "--offload with --parallel mp"),
    ],
)
def test_contradictions_are_refused_in_a_sentence(changes: dict, sentence: str) -> None:
    with pytest.raises(BadInputError, match=sentence):
        replace(LORA, **changes)


def test_an_unknown_target_names_those_that_there_are() -> None:
    with pytest.raises(BadInputError, match=r"no linear layer 'wq'.*q_proj,k_proj"):
        replace(LORA, target_modules=("wq",)).check_targets(LLAMA)
