"""Odd config.json: refused by the key, before any library makes something of it."""

import json
from pathlib import Path

import pytest

from common.base.errors import BadInputError, reading
from common.planning.architectures import read_config

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


def test_what_a_library_in_rust_cannot_read_is_refused_and_an_interruption_is_none() -> None:
    class PanicException(BaseException):
        pass

    with pytest.raises(BadInputError, match="file"), reading("The file"):
        raise PanicException("range end index")
    for error in (KeyboardInterrupt, MemoryError):
        with pytest.raises(error), reading("The file"):
            raise error
