"""The dry run counts what a real step allocates, whatever the depth, and the closed form says the same."""

import json
import os
import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.checks import dry_run as dry_run_room, fake_steps
from common.checks.dry_run import dry_run, dry_run_of_device, dry_runs, kinds_of_layers, small_depths, with_depth
from common.checks.fake_steps import (
    batch_inputs,
    build_model,
    fake_step,
    keep_share,
    stage_alone,
    take_step,
    tracked_step,
)
from common.checks.tried_rows import batch_of, batch_of_length, rows_of_length
from common.data.pictures import open_picture
from common.models.loading import any_shape_config, load_tokenizer
from common.models.placement import place_stages
from common.planning.architectures import read_architecture
from common.planning.job import BatchShape, architecture_of_run, job_of_run
from common.planning.memory_plan import device_memory
from common.planning.shares import Share, whole_model
from common.planning.terms import PARTS
from common.runtime import memory_tracker
from common.runtime.memory_tracker import Timeline
from common.training.answer_logits import keep_answer_logits
from tests.families import FAMILIES
from tests.forked import run_forked

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}
BATCH = BatchShape(rows=4, length=64, labelled=40)
NO_ROUNDING = 1


@pytest.fixture
def shape(tmp_path: Path) -> Callable[..., str]:
    def write(**changes: object) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**SHAPE, **changes}))
        return str(path)

    return write


def total(parts: dict[str, float]) -> float:
    return sum(parts.values())


def totals(timeline: Timeline) -> dict[str, float]:
    """By segments, all that is held."""
    return {segment: total(parts) for segment, parts in timeline.items()}


def real_and_fake(run: RunConfig, batch: BatchShape) -> tuple[Timeline, Timeline]:
    """What a step takes, of real tensors and of fake ones."""
    config = any_shape_config(run.model)
    if batch.classes:
        config.num_labels = batch.classes
    fake = fake_step(run, config, batch, as_on_gpu=False)
    model = build_model(run, config)
    return tracked_step(run, model, batch_inputs(batch, model), as_on_gpu=False), fake


def test_layers_whose_kinds_follow_the_depth_are_cut_with_it() -> None:
    """Mamba's config has no place for kinds of its own."""
    assert len(with_depth(AutoConfig.for_model("mamba", num_hidden_layers=4), 2).layer_types) == 2


