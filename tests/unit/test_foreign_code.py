"""No code of others runs: no model's, adapter's, picture's, settings' or record's; pictures are read in one folder."""

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from PIL import Image

from bench import repeat
from common.base.errors import BadInputError
from common.base.parsing import parse_overrides
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.data.pictures import check_picture, open_picture, reference_to
from common.models.loading import EMBEDDED_BASE, any_shape_config, load_tokenizer, model_without_weights
from common.records.store import kept_records
from common.serving.tuned_runs import check_adapter

# -- models, tokenizers and data sets

LOADING = {"from_pretrained", "from_config", "load_dataset"}
OF_PEFT = {"PeftModel", "ModelCard"}  # they load no code: an adapter's own settings are checked before
SAYS_IT_ITSELF = {"what_to_load", "source", "how"}  # dictionaries with `trust_remote_code`


def sources() -> Iterator[tuple[str, str]]:
    for path in [*REPOSITORY.glob("common/**/*.py"), *REPOSITORY.glob("bench/*.py"), *REPOSITORY.glob("assets/*.py"),
                 *REPOSITORY.glob("*/run_*/*.py")]:  # fmt: skip
        yield str(path.relative_to(REPOSITORY)), path.read_text(encoding="utf-8")
    for path in REPOSITORY.glob("*/run_*/*.ipynb"):
        for cell in nbformat.reads(path.read_text(encoding="utf-8"), 4).cells:
            if cell.cell_type == "code" and any(name in cell.source for name in LOADING):
                yield str(path.relative_to(REPOSITORY)), cell.source


def trusts(call: ast.Call) -> bool:
    """Whether a call that loads does not say that it trusts no code."""
    spread = [keyword.value for keyword in call.keywords if keyword.arg is None]
    says = any(ast.unparse(value).partition("(")[0] in SAYS_IT_ITSELF for value in spread)
    return not says and "trust_remote_code=False" not in map(ast.unparse, call.keywords)


def calls_that_trust(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            owner = getattr(getattr(node.func, "value", None), "id", "")
            is_quantizer = owner == "AutoHfQuantizer"
            if name in LOADING and owner not in OF_PEFT and not is_quantizer and trusts(node):
                yield ast.unparse(node)


def test_every_call_that_loads_says_that_no_code_is_trusted() -> None:
    found = {place: trusting for place, source in sources() if any(n in source for n in LOADING)
             if (trusting := list(calls_that_trust(source)))}  # fmt: skip
    assert found == {}
    assert list(calls_that_trust("AutoModel.from_pretrained(folder)\nload_dataset(x, trust_remote_code=True)")) != []


def foreign_model(folder: Path, **config: object) -> Path:
    """A model's folder with code of its own beside the files of the embedded base."""
    for file in EMBEDDED_BASE.iterdir():
        if file.suffix != ".md":
            (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    of_base = json.loads((EMBEDDED_BASE / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**of_base, **config}))
    ran = f"import pathlib\npathlib.Path({str(folder / 'ran')!r}).touch()\nraise ValueError('ran')\n"
    for place in ("own.py", "custom_generate/generate.py"):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text(ran)
    return folder


def test_a_models_own_code_does_not_run_and_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Tokenizer", None]}
    run = RunConfig(model=str(foreign_model(tmp_path, auto_map=own)))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    model_without_weights(run)
    load_tokenizer(run)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_a_kernel_of_the_hub_that_a_config_names_is_not_looked_for(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "transformers.integrations.hub_kernels.get_kernel", lambda *_, **__: pytest.fail("looked for a kernel")
    )
    run = RunConfig(model=str(foreign_model(tmp_path, **{key: "someone/kernel"})))
    assert any_shape_config(run.model)._attn_implementation is None
    assert model_without_weights(run).config._attn_implementation in ("sdpa", "eager")


# -- adapters


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"megatron_core": "foreign_module", "megatron_config": {"a": 1}}, "foreign_module.* no code of others is run"),
        ({"megatron_core": "megatron.evil", "megatron_config": None}, "megatron.evil.* no code of others is run"),
        ({"megatron_config": {"init_method": "x"}}, "megatron_config"),
        ({"peft_type": "PROMPT_TUNING", "tokenizer_kwargs": {"trust_remote_code": True}}, "PROMPT_TUNING"),
        ({"peft_type": "XLORA"}, "XLORA"),
        ({"peft_type": None}, "None"),
    ],
)
def test_an_adapter_that_imports_a_module_or_is_of_another_kind_is_refused(
    settings: dict[str, object], said: str, tmp_path: Path
) -> None:
    plain = {"peft_type": "LORA", "megatron_core": "megatron.core", "megatron_config": None}
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(plain))
    check_adapter(tmp_path)
    file.write_text(json.dumps({**plain, **settings}))
    with pytest.raises(BadInputError, match=said):
        check_adapter(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '"x"', "[" * 5000, '{"peft_type": []}'])
