"""Odd config.json and adapter_config.json: refused by the key, before any library makes something of it."""

import json
from pathlib import Path

import pytest

from common.base.errors import BadInputError, reading
from common.planning.model_configs import read_config
from common.serving.tuned_runs import check_adapter

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"num_hidden_layers": 1000000}', "num_hidden_layers"),
        ('{"n_layer": 1000000}', "n_layer"),
        ('{"text_config": {"part": {"num_layers": 1000000}}}', "num_layers"),
        ('{"num_labels": 1000000000}', "num_labels"),
        ('{"model_type": {}}', "model_type"),
        ('{"architectures": 3}', "architectures"),
        ('{"architectures": [null]}', "architectures"),
        (f'{{"hidden_size": {"7" * 5_000}}}', "cannot be read"),
        (f'{{"x": {DEEP}}}', "cannot be read"),
        (DEEP, "cannot be read"),
        ("3", "cannot be read"),
        ("", "cannot be read"),
    ],
)
def test_an_odd_config_is_refused_by_its_key(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadInputError, match=rf"{said}.*of mine|of mine.*{said}"):
        read_config(tmp_path / "config.json", "mine")


def test_what_published_models_have_is_none_of_that(tmp_path: Path) -> None:
    usual = {"type_vocab_size": 0, "num_nextn_predict_layers": 0, "no_rope_layers": [1, 0], "num_hidden_layers": 126,
             "head_dim": None, "architectures": None, "sliding_window": 2**40, "num_labels": 200_000}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(usual))
    assert read_config(tmp_path / "config.json", "mine") == usual


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target_modules": "(.*)*x"}, r"\(\.\*\)\*x"),
        ({"target_modules": ["(a+)+$"]}, "pattern"),
        ({"rank_pattern": {"(a+)+$": 4}}, "pattern"),
        ({"layer_replication": [[0, 1_000_000]]}, "layer_replication"),
        ({"layers_to_transform": [3], "use_dora": True}, "layers_to_transform, use_dora"),
        ({"of_another_version": {"x": 1}}, "of_another_version"),
        ({"peft_type": "IA3"}, "IA3"),
        ([], "IA3|None"),
        ("", "cannot be read"),
    ],
)
def test_an_adapter_with_settings_that_no_run_makes_is_refused(settings: object, said: str, tmp_path: Path) -> None:
    content = {"peft_type": "LORA", "r": 4, **settings} if isinstance(settings, dict) else settings
    (tmp_path / "adapter_config.json").write_text(json.dumps(content) if content != "" else "{")
    with pytest.raises(BadInputError, match=said):
        check_adapter(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": r"model\.text_model\..*\.(q_proj|v_proj)", "modules_to_save": ["connector"]},
        {"rank_pattern": {r".*\.gate_up_proj": 8}, "target_parameters": ["experts.gate_up_proj"]},
        {"layers_pattern": None, "loftq_config": {}, "bias": "none", "of_another_version": False},
    ],
)
def test_an_adapter_as_runs_make_it_is_taken(settings: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, **settings}))
    check_adapter(tmp_path)


def test_what_a_library_in_rust_cannot_read_is_refused_and_an_interruption_is_none() -> None:
    class PanicException(BaseException):
        pass

    with pytest.raises(BadInputError, match="file"), reading("The file"):
        raise PanicException("range end index")
    for error in (KeyboardInterrupt, MemoryError):
        with pytest.raises(error), reading("The file"):
            raise error
