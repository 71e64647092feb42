"""The arithmetic of memory: known sums, and what must hold for any job."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForSequenceClassification

from common.checks.fake_steps import fake_group
from common.hardware.devices import GIB
from common.models.trained_weights import leave_casts_to_autocast
from common.planning.architectures import Architecture, as_classifier, read_architecture
from common.planning.job import ALL_LINEAR, LOGITS_AT_ONCE, OPTIMIZER_BYTES, BatchShape, Job
from common.planning.memory_plan import DeviceSums, device_memory
from common.planning.model_configs import MODEL_CONFIGS
from common.planning.shares import Share, part_of_rank, trained_parameters, whole_model
from common.planning.terms import PARTS, size_of
from common.planning.time_plan import traffic
from common.runtime.memory_tracker import MemoryTracker, like_cuda, watch_gradients
from tests.recipes.folders import CLASSIFICATION, module_of

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
    expected = {"weights": 2, "gradients": 2, "optimizer": 12 / 2}  # two ranks share it
    assert {part: bytes_per_weight(device[part]) for part in expected} == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("precision", "expected"), [("bf16", 8), ("fp32", 16)])
def test_pure_bf16_takes_eight_bytes_and_fp32_sixteen(precision: str, expected: int) -> None:
    device = parts(replace(FULL, precision=precision, batch=BatchShape(1, 8, 7)))
    resting = device["weights"] + device["gradients"] + device["optimizer"]
    assert bytes_per_weight(resting) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("targets", "count"), [((), 20_971_520), (ALL_LINEAR, 20_971_520), (("q_proj", "v_proj"), 3_407_872)]
)
def test_lora_trains_what_peft_says(targets: tuple[str, ...], count: int) -> None:
    assert trained_parameters(LLAMA, replace(LORA, target_modules=targets)) == count


def test_full_fine_tuning_may_train_the_linear_layers_alone() -> None:
    linears, named, only_q = (
        replace(FULL, target_modules=names) for names in (ALL_LINEAR, ("q_proj", "down_proj"), ("q_proj",))
    )
    by_part, qwen = LLAMA.by_part(), read_architecture("qwen2.5-7b")
    count = sum(number for part, number in by_part.items() if part not in ("embeddings", "norms", "head"))
    assert trained_parameters(LLAMA, linears) == count
    assert trained_parameters(LLAMA, named) == by_part["q_proj"] + by_part["down_proj"]
    query = qwen.stacks[0].linears[0]
    assert query.bias
    assert trained_parameters(qwen, only_q) == qwen.layers * (query.inputs + 1) * query.outputs
    assert (FULL.trains_all, linears.trains_all, LORA.trains_all) == (True, False, False)
    # in fp32, with few tokens, both are highest in a moment that has all gradients
    every, frozen_ends = (parts(replace(job, precision="fp32", batch=BatchShape(1, 8, 7))) for job in (FULL, linears))
    assert frozen_ends["weights"] == every["weights"]
    shares = [frozen_ends[part] / every[part] for part in ("gradients", "optimizer")]
    assert shares == pytest.approx([count / LLAMA.parameters] * 2, rel=1e-3)


def test_a_head_without_last_layers_and_embeddings_alone_are_counted() -> None:
    """A first device with both ends, one with embeddings and one with the head hold what they name, and no more."""
    tied = read_architecture("llama-3.2-1b")
    job, lora = (replace(each, parallel="mp", devices=2) for each in (FULL, LORA))
    ways = [Share((8,), *held) for held in ((True, True), (True, False), (False, True), (False, False))]
    logits_gib = [device_memory(tied, lora, share).parts_gib["logits"] for share in ways]
    assert [gib > 0 for gib in logits_gib] == [True, False, True, False]
    *held_gib, none_gib = (device_memory(tied, job, share).parts_gib["weights"] for share in ways)
    matrix_gib = tied.embedding_parameters * 2 / GIB
    # tied: one matrix, or a copy of it
    assert [gib - none_gib for gib in held_gib] == pytest.approx([matrix_gib] * 3, rel=1e-4)
    both, _, head, _ = (trained_parameters(tied, job, share) for share in ways)
    assert both == pytest.approx(head, rel=1e-4)
    tail = replace(job, batch=BatchShape(1, 8, 7))
    ends, first = (device_memory(tied, tail, share) for share in ways[:2])
    assert first.parts_gib["gradients"] == pytest.approx(first.parts_gib["weights"])
    assert ends.peak_gib > first.peak_gib + matrix_gib  # two gradients of the tied matrix are added up there


@pytest.mark.parametrize(
    ("quantization", "expected_bytes"),
    [("nf4", 0.5 + 4 / 64), ("nf4-double", 0.5 + 0.127 / 8)],
)
def test_quantized_weights_with_their_constants(quantization: str, expected_bytes: float) -> None:
    job = replace(LORA, technique="qlora", quantization=quantization)
    memory = device_memory(LLAMA, job, whole_model(LLAMA))
    (term,) = [term for term in memory.terms if term.what.endswith("weights of the layers")]
    quantized = sum(linear.inputs * linear.outputs for linear in LLAMA.stacks[0].linears) * LLAMA.layers
    assert term.count / quantized == pytest.approx(expected_bytes, rel=1e-3)


def test_fsdp_divides_4_bit_numbers_but_not_their_scales() -> None:
    job = replace(LORA, technique="qlora", batch=BatchShape(1, 8, 7))
    sharded = replace(job, parallel="fsdp", devices=4)
    one, many = (
        {term.what: term.count for term in device_memory(LLAMA, each, whole_model(LLAMA)).terms}
        for each in (job, sharded)
    )
    quantized, stack = LLAMA.matrix_weights, LLAMA.stacks[0]
    layers, rest = "nf4 weights of the layers", "embeddings, norms and head"
    assert one[layers] == pytest.approx(quantized * 0.5625)
    matrices = sum(linear.inputs * linear.outputs for linear in stack.linears)
    adapters = sum(linear.lora_parameters(job.lora_rank) for linear in stack.linears)
    expected = {
        layers: quantized * 0.5 / 4,
        "scales of their blocks": quantized * 4 / 64,  # no parameter of a module: whole on each rank
        rest: one[rest] / 4,
        "gathered layers": 2 * (matrices * 0.5 + (stack.layer_parameters - matrices + adapters) * 2),
    }
    assert {what: many[what] for what in expected} == expected
    assert sum(traffic(LLAMA, sharded)) < 0.5 * sum(traffic(LLAMA, replace(LORA, parallel="fsdp", devices=4)))


@pytest.mark.parametrize(
    ("parallel", "weights", "gradients", "optimizer"),
    [  # DeepSpeed keeps an fp32 copy beside Adam's two states
        ("zero1", 1, 1, 8 * 2 / 3),
        ("zero2", 1, 8, 8 * 2 / 3),
        ("zero3", 8, 8, 8 * 2 / 3),
        ("fsdp", 8, 8, 8),
    ],
)
def test_sharding_divides_what_it_says(parallel: str, weights: float, gradients: float, optimizer: float) -> None:
    one = replace(FULL, precision="fp32", batch=BatchShape(1, 8, 7))
    alone, shared = parts(one), parts(replace(one, parallel=parallel, devices=8))
    divided = [alone[part] / shared[part] for part in ("weights", "gradients", "optimizer")]
    assert divided == pytest.approx([weights, gradients, optimizer], rel=0.1)


@pytest.mark.parametrize(
    ("changes", "in_flight"),
    [
        ({}, [4, 3, 2, 1]),
        ({"micro_batches": 2}, [2, 2, 2, 1]),
        ({"schedule": "gpipe"}, [8, 8, 8, 8]),
        ({"parallel": "mp", "micro_batches": 1}, [1, 1, 1, 1]),
    ],
)
def test_micro_batches_in_flight(changes: dict, in_flight: list[int]) -> None:
    job = replace(Job("lora", "pp", BatchShape(8, 64, 63), devices=4, micro_batches=8), **changes)
    assert [job.in_flight(stage) for stage in range(4)] == in_flight


def test_gpipe_holds_every_micro_batch_on_every_stage() -> None:
    job = replace(FULL, parallel="pp", devices=2, micro_batches=8, batch=BatchShape(8, 512, 511))
    early, late = (
        [
            device_memory(LLAMA, each, Share((16,), stage == 0, stage == 1, each.in_flight(stage))).parts_gib
            for stage in range(2)
        ]
        for each in (job, replace(job, schedule="gpipe"))
    )
    assert all(late[stage]["activations"] > 2 * early[stage]["activations"] for stage in range(2))
    assert late[1]["logits"] == early[1]["logits"]  # those of one chunk


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
CHUNK_GIB = 12 * LOGITS_AT_ONCE / GIB
"""Of the loss of a chunk, at most: with a few more positions there is one chunk more, and each is smaller."""
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
        assert device_memory(architecture, more, whole_model(architecture)).peak_gib >= memory.peak_gib - CHUNK_GIB


def test_cross_attention_asks_with_the_summary_s_tokens_about_the_text_s() -> None:
    bart, shape = read_architecture("bart-large-cnn"), BatchShape(2, 96, 8, padded=True, target_length=8)
    job = replace(FULL, batch=shape, precision="bf16-mixed", lora_dropout=0.1)
    (_, decoder), h, text, summary = bart.stacks, bart.hidden, 2 * 96, 2 * 8
    for changes, expected in (
        (
            {},
            {
                "queries, keys, values": summary * 3 * h * 2,
                "cross attention: queries, keys, values": (summary + 2 * text) * h * 2,
                "cross attention: mask in the arithmetic's format": 2 * 8 * 96 * 2,
                "inputs of the projections": (5 * summary + 2 * text) * h * 2,  # autocast's copies
            },
        ),
        (
            {"technique": "lora"},
            {
                "dropout masks of the adapters": (7 * summary + 2 * text) * h + summary * bart.intermediate,
                "between the adapters' matrices": (8 * summary + 2 * text) * job.lora_rank * 2,
            },
        ),
        (
            {"attention": "eager", "precision": "fp32"},
            {"cross attention: attention scores": 2 * bart.heads * 8 * 96 * 4},
        ),
    ):
        sums = DeviceSums(bart, replace(job, **changes), whole_model(bart))
        kept = {term.what: term.count for term in sums.layer.saved(decoder)}
        assert {what: kept[what] for what in expected} == expected


@settings(max_examples=60, deadline=None)
@given(job=jobs, length=st.integers(2, 1024))
def test_longer_summaries_never_take_less_and_as_long_ones_as_many_as_the_text(job: Job, length: int) -> None:
    bart = read_architecture("bart-large-cnn")

    def peak_gib(target_length: int) -> float:
        asked = replace(job, batch=replace(job.batch, target_length=target_length))
        return device_memory(bart, asked, whole_model(bart)).peak_gib

    assert peak_gib(length) <= peak_gib(length + 64) + CHUNK_GIB
    assert peak_gib(job.batch.length) == peak_gib(0)


@settings(max_examples=60, deadline=None)
@given(job=jobs, model=models)
def test_checkpointing_never_keeps_more_before_the_backward_pass(job: Job, model: str) -> None:
    architecture, batch = read_architecture(model), replace(job.batch, rows=8, length=512)
    plain_gib, again_gib = (
        device_memory(
            architecture, replace(job, gradient_checkpointing=on, batch=batch), whole_model(architecture)
        ).peak_gib
        for on in (False, True)
    )
    assert again_gib <= plain_gib


# -- encoders: classifiers, and tensor parallel

ENCODERS = ["all-minilm-l6-v2", "roberta-large"]
QUERY_VALUE = ("query", "value")
CLASSES = 5
TEXTS = BatchShape(16, 64, 1, padded=True, classes=CLASSES)


def classifier(model: str) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(MODEL_CONFIGS / f"{model}.json", num_labels=CLASSES)
    return AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")


def with_adapters(model: torch.nn.Module) -> torch.nn.Module:
    heads = ["pooler", "classifier"] if model.config.model_type == "bert" else ["classifier"]
    config = LoraConfig(r=8, target_modules=list(QUERY_VALUE), lora_dropout=0.1, modules_to_save=heads)
    adapted = get_peft_model(model, config)
    leave_casts_to_autocast(adapted)
    return adapted


def classification(technique: str, precision: str = "fp32", batch: BatchShape = TEXTS) -> Job:
    targets, dropout = (QUERY_VALUE, 0.1) if technique == "lora" else ((), 0.0)
    return Job(technique, "single", batch, precision=precision, target_modules=targets, lora_dropout=dropout)


def texts(batch: BatchShape) -> dict[str, torch.Tensor]:
    mask = torch.ones((batch.rows, batch.length), dtype=torch.long)
    mask[0, -1] = 0
    return {"input_ids": mask + 5, "attention_mask": mask, "labels": torch.zeros(batch.rows, dtype=torch.long)}


def loss_of(model: torch.nn.Module, batch: BatchShape, precision: str) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
        return model.train()(**texts(batch)).loss


def real_activations_gib(model: torch.nn.Module, batch: BatchShape, precision: str) -> float:
    """The most that is alive in a real forward and backward pass, besides weights and gradients."""
    tracker = MemoryTracker(vocab_size=CLASSES, rounded_to=1)
    for tensor in (*model.parameters(), *model.buffers()):
        tracker.add(tensor, "weights")
    watch_gradients(model, tracker)
    with tracker:
        loss_of(model, batch, precision).backward()
    (at_peak,) = tracker.timeline.values()
    return (at_peak["activations"] + at_peak["logits"]) / GIB


@pytest.mark.parametrize("model", ENCODERS)
def test_a_classifier_trains_what_the_real_one_trains(model: str) -> None:
    """With full everything; with LoRA the adapters, and the head in a copy beside the frozen one."""
    architecture, job = as_classifier(read_architecture(model), CLASSES), classification("lora")
    with torch.device("meta"):
        real = classifier(model)
        count = sum(weight.numel() for weight in real.parameters())
        assert trained_parameters(architecture, classification("full")) == architecture.parameters == count
        real = with_adapters(real)
    trained = sum(weight.numel() for weight in real.parameters() if weight.requires_grad)
    assert trained_parameters(architecture, job) == trained
    assert as_classifier(architecture, CLASSES) == architecture
    held = device_memory(architecture, job, whole_model(architecture)).parts_gib
    every = sum(weight.numel() for weight in real.parameters())
    assert (held["weights"] * GIB, held["optimizer"] * GIB) == (4 * every, 8 * trained)


def test_a_new_head_is_trained_on_the_share_that_has_it() -> None:
    architecture = as_classifier(read_architecture("roberta-large"), CLASSES)
    head = architecture.hidden * (architecture.hidden + 1) + CLASSES * (architecture.hidden + 1)
    for job in (classification("lora"), replace(classification("full"), target_modules=ALL_LINEAR)):
        first, last = (trained_parameters(architecture, job, Share((12,), not end, end)) for end in (False, True))
        assert last - first == head


@pytest.mark.parametrize(
    ("on_cpu", "technique", "precision", "batch"),
    [
        (True, "full", "fp32", TEXTS),
        (False, "full", "bf16-mixed", TEXTS),
        (False, "lora", "fp32", TEXTS),
        (True, "lora", "bf16-mixed", TEXTS),
        (True, "full", "fp32", replace(TEXTS, rows=4, length=256)),
        (False, "full", "fp32", replace(TEXTS, rows=4, length=256)),
    ],
)
def test_a_classifier_s_step_keeps_what_the_closed_form_says(
    on_cpu: bool, technique: str, precision: str, batch: BatchShape
) -> None:
    """Within 3 %: on a CPU with every attention score, three times; with the operations of a GPU without them."""
    model = classifier("all-minilm-l6-v2")
    architecture = as_classifier(read_architecture("all-minilm-l6-v2"), CLASSES)
    closed = parts(replace(classification(technique, precision, batch), cpu_operations=on_cpu), architecture)
    with nullcontext() if on_cpu else like_cuda():
        real_gib = real_activations_gib(with_adapters(model) if technique == "lora" else model, batch, precision)
    assert closed["activations"] + closed["logits"] == pytest.approx(real_gib, rel=0.03)


@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_scores_are_what_a_cpu_pays_for_dropout(dropout: float) -> None:
    architecture = replace(as_classifier(read_architecture("all-minilm-l6-v2"), CLASSES), dropout=dropout)
    job = replace(classification("full"), cpu_operations=True)
    terms = device_memory(architecture, job, whole_model(architecture)).terms
    expected = architecture.layers * 12 * TEXTS.rows * architecture.heads * TEXTS.length**2 if dropout else 0
    assert sum(term.count for term in terms if "softmax" in term.what) == expected


@pytest.mark.parametrize("technique", ["full", "lora"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_a_rank_of_tensor_parallel_is_as_pytorch_s(technique: str, precision: str) -> None:
    """Weights and what is summed to the number, and what waits for the backward pass within 4 %.

    The closed form has all layers alike, but adapters in the first one have an input that needs no gradient.
    """
    architecture = as_classifier(read_architecture("all-minilm-l6-v2"), CLASSES)
    job = replace(classification(technique, precision), parallel="tp", devices=2, cpu_operations=True)
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = local(tensor).untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with fake_group(0, 2), Summed() as summed:
        model = classifier("all-minilm-l6-v2")
        model = with_adapters(model) if technique == "lora" else model
        module_of(CLASSIFICATION, "my_utils_tensor_parallel").split_by_plan(model, init_device_mesh("cpu", (2,)))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = loss_of(model, TEXTS, precision)
        loss.backward()
    weights = [local(weight) for weight in model.parameters()]
    trained = sum(local(weight).numel() for weight in model.parameters() if weight.requires_grad)
    part, memory = part_of_rank(architecture, job), device_memory(architecture, job, whole_model(architecture))
    own = sum(term.count for term in memory.terms if term.part == "weights" and "autocast" not in term.what)
    assert (trained_parameters(part, job), own) == (trained, 4 * sum(weight.numel() for weight in weights))
    held = [memory.parts_gib[name] * GIB for name in ("optimizer", "buffers")]
    assert held == [8 * trained, TEXTS.tokens * architecture.hidden * 4]
    assert sum(traffic(architecture, job)) == summed.bytes_count  # times 2 (n - 1) / n, which is 1
    for weight in weights:
        kept.pop(weight.untyped_storage().data_ptr(), None)
    sums = DeviceSums(part, job, whole_model(part))
    waiting = sum(term.count for term in [*sums.layers_saved(), *sums.saved_outside_layers])
    assert waiting == pytest.approx(sum(storage.nbytes() for storage in kept.values()), rel=0.04)


class Summed(TorchDispatchMode):
    """Counts the bytes that are summed over the ranks."""

    bytes_count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops._c10d_functional.all_reduce.default:
            self.bytes_count += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_tensor_parallel_divides_layers_and_leaves_hidden_states_whole() -> None:
    architecture, whole = read_architecture("roberta-large"), whole_model(read_architecture("roberta-large"))
    one = replace(FULL, precision="fp32", attention="eager", batch=BatchShape(8, 512, 512))
    four = replace(one, parallel="tp", devices=4)
    alone, shared = (
        {
            term.what.removeprefix("24 x "): term.count
            for term in (
                *device_memory(architecture, job, whole).terms,
                *DeviceSums(part_of_rank(architecture, job), job, whole).layer.backward(architecture.stacks[0]),
            )
        }
        for job in (one, four)
    )
    divided = ("queries, keys, values", "result of attention, token by token", "attention scores",
               "dropout of the scores", "MLP before and after its activation",
               "gradients of the attention scores")  # fmt: skip
    same = ("inputs of the layer norms", "inputs of the projections", "dropout masks")
    expected = {**dict.fromkeys(divided, 4), **dict.fromkeys(same, 1)}
    assert {what: alone[what] / shared[what] for what in expected} == expected
    assert four.data_parallel_ranks == 1


@pytest.mark.parametrize(("optimizer", "each"), [("adamw_torch", 8), ("adamw_torch_fused", 6)])
def test_zero_3_updates_a_billion_weights_at_once(optimizer: str, each: int) -> None:
    architecture = read_architecture("llama-3.1-8b")
    job = replace(FULL, precision="bf16", parallel="zero3", devices=2, optimizer=optimizer, batch=BatchShape(1, 8, 7))
    for one in (job, replace(job, devices=64)):
        terms = DeviceSums(architecture, one, whole_model(architecture))._optimizer_step()
        assert size_of(terms) == each * min(1e9, architecture.parameters / one.devices)
    assert (
        size_of(DeviceSums(architecture, replace(job, offload=True), whole_model(architecture))._optimizer_step()) == 0
    )


def test_with_zero_2_the_last_ranks_have_their_part_of_the_gradients_from_the_beginning() -> None:
    """Measured with 27M weights: 423.4 MiB on rank 1 and 373.3 on rank 0 of two (2.6, torchrun-27m-zero2)."""
    architecture = read_architecture("llama-27m")
    job = Job(
        "full",
        "zero2",
        BatchShape(8, 39, 17),
        devices=2,
        precision="fp32",
        target_modules=ALL_LINEAR,
        cpu_operations=True,
    )
    for rank, measured_mib in enumerate((373.3, 423.4)):
        share = replace(whole_model(architecture), keeps_first_gradients=job.keeps_first_gradients(rank))
        assert device_memory(architecture, job, share).allocated_gib * 1024 == pytest.approx(measured_mib, rel=0.02)
