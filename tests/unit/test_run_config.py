"""RunConfig refuses what cannot be run, with the value and the next step."""

from dataclasses import replace

import pytest

from common.run_config import BadInputError, RunConfig, parse_overrides


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("batch_size", 0, "batch_size is 0"),
        ("batch_size", -3, "batch_size is -3"),
        ("devices", 0, "devices is 0"),
        ("epochs", 0, "epochs is 0"),
        ("learning_rate", 0.0, "learning_rate is 0.0"),
        ("learning_rate", float("nan"), "learning_rate is nan"),
        ("learning_rate", float("inf"), "learning_rate is inf"),
        ("report_share", 0.0, "report_share is 0.0"),
        ("warmup_share", 1.5, "warmup_share is 1.5"),
        ("lora_dropout", -0.1, "lora_dropout is -0.1"),
        ("max_steps", 0, "max_steps is 0"),
        ("test_rows", -2, "test_rows is -2"),
        ("devices", 2, "devices is 2, but parallel is single"),
        ("precision", "fp7", "precision is 'fp7': choose one of 'fp32', 'bf16'"),
        ("batch_size", "8", "batch_size is '8', but must be of type int"),
        ("batch_size", 1.5, "batch_size is 1.5, but must be of type int"),
        ("epochs", True, "epochs is True, but must be of type int"),
        ("run_name", "../../x", "'../../x'"),
        ("run_name", "a\0b", "cannot name a folder"),
        ("run_name", "x" * 300, "cannot name a folder"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_value(
    run_config: RunConfig, field: str, value: object, said: str
) -> None:
    with pytest.raises(BadInputError) as refused:
        replace(run_config, **{field: value})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_reentrant_checkpointing_is_refused_with_ddp(run_config: RunConfig) -> None:
    with pytest.raises(BadInputError, match="non-reentrant"):
        replace(run_config, parallel="ddp", devices=2, gradient_checkpointing="reentrant")


def test_effective_batch_size_counts_ranks_and_accumulation(run_config: RunConfig) -> None:
    ddp = replace(run_config, parallel="ddp", devices=4, batch_size=14, accumulation_steps=2)
    assert (ddp.world_size, ddp.effective_batch_size) == (4, 112)
    assert (run_config.world_size, run_config.effective_batch_size) == (1, 16)


def test_overrides_keep_the_literal_and_take_the_command_line(run_config: RunConfig) -> None:
    literal = replace(run_config, lora_rank=4, gradient_checkpointing="reentrant")
    run = parse_overrides(literal, ["--batch_size", "8", "--learning_rate", "1e-4"])
    assert run == replace(literal, batch_size=8, learning_rate=1e-4)


@pytest.mark.parametrize("arguments", [["--batchsize", "8"], ["--batch_size", "many"], ["--precision", "fp7"]])
def test_an_unknown_field_or_value_exits_with_2(run_config: RunConfig, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse_overrides(run_config, arguments)
    assert left.value.code == 2


@pytest.mark.parametrize(("scaling", "expected"), [("none", 1e-3), ("sqrt", 2e-3), ("linear", 4e-3)])
def test_the_learning_rate_grows_with_the_ranks_as_asked(scaling: str, expected: float) -> None:
    run = RunConfig(parallel="ddp", devices=4, learning_rate=1e-3, learning_rate_scaling=scaling)
    assert run.peak_learning_rate == pytest.approx(expected)
    assert RunConfig(learning_rate=1e-3, learning_rate_scaling=scaling).peak_learning_rate == 1e-3


def test_flash_attention_on_a_cpu_is_refused() -> None:
    with pytest.raises(BadInputError, match="attention is flash, but device is cpu"):
        RunConfig(attention="flash")


def test_a_setting_cut_short_is_no_setting() -> None:
    with pytest.raises(SystemExit) as left:
        parse_overrides(RunConfig(), ["--epoch", "3"])
    assert left.value.code == 2