def test_settings_of_an_adapter_that_cannot_be_read_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(BadInputError):
        check_adapter(tmp_path)


# -- files of settings


@pytest.mark.parametrize(
    "text",
    [
        "env: {FOREIGN_VARIABLE: x}\nseed: 3",
        "env:\n  PYTHONPATH: /tmp\n",
        "env:\n",
        "seed: !!python/object/apply:os.system ['true']",
        "a: &a [x, x]\nb: &b [*a, *a]\nseed: *b",
    ],
)
def test_a_file_of_settings_sets_no_variable_and_makes_no_object(text: str, tmp_path: Path) -> None:
    file, before = tmp_path / "mine.yaml", dict(os.environ)
    file.write_text(text)
    with pytest.raises(BadInputError, match="--config"):
        parse_overrides(RunConfig(), ["--config", str(file)])
    assert dict(os.environ) == before


# -- pictures

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"


@pytest.mark.parametrize("content", [EPS, b"\x00\x00\x01\x00\x01\x00", b"SIMPLE  =                    T" + b" " * 2850])
def test_a_picture_is_of_a_listed_format_whatever_it_is_called(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.check_call", lambda *_, **__: pytest.fail("started a program"))
    file = tmp_path / "picture.png"
    file.write_bytes(content)
    for read in (lambda: check_picture(str(file), "row 3"), lambda: open_picture(str(file))):
        with pytest.raises(BadInputError, match="PNG"):
            read()


@pytest.mark.parametrize("suffix", ["bmp", "gif", "jpg", "png", "ppm", "tiff", "webp"])
def test_usual_formats_are_read(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"picture.{suffix}"
    Image.new("RGB", (8, 6), "white").save(file)
    assert open_picture(str(file)).size == (8, 6)


def test_a_picture_lies_in_the_folder_of_its_data(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "inside").mkdir(parents=True)
    for file in (tmp_path / "out.png", folder / "in.png", folder / "inside" / "in.png"):
        Image.new("RGB", (8, 6)).save(file)
    (folder / "link.png").symlink_to(tmp_path / "out.png")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "own.png").symlink_to("inside/in.png")
    outside = ("../out.png", str(tmp_path / "out.png"), "link.png", "linked/out.png", "inside/../../out.png")
    for name in outside:
        for picture in (name, {"path": name, "bytes": None}):
            with pytest.raises(BadInputError, match="row 3 names the picture"):
                reference_to(picture, folder, "row 3")
    for name in ("in.png", "inside/in.png", "inside/../in.png", "own.png", str(folder / "in.png")):
        assert Path(reference_to(name, folder, "row 3")).is_file()


# -- records


@pytest.mark.parametrize(
    "command",
    [
        "python -c 'import os'", "python ../elsewhere/my_workflow_x.py", "python -m pip install x",
        "sh my_workflow_x.py", "torchrun --nproc_per_node 2 --no-python sh my_workflow_x.py",
        "python evil.py my_workflow_x.py",
    ],
)  # fmt: skip
def test_a_records_command_starts_nothing_but_a_workflow(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "stream_command", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(BadInputError, match="no workflow"):
        repeat.repeat({"command": command, "run_folder": "2.1_lora_finetuning/run_0_cpu_x1", "run_name": "x"})


def test_every_kept_command_may_be_repeated() -> None:
    others = [run["command"] for run in kept_records() if repeat.is_repeatable(run)]
    assert [command for command in others if not repeat.OF_A_FOLDER.fullmatch(command)] == []