@pytest.mark.parametrize("technique", ["lora", "full"])
@pytest.mark.parametrize("checkpointing", [(False, False), (True, True), (True, False)])
def test_fake_tensors_take_what_real_ones_take(
    technique: str, checkpointing: tuple[bool, bool], shape: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tracker sees the same in a real step as in a fake one, and PyTorch's own profiler the same peak."""
    run = RunConfig(
        technique=technique,
        model=shape(num_hidden_layers=3),  # a first, a middle and a last one
        weights="random",
        gradient_checkpointing=checkpointing[0],
        use_reentrant=checkpointing[1],
    )
    profiled: list[float] = []

    def profiled_step(*args: object, **share: object) -> None:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            take_step(*args, **share)
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        profiled.append(max(accumulate(changes, initial=0)))

    monkeypatch.setattr(fake_steps, "take_step", profiled_step)
    real, fake = real_and_fake(run, BATCH)
    assert totals(real) == pytest.approx(totals(fake), rel=0.01)
    counted = max(totals(real).values()) - total(real["load"])
    assert profiled[-1] == pytest.approx(counted, rel=0.05)  # the tracker rounds each block up to 512 bytes


@pytest.mark.parametrize("technique", ["lora", "full"])
def test_two_small_depths_tell_a_larger_one(technique: str, shape: Callable[..., str]) -> None:
    run = RunConfig(technique=technique, model=shape(), weights="random", precision="bf16")
    whole = fake_step(run, any_shape_config(run.model), BATCH, as_on_gpu=True)
    told = dry_run(run, BATCH)
    for segment, parts in told.timeline.items():
        expected = {part: whole[segment][part] for part in PARTS}
        assert {part: parts[part] for part in PARTS} == pytest.approx(expected, rel=0.002, abs=2_000), segment
    assert told.peak_segment == max(whole, key=lambda segment: total(whole[segment]))


@pytest.mark.parametrize("family", ["qwen3_5_text", "gemma4_text", "lfm2"])
def test_layers_that_differ_are_told_by_what_repeats(family: str, tmp_path: Path) -> None:
    """Two layers of another kind between those of attention; the second half of Gemma 4's have no keys of their own."""
    first, other = FAMILIES[family].sizes["layer_types"][:2]
    changes = {"num_hidden_layers": 12, "layer_types": 4 * [first, first, other]}
    changes |= {"num_kv_shared_layers": 6} if family == "gemma4_text" else {}
    config = AutoConfig.for_model(family, **{**FAMILIES[family].sizes, "vocab_size": 512, "pad_token_id": 0, **changes})
    config.update({"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]})
    config.save_pretrained(tmp_path)
    run = RunConfig(technique="full", model=str(tmp_path / "config.json"), weights="random", precision="bf16")
    batch = BatchShape(rows=2, length=16, labelled=8)
    whole, told = fake_step(run, any_shape_config(run.model), batch, as_on_gpu=True), dry_run(run, batch)
    assert total(told.peak) == pytest.approx(max(totals(whole).values()), rel=0.002)
    assert small_depths(kinds_of_layers(run)) == (6, 9)


@pytest.mark.parametrize(
    ("kinds", "depths"),
    [("aaaaaa", (2, 3)), ("baaaaa", (2, 3)), ("aa", (2,)), ("aaa", (3,)), ("abababab", (4, 6)), ("aabaabaabaa", (5, 8)),
     ("aaab" * 8, (8, 12)), ("aabbab", (6,))],
)  # fmt: skip
def test_small_depths_hold_what_repeats_up_to_the_last_layer(kinds: str, depths: tuple[int, ...]) -> None:
    assert small_depths(list(kinds)) == depths


PLAIN = ("bf16", False, BatchShape(2, 512, 511))
PADDED = ("bf16-mixed", True, BatchShape(4, 256, 100, padded=True))


def grid() -> list:
    """Each model with each choice of weights; for `make test` with one of the two ways to compute, in turn.

    There BART has adapters alone, and the linear layers alone are trained of one model only.
    """
    models = ("llama-3.1-8b", "roberta-large", "bart-large-cnn")
    weights = (("lora", "all-linear"), ("full", "all"), ("full", "all-linear"))
    points = [
        pytest.param(
            model,
            *trained,
            *way,
            marks=[pytest.mark.slow] if (i + j + k) % 2 or (j == 2 and i) or (j and i == 2) else [],
        )
        for i, model in enumerate(models)
        for j, trained in enumerate(weights)
        for k, way in enumerate((PLAIN, PADDED))
    ]
    attention = ("llama-3.1-8b", "full", "q_proj,v_proj", *PLAIN)
    mlp = ("llama-3.1-8b", "full", "gate_proj,up_proj,down_proj", "bf16-mixed", False, BatchShape(2, 512, 511))
    adapted = ("lora", "q_proj,k_proj,v_proj,o_proj", *PLAIN)
    mixtures = [("mixtral-8x7b", *adapted), ("qwen3-30b-a3b", "full", "all-linear", *PADDED)]
    others = [("qwen3-30b-a3b", *adapted), ("mixtral-8x7b", "full", "all", *PADDED)]
    slow = [pytest.param(*each, marks=[pytest.mark.slow]) for each in (mlp, *others)]
    return [*points, attention, *mixtures, *slow]


def closed_gib(run: RunConfig, batch: BatchShape) -> float:
    """The closed form's peak, with the operations of a GPU, which dry runs choose unless they are told otherwise."""
    architecture, job = read_architecture(run.model), replace(job_of_run(run, batch), cpu_operations=False)
    return device_memory(architecture, job, whole_model(architecture)).allocated_gib


@pytest.mark.parametrize(("model", "technique", "targets", "precision", "checkpointing", "batch"), grid())
def test_the_closed_form_says_the_same(
    model: str, technique: str, targets: str, precision: str, checkpointing: bool, batch: BatchShape
) -> None:
    """At most 5 % apart, part by part at most 3 % of the whole; `make bench` has the whole grid."""
    run = RunConfig(
        technique=technique,
        target_modules=targets,
        model=model,
        precision=precision,
        gradient_checkpointing=checkpointing,
        weights="random",
    )
    assert closed_gib(run, batch) == pytest.approx(dry_run(run, batch).peak_gib, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "batch"),
    [
        pytest.param({"precision": "fp32"}, BatchShape(8, 1024, 8, target_length=8), marks=pytest.mark.slow),
        pytest.param({"precision": "bf16-mixed"}, BatchShape(2, 256, 512, target_length=512), marks=pytest.mark.slow),
        pytest.param({"precision": "fp32", "parallel": "ddp", "devices": 4},
                     BatchShape(4, 1024, 128, target_length=128), marks=pytest.mark.slow),
        ({"precision": "fp32", "gradient_checkpointing": True, "parallel": "ddp", "devices": 4},
         BatchShape(16, 1024, 128, padded=True, target_length=128)),
    ],
)  # fmt: skip
def test_the_closed_form_says_the_same_of_texts_with_summaries(settings: dict, batch: BatchShape) -> None:
    """Within 2 %, the encoder working on texts and the decoder on summaries of another length."""
    bart = {"task": "summarization", "technique": "full", "target_modules": "all", "model": "bart-large-cnn"}
    run = RunConfig(**bart, weights="random", **settings)
    fake, other = (dry_run(run, shape).peak_gib for shape in (batch, replace(batch, target_length=batch.length)))
    assert closed_gib(run, batch) == pytest.approx(fake, rel=0.02)
    assert closed_gib(run, replace(batch, target_length=0)) == pytest.approx(other, rel=0.02)
    assert abs(fake - other) > 0.03 * fake  # what the decoder works on is no small part


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("technique", "precision"), [("lora", "bf16"), ("full", "bf16"), ("full", "bf16-mixed")])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_what_a_mixture_keeps_of_many_tokens_is_what_the_closed_form_says(
    kind: str, technique: str, precision: str, checkpointing: bool, shape: Callable[..., str]
) -> None:
    """Within 5 %, of experts so small that activations decide."""
    sizes = {"num_experts": 16, "moe_intermediate_size": 128} if kind == "qwen3_moe" else {"num_local_experts": 4}
    architectures = {
        "mixtral": "MixtralForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
    }
    model = shape(
        model_type=kind, architectures=[architectures[kind]], hidden_size=512, head_dim=128, intermediate_size=1024,
        num_experts_per_tok=8 if kind == "qwen3_moe" else 2, max_position_embeddings=2048, **sizes,
    )  # fmt: skip
    targets = "all" if technique == "full" else "q_proj,k_proj,v_proj,o_proj"
    run = RunConfig(
        technique=technique,
        model=model,
        target_modules=targets,
        precision=precision,
        gradient_checkpointing=checkpointing,
        attention="eager" if kind == "gpt_oss" else "sdpa",
        weights="random",
    )
    batch = BatchShape(8, 2048, 2047)
    closed = closed_gib(run, batch)
    assert closed == pytest.approx(dry_run(run, batch).peak_gib, rel=0.05)
    assert closed_gib(run, replace(batch, rows=1)) < 0.6 * closed


EMBEDDED_VISION, SMOLVLM = "assets/embedded_vision_base", "smolvlm-instruct"


def seeing(model: str, technique: str, **settings: object) -> RunConfig:
    targets = "all" if technique == "full" else "all-linear"
    run = {"task": "visual_questions", "technique": technique, "model": model, "weights": "random", "device": "cuda"}
    return RunConfig(**{**run, "target_modules": targets, "gpu": "A100 80GB SXM", **settings})


@pytest.mark.parametrize(
    ("technique", "settings"),
    [
        ("lora", {}),
        ("lora", {"freeze_vision_tower": False, "precision": "bf16"}),
        ("full", {"freeze_vision_tower": False, "precision": "bf16-mixed", "gradient_checkpointing": True}),
    ],
)
def test_fake_pictures_take_what_real_ones_take(technique: str, settings: dict) -> None:
    real, fake = real_and_fake(seeing(EMBEDDED_VISION, technique, **settings), BatchShape(2, 64, 20, tiles=2))
    assert totals(real) == pytest.approx(totals(fake), rel=0.015)
    assert any("encoder.layers" in segment for segment in real)
    assert fake["load"]["activations"] < 2048  # nothing of the step before is left, but single numbers


TRAINED_TOO = {"precision": "bf16-mixed", "freeze_vision_tower": False, "parallel": "ddp", "devices": 4}
SEEN = [  # model, technique, rows, tokens, tiles, settings
    (EMBEDDED_VISION, "lora", BatchShape(8, 64, 16, tiles=1), {"precision": "fp32"}),
    (EMBEDDED_VISION, "full", BatchShape(2, 96, 24, tiles=4), {"precision": "bf16-mixed"}),
    (EMBEDDED_VISION, "lora", BatchShape(2, 96, 24, tiles=4), {"precision": "bf16", "gradient_checkpointing": True}),
    (SMOLVLM, "lora", BatchShape(2, 512, 128, tiles=5), {"precision": "bf16", "gradient_checkpointing": True}),
    (EMBEDDED_VISION, "lora", BatchShape(2, 96, 24, tiles=4), {"precision": "bf16", "freeze_vision_tower": False}),
    (EMBEDDED_VISION, "full", BatchShape(8, 64, 16, tiles=1), {**TRAINED_TOO, "gradient_checkpointing": True}),
]
SEEN_TOO = [
    (SMOLVLM, "lora", BatchShape(4, 1600, 400, tiles=17), {"precision": "bf16"}),
    (SMOLVLM, "full", BatchShape(4, 1600, 400, tiles=17), {**TRAINED_TOO, "gradient_checkpointing": True}),
    (SMOLVLM, "lora", BatchShape(8, 256, 64, tiles=2), TRAINED_TOO),
    (SMOLVLM, "lora", BatchShape(1, 128, 32, tiles=1), {"precision": "fp32", "freeze_vision_tower": False}),
    (SMOLVLM, "full", BatchShape(2, 512, 128, tiles=5), {"precision": "bf16", "target_modules": "all-linear"}),
    (SMOLVLM, "full", BatchShape(8, 256, 64, tiles=2), {"precision": "fp32", "freeze_vision_tower": False}),
    ("idefics3-8b-llama3", "lora", BatchShape(1, 3072, 128, tiles=17), {"precision": "bf16"}),
]
"""In `make test-all`."""


@pytest.mark.parametrize(
    ("model", "technique", "batch", "settings"),
    [*SEEN, *(pytest.param(*point, marks=pytest.mark.slow) for point in SEEN_TOO)],
)
def test_the_closed_form_says_the_same_of_pictures(
    model: str, technique: str, batch: BatchShape, settings: dict
) -> None:
    run = seeing(model, technique, **settings)
    assert closed_gib(run, batch) == pytest.approx(dry_run(run, batch).peak_gib, rel=0.05)


@pytest.mark.parametrize("freeze", [True, False])
def test_a_tower_of_smolvlm2_s_kind_takes_the_same(freeze: bool, tmp_path: Path) -> None:
    config = json.loads((REPOSITORY / EMBEDDED_VISION / "config.json").read_text())
    config |= {"architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm"}
    config["vision_config"]["model_type"] = "smolvlm_vision"
    (tmp_path / "config.json").write_text(json.dumps(config))
    batch, way = BatchShape(2, 96, 24, tiles=4), {"precision": "bf16", "freeze_vision_tower": freeze}
    other, own = (dry_run(seeing(model, "full", **way), batch) for model in (str(tmp_path), EMBEDDED_VISION))
    assert other.peak_gib == pytest.approx(own.peak_gib, rel=0.01)


@pytest.mark.parametrize(("model", "tiles"), [(EMBEDDED_VISION, 1), (SMOLVLM, 17)])
def test_rows_of_a_length_have_a_square_picture(model: str, tiles: int) -> None:
    run = replace(seeing(model, "lora"), per_device_train_batch_size=3)
    assert batch_of_length(replace(run, weights="pretrained"), 500).tiles == tiles
    assert batch_of_length(run, 200).tiles == 1, "what random weights' processor makes"
    rows, tower = rows_of_length(run, 200), read_architecture(model).tower
    row, image = rows.train[0], load_tokenizer(run).processor.image_token_id
    assert rows.tiles == batch_of(run, rows).tiles == 1
    assert len(row["input_ids"]) == len(row["labels"]) == 200
    assert (row["input_ids"].count(image), row["labels"].count(image)) == (tower.tokens, 0)
    assert open_picture(row["picture"]).size == (tower.tile, tower.tile)
    with pytest.raises(BadInputError, match=r"a picture takes \d+ tokens: pass --seq-len"):
        rows_of_length(run, 10)


SayDryRun = Callable[..., str]


@pytest.fixture
def dry_run_says(capsys: pytest.CaptureFixture[str]) -> SayDryRun:
    """What the command says of a folder."""

    def say(folder: str, *options: str) -> str:
        with mock.patch.object(sys, "argv", ["dry_run", folder, *options]):
            dry_run_room.main()
        return capsys.readouterr().out

    return say


LABELLER = "assets/embedded_labeller, fp32, single: 16 rows of 64 tokens"


@pytest.mark.parametrize(
    ("folder", "technique", "said", "tolerance"),
    [
        ("3.3_visual_question_answering", "lora", "rows of 64 tokens with pictures in 1 squares", {"abs": 2.5}),
        ("3.4_preference_tuning", "full", f"full of {LABELLER}", {"rel": 0.02}),
        ("3.4_preference_tuning", "lora", f"lora of {LABELLER}", {"rel": 0.02}),
    ],
)
def test_a_dry_run_of_pictures_or_pairs_agrees_with_the_closed_form(
    folder: str, technique: str, said: str, tolerance: dict[str, float], dry_run_says: SayDryRun
) -> None:
    out = dry_run_says(f"{folder}/run_0_cpu_x1", "--technique", technique, "--seq-len", "64")
    assert said in out
    dry, closed = (float(re.search(rf"{line} (\d+\.\d+) MiB", out)[1]) for line in ("memory:", "closed form:"))
    assert closed == pytest.approx(dry, **tolerance)


def test_each_part_of_a_tower_is_counted() -> None:
    """A frozen tower has weights and pictures alone; a trained one all of it, beside adapters as wide as the base's."""
    tower, batch = read_architecture(EMBEDDED_VISION).tower_parameters, BatchShape(1, 64, 16, tiles=1)
    frozen, trained = (
        dry_run(seeing(EMBEDDED_VISION, "lora", precision="bf16", freeze_vision_tower=is_frozen), batch).timeline
        for is_frozen in (True, False)
    )
    more = {part: trained["load"][part] - frozen["load"][part] for part in PARTS}
    assert more["weights"] == pytest.approx(2 * tower, rel=0.05), "PEFT keeps the untrained ones beside"
    assert more["optimizer"] == pytest.approx(4 * tower, rel=0.05)
    assert not [segment for segment in frozen if segment.startswith("backward") and "encoder" in segment]
    assert [segment for segment in trained if segment.startswith("backward") and "encoder" in segment]


CLASSIFIED = BatchShape(rows=8, length=128, labelled=1, padded=True, classes=6)


def classifier(technique: str, model: str) -> RunConfig:
    targets = "all" if technique == "full" else "query,value"
    run = {"task": "classification", "technique": technique, "target_modules": targets, "model": model}
    return RunConfig(**run, weights="random", data="assets/visitor_messages")


@pytest.mark.parametrize(
    ("technique", "model", "way"),
    [
        pytest.param(technique, model, way, marks=[] if i == j == k else [pytest.mark.slow])
        for i, technique in enumerate(("lora", "full"))
        for j, model in enumerate(("all-minilm-l6-v2", "roberta-large"))
        for k, way in enumerate(({}, {"parallel": "ddp", "devices": 2}))
    ],
)
def test_the_closed_form_says_the_same_of_a_classifier(model: str, technique: str, way: dict) -> None:
    on_cpu = replace(classifier(technique, model), **way)
    on_gpu = replace(on_cpu, device="cuda", gpu="A100 80GB SXM")
    architecture = architecture_of_run(on_cpu, CLASSIFIED)
    for run in (on_cpu, on_gpu, replace(on_gpu, precision="bf16-mixed")):
        closed = device_memory(architecture, job_of_run(run, CLASSIFIED), whole_model(architecture))
        fake = dry_run(run, CLASSIFIED, as_on_gpu=run.device == "cuda")
        assert closed.allocated_gib == pytest.approx(fake.peak_gib, rel=0.05), (run.device, run.precision)


@pytest.mark.parametrize("technique", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_a_classifier_s_stages_are_as_planned(technique: str) -> None:
    way = {"parallel": "pp", "devices": 2, "per_device_train_batch_size": 8, "micro_batches": 4, "device_map": "even"}
    run = replace(classifier(technique, "roberta-large"), **way, device="cuda", gpu="A100 80GB SXM")
    plan = place_stages(run, CLASSIFIED).plan
    for memory, device in zip(plan.devices, dry_runs(run, CLASSIFIED), strict=True):
        assert memory.allocated_gib == pytest.approx(device.peak_gib, rel=0.05)


def test_a_classifier_of_fake_tensors_takes_what_a_real_one_takes(shape: Callable[..., str]) -> None:
    """Its head, too: pooler and classifier are trained beside the adapters."""
    bert = {"architectures": ["BertModel"], "model_type": "bert", "num_hidden_layers": 3, "pad_token_id": 0}
    run = classifier("lora", shape(**bert))
    real, fake = real_and_fake(run, CLASSIFIED)
    assert totals(real) == pytest.approx(totals(fake), rel=0.01)
    head = 128 * 128 + 128 + 128 * 6 + 6
    adapters = 3 * 2 * run.lora_r * (128 + 128)
    assert real["optimizer: clipping and step"]["gradients"] == pytest.approx(4 * (head + adapters), rel=0.05)


def test_ddp_keeps_all_gradients_all_the_time() -> None:
    alone = RunConfig(technique="full", target_modules="all", model="llama-3.2-1b", precision="bf16", weights="random")
    shared, batch = replace(alone, parallel="ddp", devices=4), BatchShape(2, 256, 255)
    one, many = dry_run(alone, batch), dry_run(shared, batch)
    weights, segments = one.timeline["load"]["weights"], ("load", "optimizer: clipping and step")
    assert one.timeline["load"]["gradients"] == 0
    gradients = [many.timeline[segment]["gradients"] for segment in segments]
    assert gradients == pytest.approx([weights, weights], rel=0.01)  # no second copy
    assert closed_gib(shared, batch) == pytest.approx(many.peak_gib, rel=0.05)


# -- divided models

PIPELINE = {"parallel": "pp", "devices": 2, "per_device_train_batch_size": 4, "micro_batches": 4, "weights": "random"}
TWO_GPUS = {"parallel": "mp", "devices": 2, "device": "cuda", "gpu": "RTX A6000 48GB", "weights": "random"}


def test_stages_that_one_device_holds_are_not_divided(shape: Callable[..., str]) -> None:
    run = RunConfig(model=shape(num_hidden_layers=2), weights="random")
    marked = replace(run, parallel="mp", stages=2)
    assert dry_run(marked, BATCH).peak_gib == dry_run(run, BATCH).peak_gib


@pytest.mark.parametrize("way", [PIPELINE, TWO_GPUS])
def test_the_fullest_device_speaks_for_a_divided_model(
    way: dict, shape: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shape(vocab_size=8192, num_hidden_layers=4)
    run = RunConfig(technique="full", model=model, device_map="even", **way)
    devices = dry_runs(run, BATCH)
    whole = dry_run(run.changed_to(parallel="single", devices=1, device="cpu", gpu=""), BATCH)
    weights = sum(device.timeline["load"]["weights"] for device in devices)
    assert weights == pytest.approx(whole.timeline["load"]["weights"], rel=0.001)
    assert devices[0].peak["logits"] == 0 < devices[1].peak["logits"]
    assert not torch.distributed.is_initialized()
    monkeypatch.setattr(dry_run_room, "dry_runs", lambda *_: devices)
    assert dry_run(run, BATCH).peak_gib == max(device.peak_gib for device in devices)


@pytest.mark.parametrize("way", [PIPELINE, TWO_GPUS])
def test_a_model_that_cannot_be_placed_is_refused_in_one_sentence(way: dict, shape: Callable[..., str]) -> None:
    with pytest.raises(BadInputError, match="has 2 layers, too few for 3 stages"):
        dry_run(RunConfig(model=shape(num_hidden_layers=2), **{**way, "devices": 3}), BATCH)
    neox = shape(architectures=["GPTNeoXForCausalLM"], model_type="gpt_neox")
    with pytest.raises(BadInputError, match="gpt_neox"):
        dry_run(RunConfig(model=neox, **way), BATCH)


@pytest.mark.parametrize(
    ("technique", "number", "schedule"),
    [("full", 0, "1f1b"), ("full", 1, "gpipe"), ("lora", 0, "gpipe"), ("lora", 1, "1f1b")],
)
def test_a_stage_of_fake_tensors_takes_what_real_ones_take(
    technique: str, number: int, schedule: str, shape: Callable[..., str]
) -> None:
    run = RunConfig(technique=technique, model=shape(num_hidden_layers=3), schedule=schedule, **PIPELINE)
    config, share = any_shape_config(run.model), Share((3,), number == 0, number == 1)
    fake = fake_step(run, config, BATCH, False, share, number)
    model = build_model(run, config)
    keep_share(model, run, BATCH, share)
    real = tracked_step(run, model, batch_inputs(BATCH, model), False, share, number)
    assert totals(real) == pytest.approx(totals(fake), rel=0.01)


@pytest.mark.parametrize(
    ("way", "number"),
    [
        (PIPELINE, 1),
        (TWO_GPUS, 0),
        pytest.param(PIPELINE, 0, marks=pytest.mark.slow),
        pytest.param(TWO_GPUS, 1, marks=pytest.mark.slow),
    ],
)
def test_two_small_depths_tell_a_larger_share(way: dict, number: int, shape: Callable[..., str]) -> None:
    run = RunConfig(technique="full", model=shape(num_hidden_layers=12), precision="bf16", **way)
    share, config = Share((6,), number == 0, number == 1), with_depth(any_shape_config(run.model), 6)
    whole = totals(fake_step(run, config, BATCH, True, share, number))
    told = totals(dry_run_of_device(run, BATCH, share, number).timeline)
    assert told == pytest.approx({segment: whole[segment] for segment in told}, rel=0.003)


def test_a_stage_holds_what_its_schedule_has_in_flight(shape: Callable[..., str]) -> None:
    """1F1B: as many micro-batches as stages from here on; GPipe: all. Buffers for all of them either way."""
    asked = RunConfig(technique="full", model=shape(), device_map="even", **PIPELINE)
    batch = BatchShape(rows=4, length=256, labelled=1)  # next to no logits
    one_by_one, all_at_once = (
        [
            device.timeline["forward: layers, last layer"]
            for device in dry_runs(replace(asked, schedule=schedule), batch)
        ]
        for schedule in ("1f1b", "gpipe")
    )
    for stage, in_flight in enumerate((2, 1)):
        held = all_at_once[stage]["activations"] / one_by_one[stage]["activations"]
        assert held == pytest.approx(4 / in_flight, rel=0.1)
    received, inputs = batch.tokens * 128 * 4, 3 * batch.tokens * 8
    for parts in (*one_by_one, *all_at_once):
        assert received <= parts["buffers"] <= received + inputs + 4096


DIVIDED = [
    ("full", "llama-3.2-1b", {"schedule": "1f1b", "gradient_checkpointing": True}, BatchShape(4, 512, 511)),
    ("full", "roberta-large", {"schedule": "gpipe", "precision": "bf16-mixed"}, BatchShape(8, 256, 255)),
    ("lora", "llama-3.2-1b", {**TWO_GPUS, "micro_batches": 1}, BatchShape(2, 512, 511)),
]
DIVIDED_TOO = [
    ("full", "llama-3.2-1b", {"schedule": "gpipe", "precision": "bf16-mixed"}, BatchShape(4, 512, 100, padded=True)),
    ("full", "llama-3.1-8b", {**TWO_GPUS, "micro_batches": 1, "precision": "bf16-mixed"}, BatchShape(2, 512, 511)),
]
"""In `make test-all`, as is each with the other technique."""
OTHER = {"full": "lora", "lora": "full"}


@pytest.mark.parametrize(
    ("technique", "model", "settings", "batch"),
    [
        *DIVIDED,
        *(pytest.param(*point, marks=pytest.mark.slow) for point in DIVIDED_TOO),
        *(pytest.param(OTHER[one], *others, marks=pytest.mark.slow) for one, *others in DIVIDED + DIVIDED_TOO),
    ],
)
def test_the_closed_form_says_the_same_of_each_device(
    technique: str, model: str, settings: dict, batch: BatchShape
) -> None:
    targets = "all" if technique == "full" else "all-linear"
    asked = {"model": model, "technique": technique, "target_modules": targets, "precision": "bf16"}
    run = RunConfig(**{**PIPELINE, **asked, **settings, "per_device_train_batch_size": batch.rows})
    plan = place_stages(run, batch).plan
    for memory, device in zip(plan.devices, dry_runs(run, batch, as_on_gpu=run.device != "cpu"), strict=True):
        assert memory.allocated_gib == pytest.approx(device.peak_gib, rel=0.05)


def test_a_pipeline_keeps_its_latest_schedule(shape: Callable[..., str]) -> None:
    """It holds buffers for a whole batch; those of the one before are free at once."""
    run = RunConfig(technique="full", model=shape(num_hidden_layers=2), **PIPELINE)
    share = Share((2,), has_embeddings=False)
    model = build_model(run, any_shape_config(run.model))
    keep_share(model, run, BATCH, share)
    stages = []
    with stage_alone(run, model, 1, True, memory_tracker.MemoryTracker(vocab_size=1)) as part:
        pipeline = part.pipeline
        for length in (8, 9, 9):
            ids = torch.zeros((4, length), dtype=torch.long)
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
            pipeline.train_step(keep_answer_logits(batch), 1.0)
            stages.append(weakref.ref(pipeline.schedule._stage))
    assert stages[1]() is stages[2]() is not None
    assert stages[0]() is None


def test_dropout_and_attention_are_as_on_a_gpu(shape: Callable[..., str]) -> None:
    """A CPU keeps a mask as wide as its input, a GPU one byte per element."""
    run = RunConfig(technique="lora", model=shape(num_hidden_layers=2), weights="random", lora_dropout=0.1)
    config = any_shape_config(run.model)
    gpu, cpu = (fake_step(run, config, BATCH, on_gpu)["backward: head and loss"] for on_gpu in (True, False))
    assert gpu["activations"] < 0.95 * cpu["activations"]


def test_a_run_folder_s_dry_run(tmp_path: Path) -> None:
    log = tmp_path / "dry_run.log"
    command = [sys.executable, "-m", "common.dry_run", "2.1_lora_finetuning/run_0_cpu_x1", "--batch_size", "8"]
    exit_code = run_forked(command, REPOSITORY, os.environ, log, timeout=300)
    said = log.read_text()
    assert exit_code == 0, said
    for each in ("8 rows of 39 tokens", "on CPU, 1 thread: fits"):
        assert each in said
    assert 5 < float(re.search(r"peak of allocated memory: (\d+\.\d+) MiB", said)[1]) < 50


def test_a_pipeline_s_dry_run_tells_each_device(dry_run_says: SayDryRun) -> None:
    said = dry_run_says("2.7_full_finetuning_with_pp/run_0_cpu_x2")
    counts = {
        "pp (1f1b, 8 micro-batches): 64 rows of 39 tokens": 1,
        "device 0: 2 layers, embeddings": 1,
        "device 1: 2 layers, head": 1,
        " MiB per device, in ": 2,
        "on CPU, 1 thread: fits": 2,
    }
    assert {each: said.count(each) for each in counts} == counts


def test_the_dry_run_of_a_folder_with_settings_takes_the_setting_s_own_recipe(dry_run_says: SayDryRun) -> None:
    said = dry_run_says("3.1_text_classification/run_0_cpu_x2", "--technique", "lora", "--parallel", "single")
    assert "lora of all-minilm-l6-v2, fp32, single: 64 rows of " in said
    assert "logits of 6 classes (the longest 64 of the run's 1,600 rows)" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), r"ddp: 16 rows of 1\d\d tokens with summaries of \d\d, .* \(the longest 16 of the run's 1,600 rows\)"),
        (("--seq-len", "48"),
         r"16 rows of 48 tokens with summaries of 64, logits at 64 positions \(by --seq-len\)"),
    ],
    ids=["its own", "of a length"],
)  # fmt: skip
def test_the_dry_run_of_summaries_has_their_length_beside_the_texts_own(
    options: tuple[str, ...], said: str, dry_run_says: SayDryRun
) -> None:
    out = dry_run_says("3.2_summarization/run_0_cpu_x2", *options)
    assert re.search(said, out)
    assert "on CPU, 1 thread: fits" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere is no run folder, as it has 0 files my_workflow_*.py"),
        (["3.1_text_classification/run_0_cpu_x2", "--parallel", "tp"],
         "parallel is tp, but fake tensors are not divided among ranks"),
    ],
)  # fmt: skip
def test_what_has_no_dry_run_ends_in_one_sentence(
    arguments: list[str], said: str, dry_run_says: SayDryRun, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        dry_run_says(*arguments)
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert len(error.splitlines()) == 1


def test_stacks_of_unequal_depth_are_refused(shape: Callable[..., str]) -> None:
    bart = json.loads((REPOSITORY / "assets/model_configs/bart-large-cnn.json").read_text())
    path = shape(**{**bart, "encoder_layers": 6, "num_hidden_layers": 6})
    with pytest.raises(BadInputError, match=r"\[6, 12\] layers"):
        dry_run(RunConfig(technique="full", model=path, weights="random"), BATCH)


def test_the_tracker_forgets_what_is_freed() -> None:
    tracker = memory_tracker.MemoryTracker(vocab_size=7, rounded_to=NO_ROUNDING)
    with tracker:
        kept = torch.ones(10)
        torch.ones(1000).sum()
    assert tracker.live["activations"] == kept.untyped_storage().nbytes()
    assert max(map(total, tracker.timeline.values())) >= 4000


def test_weights_in_4_bits_have_no_dry_run_but_a_next_step() -> None:
    with pytest.raises(BadInputError, match=r"quantization nf4, but fake tensors .* -m common.preflight`"):
        dry_run(RunConfig(technique="qlora"), BATCH)
    with pytest.raises(BadInputError, match="parallel is fsdp, but fake tensors are not divided"):
        dry_run(RunConfig(parallel="fsdp", devices=2), BATCH)


@pytest.mark.slow
def test_padding_to_a_multiple_is_run(run_config: RunConfig) -> None:
    short, long = BatchShape(2, 65, 8), BatchShape(2, 128, 8, padded=True)
    assert dry_run(replace(run_config, pad_to_multiple_of=64), short).peak == dry_run(run_config, long).peak


def test_padding_to_a_multiple_is_planned(run_config: RunConfig) -> None:
    run = replace(run_config, pad_to_multiple_of=64)
    assert job_of_run(run, BatchShape(2, 65, 8)).batch == BatchShape(2, 128, 8, padded=True)
