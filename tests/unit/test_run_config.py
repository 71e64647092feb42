"""RunConfig refuses what cannot be run, with the value and the next step."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from common.base.errors import BadInputError
from common.base.parsing import parse_overrides
from common.base.run_config import RunConfig

PIPELINE = {"parallel": "pp", "devices": 2, "micro_batches": 8}
ON_GPUS = {"device": "cuda", "gpu": "RTX A6000 48GB"}
CLASSIFIER = {"task": "classification", "technique": "full"}
TENSOR_PARALLEL = {**CLASSIFIER, "parallel": "tp", "devices": 2}
OUT_OF_RANGE = [
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size is 0"),
    ({"per_device_train_batch_size": -3}, "per_device_train_batch_size is -3"),
    ({"devices": 0}, "devices is 0"),
    ({"num_train_epochs": 0}, "num_train_epochs is 0"),
    ({"learning_rate": 0.0}, "learning_rate is 0.0"),
    ({"learning_rate": float("nan")}, "learning_rate is nan"),
    ({"learning_rate": float("inf")}, "learning_rate is inf"),
    ({"eval_steps": 0.0}, "eval_steps is 0.0"),
    ({"warmup_steps": -0.5}, "warmup_steps is -0.5"),
    ({"lora_dropout": -0.1}, "lora_dropout is -0.1"),
    ({"max_steps": 0}, "max_steps is 0"),
    ({"test_rows": -2}, "test_rows is -2"),
    ({"devices": 2}, "devices is 2, but parallel is single"),
    ({"precision": "fp7"}, "precision is 'fp7': choose one of 'fp32', 'bf16'"),
    ({"per_device_train_batch_size": "8"}, "per_device_train_batch_size is '8', but must be of type int"),
    ({"per_device_train_batch_size": 1.5}, "per_device_train_batch_size is 1.5, but must be of type int"),
    ({"num_train_epochs": True}, "num_train_epochs is True, but must be of type int"),
    ({"run_name": "../../x"}, "'../../x'"),
    ({"run_name": "a\0b"}, "zero byte"),
    ({"run_name": "x" * 300}, "cannot name a folder"),
]
CONTRADICTIONS = [
    (
        {"parallel": "ddp", "devices": 2, "gradient_checkpointing": True, "use_reentrant": True},
        "use_reentrant is True, which is for single and mp",
    ),
    ({"attention": "flash"}, "attention is flash, but device is cpu"),
    ({"parallel": "mp"}, "parallel is mp, but there is one stage: pass --stages 2 or more"),
    ({"parallel": "mp", "stages": 1}, "parallel is mp, but there is one stage: pass --stages 2"),
    ({"parallel": "mp", **ON_GPUS}, "parallel is mp, but there is one stage: pass --devices 2 or more"),
    ({"parallel": "pp"}, "parallel is pp, but there is one stage: pass --devices 2 or more"),
    ({"parallel": "mp", "devices": 2}, "pass --devices 1, and --stages 2"),
    ({"parallel": "mp", "devices": 2, "stages": 4, **ON_GPUS}, "stages is 4, but there is one for each of 2"),
    ({**PIPELINE, "stages": 3}, "stages is 3, but there is one for each of 2"),
    ({"stages": 2}, "stages is 2, which is for mp and pp (2.5, 2.7): leave --stages out"),
    ({"stages": -1}, "stages is -1, but must be at least 0"),
    ({"parallel": "mp", "stages": 2, "micro_batches": 4}, "micro_batches is 4, which is for pp"),
    ({"micro_batches": 2}, "micro_batches is 2, which is for pp"),
    ({"pad_to_multiple_of": -8}, "pad_to_multiple_of is -8, but must be at least 0"),
    ({"pad_to_multiple_of": 64, "max_length": 250}, "max_length 250 is no multiple of it"),
    (
        {"technique": "full", "task": "summarization", "pad_to_multiple_of": 64, "max_target_length": 100},
        "pass --max_target_length 128",
    ),
    ({**PIPELINE, "micro_batches": 0}, "micro_batches is 0, but must be at least 1"),
    ({**PIPELINE, "micro_batches": 1}, "micro_batches is 1, but 1F1B needs one for each of 2 stages"),
    (
        {**PIPELINE, "micro_batches": 5},
        "per_device_train_batch_size is 16, which 5 micro-batches do not divide: pass --per_device_train_batch",
    ),
    (
        {**PIPELINE, "per_device_train_batch_size": 4},
        "per_device_train_batch_size is 4, which 8 micro-batches do not divide: pass --per_device_train_batch",
    ),
    ({**PIPELINE, "schedule": "zigzag"}, "schedule is 'zigzag': choose one of '1f1b', 'gpipe'"),
    ({**PIPELINE, "device_map": "auto"}, "device_map is auto, which is for mp"),
    ({**PIPELINE, "precision": "fp16-mixed"}, "precision is fp16-mixed, which pp does not scale losses for"),
    ({**PIPELINE, "gradient_checkpointing": True, "use_reentrant": True}, "leave --use_reentrant out"),
    ({"target_modules": "all"}, "target_modules is all, but adapters stand beside linear layers"),
    ({"parallel": "ddp", "devices": 3, "nodes": 2}, "cannot be spread evenly over 2 nodes: pass --devices 4"),
    ({"nodes": 2}, "nodes is 2, which is for several ranks"),
    ({"parallel": "ddp", "devices": 2, "link": "ethernet-25"}, "link is ethernet-25, which is for several mach"),
    (
        {"task": "visual_questions", "precision": "fp16-mixed", "freeze_vision_tower": False, "device": "cuda"},
        "freeze_vision_tower is False, but precision is fp16-mixed, where LoRA keeps the model in fp16",
    ),
]
NOT_OF_CLASSIFICATION = [
    (
        {**TENSOR_PARALLEL, "devices": 1},
        "parallel is tp, but there is 1 device, and nothing to divide: pass --devices",
    ),
    ({**TENSOR_PARALLEL, "task": "chat"}, "task is chat, but technique is full and parallel tp: it is done with"),
    ({**TENSOR_PARALLEL, "precision": "bf16"}, "parallel is tp, but precision is bf16: pass --precisi"),
    ({**TENSOR_PARALLEL, "gradient_checkpointing": True}, "gradient_checkpointing is True, but parallel is tp"),
    ({**TENSOR_PARALLEL, "optim": "adafactor"}, "optim is adafactor, which tensor parallelism cannot divide"),
    ({**CLASSIFIER, "technique": "qlora"}, "task is classification, but technique is qlora and parallel single"),
    ({**CLASSIFIER, "parallel": "fsdp", "devices": 2}, "technique is full and parallel fsdp: it is done with full"),
    ({**CLASSIFIER, "parallel": "mp", "stages": 2}, "full or lora, and single, ddp, pp, tp (3.1)"),
    ({**CLASSIFIER, "long_texts": "keep"}, "long_texts is 'keep': choose one of 'cut', 'refuse'"),
    ({**CLASSIFIER, "early_stopping_patience": -1}, "early_stopping_patience is -1, but must be at least 0"),
]


@pytest.mark.parametrize(("settings", "said"), [*OUT_OF_RANGE, *CONTRADICTIONS, *NOT_OF_CLASSIFICATION])
def test_what_cannot_be_run_is_refused_in_one_sentence(settings: dict[str, object], said: str) -> None:
    with pytest.raises(BadInputError) as refused:
        RunConfig(**settings)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_overrides_keep_the_literal_and_take_the_command_line(run_config: RunConfig) -> None:
    literal = replace(run_config, lora_r=4, gradient_checkpointing=True, use_reentrant=True)
    run = parse_overrides(literal, ["--batch_size", "8", "--learning_rate", "1e-4"])
    assert run == replace(literal, per_device_train_batch_size=8, learning_rate=1e-4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batchsize", "8"], "--batchsize"),
        (["--batch_size", "many"], "many"),
        (["--precision", "fp7"], "fp7"),
        (["--epoch", "3"], "--num_train_epochs"),  # cut short
        (["--accumulation_steps", "2"], "--gradient_accumulation_steps"),  # the old name, and the new one
    ],
)
def test_an_unknown_field_or_value_exits_with_2(
    run_config: RunConfig, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        parse_overrides(run_config, arguments)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("scaling", "expected"), [("none", 1e-3), ("sqrt", 2e-3), ("linear", 4e-3)])
def test_the_learning_rate_grows_with_the_ranks_as_asked(scaling: str, expected: float) -> None:
    """And with the rows, not with stages."""
    asked = {"learning_rate": 1e-3, "learning_rate_scaling": scaling}
    assert RunConfig(parallel="ddp", devices=4, **asked).peak_learning_rate == pytest.approx(expected)
    assert RunConfig(**asked).peak_learning_rate == RunConfig(**PIPELINE, **asked).peak_learning_rate == 1e-3


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({"technique": "lora", "precision": "bf16"}, False),
        ({"technique": "lora", "precision": "fp16-mixed"}, False),  # frozen weights stay in fp16
        ({"technique": "full", "precision": "fp16-mixed"}, True),
        ({"technique": "lora", "precision": "fp32"}, True),
        ({"technique": "full", "precision": "bf16-mixed"}, True),
        # FSDP gathers weights in bf16, and whole models answer in it
        ({"technique": "full", "precision": "bf16-mixed", "parallel": "fsdp", "devices": 2}, False),
    ],
)
def test_flash_attention_wants_weights_in_16_bits(settings: dict[str, object], is_refused: bool) -> None:
    """Validation and training have autocast, but the base answers without it."""
    said = f"attention is flash, but precision is {settings['precision']}"
    with pytest.raises(BadInputError, match=said) if is_refused else nullcontext():
        RunConfig(device="cuda", attention="flash", **settings)


@pytest.mark.parametrize(
    ("settings", "ranks", "data_parallel_ranks", "stages", "rows"),
    [
        ({}, 1, 1, 1, 16),
        ({"parallel": "ddp", "devices": 4}, 4, 4, 1, 64),
        ({"parallel": "ddp", "devices": 4, "per_device_train_batch_size": 14, "gradient_accumulation_steps": 2},
         4, 4, 1, 112),
        ({"parallel": "mp", "stages": 3}, 1, 1, 3, 16),
        ({"parallel": "mp", "devices": 4, **ON_GPUS}, 1, 1, 4, 16),
        ({"parallel": "mp", "devices": 4, "stages": 4, **ON_GPUS}, 1, 1, 4, 16),
        ({**PIPELINE, "devices": 4, "gradient_accumulation_steps": 3}, 4, 1, 4, 48),
        ({**PIPELINE, "schedule": "gpipe", "micro_batches": 1}, 2, 1, 2, 16),
        ({"technique": "full", "target_modules": "all"}, 1, 1, 1, 16),
        (TENSOR_PARALLEL, 2, 1, 1, 16),
    ],
)  # fmt: skip
def test_ranks_stages_and_rows_of_each_way_to_share_the_work(
    settings: dict[str, object], ranks: int, data_parallel_ranks: int, stages: int, rows: int
) -> None:
    run = RunConfig(**settings)
    shared = (run.world_size, run.data_parallel_ranks, run.stage_count, run.effective_batch_size)
    assert shared == (ranks, data_parallel_ranks, stages, rows)


def test_names_take_dashes_and_short_spellings(run_config: RunConfig) -> None:
    asked = ["--per-device-eval-batch-size", "4", "--batch-size", "8", "--lora-rank", "2", "--optimizer", "sgd"]
    expected = replace(run_config, per_device_eval_batch_size=4, per_device_train_batch_size=8, lora_r=2, optim="sgd")
    assert parse_overrides(run_config, asked) == expected
    assert (
        parse_overrides(replace(run_config, gradient_checkpointing=True), ["--no-gradient-checkpointing"]) == run_config
    )


def test_settings_come_from_yaml_below_the_command_line(run_config: RunConfig, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("learning_rate: 1e-4\nlora_r: 2\nmax_grad_norm: 1\n")
    run = parse_overrides(run_config, ["--config", str(file), "--lora_r", "4"])
    assert run == replace(run_config, learning_rate=1e-4, lora_r=4, max_grad_norm=1)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("padding_free: no", "padding_free", "no"),
        ("padding_free: yes", "padding_free", "yes"),
        ("run_name: on", "run_name", "on"),
        ("run_name: 007", "run_name", "007"),
        ("run_name: 2026-01-02", "run_name", "2026-01-02"),
        ("run_name: 1_000", "run_name", "1_000"),
        ("data: 12:30", "data", "12:30"),
        ("dataset_revision: 1e5", "dataset_revision", "1e5"),
        ("gradient_checkpointing: on", "gradient_checkpointing", True),
        ("gradient_checkpointing: Off", "gradient_checkpointing", False),
        ("gradient_checkpointing: yes", "gradient_checkpointing", True),
        ("gradient_checkpointing: false", "gradient_checkpointing", False),
        ("max_steps: 1_000", "max_steps", 1000),
        ("learning_rate: 1e-4", "learning_rate", 1e-4),
        ("learning_rate: 0.001", "learning_rate", 1e-3),
        ("max_steps: '3'", "max_steps", 3),
    ],
)
def test_a_yaml_value_means_what_is_written(
    text: str, name: str, value: object, run_config: RunConfig, tmp_path: Path
) -> None:
    """YAML itself makes a boolean of `no` and `on`, 7 of `007`, 750 of `12:30`, and a date of a date."""
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    for words in (["--config", str(file)], [f"--config={file}"]):
        found = getattr(parse_overrides(run_config, words), name)
        assert (found, type(found)) == (value, type(value))


NESTED = "model: " + "[" * 600
ALIASES = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrstuvwxyz"))
MERGES = "a: &a {x: 1}\n" + "".join(f"{b}: &{b} {{<<: [*{a}, *{a}, *{a}]}}\n" for a, b in pairwise("abcdefghijklmnop"))


@pytest.mark.parametrize(
    "text",
    [
        *("- 1", "rank: 4", "lora_r: [1, 2]", "lora_r: 2\n  oops", "", "lora_r: {", "no: 1", "lora_r: null", "\t- x"),
        *("technique: [lora]", "target_modules: [q_proj, v_proj]", "task: {chat: 1}", "model: !!binary aGFsbG8="),
        *("env:\n  SECRET: x", "gradient_checkpointing: maybe", "--- 1\n--- 2", "model: !!python/name:os.system"),
        *("? [a, b]\n: 1", "model: *b"),
        *("model: caf\udce9", "max_steps: 2.0", NESTED, ALIASES, MERGES),
    ],
    ids=lambda text: text[:20],
)
def test_a_yaml_file_with_something_else_in_it_is_refused(run_config: RunConfig, tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text, errors="surrogateescape")
    with pytest.raises((BadInputError, SystemExit)):
        parse_overrides(run_config, ["--config", str(file)])
    with pytest.raises(BadInputError, match=r"no\.yaml"):
        parse_overrides(run_config, ["--config", str(tmp_path / "no.yaml")])


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"technique": "full", "lora_r": 4}, "lora_r"),
        ({"quantization": "nf4-double"}, "quantization"),
        ({"use_reentrant": True}, "use_reentrant"),
        ({"device_map": "even"}, "device_map"),
        ({"schedule": "gpipe"}, "schedule"),
        ({"offload": "cpu", "device": "cuda"}, "offload"),
        ({"num_beams": 1}, "num_beams"),
        ({"label_column": "kind"}, "label_column"),
        ({"bucket_cap_mb": 1.0}, "bucket_cap_mb"),
    ],
)
def test_a_setting_that_means_nothing_for_the_run_is_refused(settings: dict[str, object], name: str) -> None:
    with pytest.raises(BadInputError, match=f"^{name} is .* which is for .*: leave --{name} out"):
        RunConfig(**settings)


def test_a_run_that_becomes_another_loses_what_means_nothing_any_more(run_config: RunConfig) -> None:
    pipeline = replace(run_config, parallel="pp", devices=2, micro_batches=8, lora_r=4)
    one_device = pipeline.changed_to(parallel="single", devices=1)
    assert (one_device.micro_batches, one_device.lora_r) == (1, 4)
    with pytest.raises(BadInputError, match="micro_batches is 4, which is for pp"):
        pipeline.changed_to(parallel="single", devices=1, micro_batches=4)
