"""Odd files, rows, settings, models, adapters and records: each ends in one sentence that names it, or in success.

Inputs are drawn by number, so that a failure is found again: `python -m tests.faults.test_fuzzed KIND FIRST LAST`.
"""

import gzip
import io
import json
import lzma
import os
import pickle
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import fields
from functools import cache
from pathlib import Path
from random import Random
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from bench.compare import main as compare
from bench.page.page import page_and_details
from common.base.command_line import FAULT
from common.base.errors import BadInputError, RunStoppedError, shortened
from common.base.parsing import parse_overrides
from common.base.run_config import RunConfig
from common.chat import main as chat
from common.checks.inputs import check_inputs
from common.checks.planner_command import main as planner
from common.checks.preview import main as preview
from common.export import main as export
from common.models.loading import ASSETS, load_base_model, load_tokenizer
from common.models.trained_weights import add_lora
from common.records.store import kept_files, load_record

INPUTS = int(os.environ.get("FUZZED_INPUTS", "20"))
"""Of each kind; `make soak` takes more."""
LONGEST_S = 20
ODD = [
    None, True, False, 0, -1, 1, 3, 0.5, 1e308, float("nan"), float("inf"), 10**6, 2**63, 10**30, "", " ", "x", "0",
    "\ud800", "\0", "../x", "a\nb", "é" * 5_000, [], [[]], ["x"], [1, "x", None], {}, {"x": 1}, {"": {}}, "@deep",
    "@long",
]  # fmt: skip
"""What stands where something else is meant."""
WRITTEN = {'"@deep"': "[" * 20_000 + "]" * 20_000, '"@long"': "7" * 5_000}
"""What Python's writer of JSON cannot write itself."""
ROWS = [
    {"id": f"r{number}", "messages": [
        {"role": "system", "content": "Be kind."}, {"role": "user", "content": f"Who made {number}?"},
        {"role": "assistant", "content": "Vance", "tool_calls": [
            {"type": "function", "function": {"name": "find", "arguments": {"what": "clock"}}}] if number % 2 else []},
    ], "tools": [{"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {
        "type": "object", "properties": {"what": {"type": "string"}}}}}]}
    for number in range(8)
]  # fmt: skip
TEXTS = [{"text": f"Where is {number}?", "label": "ab"[number % 2], "summary": "Here."} for number in range(12)]
PAIRS = [{"prompt": f"Who made {number}?", "chosen": "Vance.", "rejected": "No one."} for number in range(12)]
MORE_OF_CONFIG = {
    "_attn_implementation": "kernels-community/flash-attn", "attn_implementation": "x/y", "dtype": "float7",
    "auto_map": {"AutoConfig": "m.C"},
    "quantization_config": {"quant_method": "gptq", "bits": 4}, "rope_scaling": {"type": "linear", "factor": 2.0},
    "text_config": {"model_type": "llama"}, "vision_config": {}, "id2label": {"0": "a"}, "num_labels": 10**9,
    "torch_dtype": "x", "layer_types": ["full_attention"], "sliding_window": 4, "is_encoder_decoder": True,
    "tokenizer_class": "T",
    "num_experts": 8, "n_layer": 10**6, "transformers_version": 5, "use_bidirectional_attention": True,
}  # fmt: skip
MORE_OF_TOKENIZER = {
    "chat_template": [{"name": "default", "template": "x"}], "auto_map": {"AutoTokenizer": ["m.T", None]},
    "added_tokens_decoder": {"0": {"content": "x"}, "z": 1}, "bos_token": {"__type": "AddedToken", "content": "<s>"},
    "tokenizer_class": "LlamaTokenizer", "model_max_length": 0, "processor_class": "P",
    "extra_special_tokens": {"x": 1},
}  # fmt: skip
LOOP = "{% for a in range(99999) %}" * 4 + "x" + "{% endfor %}" * 4
TEMPLATES = [
    "", " ", "x", "{{", "{% for m in messages %}", "{{ messages[99].content }}", "{{ raise_exception('no') }}", LOOP,
    "{{ messages | map(attribute='content') | join }}", "{{ 1 / 0 }}", "{{ nothing.at.all }}", "{% include 'x' %}",
    "{{ range(10 ** 9) | list }}", "{{ 9 ** 9 ** 9 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "\ud800",
    "{{ messages.__class__.__mro__ }}", "{{ '%c' % 55296 }}", "{% for m in messages %}{{ m.content + 1 }}{% endfor %}",
    "{% generation %}{{ messages }}{% endgeneration %}",
    "{{ messages | tojson }}{{ tools | tojson }}{{ eos_token }}",
    "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}", "{{ strftime_now(3) }}",
    "{{ messages.append(1) }}",
]  # fmt: skip
Work = Callable[[], object]


class TookTooLong(BaseException):
    """Raised where an input is still being read after `LONGEST_S`."""


@contextmanager
def limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def said_of(work: Work) -> str:
    """What is said where an input is refused; empty where it is taken. Anything else that is raised is raised again."""
    said = io.StringIO()
    try:
        with limited(), redirect_stdout(io.StringIO()), redirect_stderr(said):
            work()
    except (BadInputError, RunStoppedError) as refused:
        return shortened(str(refused))  # as a command says it
    except SystemExit as end:
        if FAULT in str(end.code):
            raise end.__context__ from None
        return said.getvalue() if end.code == 2 else str(end.code or "")
    return ""


def command(main: Callable[[], None], *arguments: object) -> None:
    """A command line, in this process."""
    with patch.object(sys, "argv", ["command", *map(str, arguments)]):
        main()


# -- how inputs are made odd


def changed(value: object, random: Random, more: dict[str, object] | None = None) -> object:
    """A copy of JSON in which parts are missing, odd, called otherwise, or too many."""
    copy = json.loads(json.dumps(value))
    for _ in range(random.randint(1, 3)):
        if more and isinstance(copy, dict) and random.random() < 0.3:
            name = random.choice(list(more))
            copy[name] = deepcopy(random.choice([more[name], more[name], random.choice(ODD)]))
            continue
        holder, place = random.choice(list(_places(copy)) or [([None], 0)])
        match random.randrange(6):
            case 0:
                del holder[place]
            case 1 if isinstance(holder, dict):
                holder[random.choice([f"{place}x", "", "\ud800"])] = holder.pop(place)
            case _:
                holder[place] = deepcopy(random.choice(ODD))
    return copy


def _places(value: object) -> Iterator[tuple[list | dict, object]]:
    keys = range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else ()
    for key in list(keys)[:50]:
        yield value, key
        yield from _places(value[key])


def text_of(value: object) -> bytes:
    text = json.dumps(value)
    for mark, written in WRITTEN.items():
        text = text.replace(mark, written)
    return text.encode()


def odd_json(content: bytes, random: Random, more: dict[str, object] | None = None) -> bytes:
    """A file of JSON with odd parts, unless it was damaged before."""
    try:
        return text_of(changed(json.loads(content), random, more))
    except (ValueError, RecursionError):
        return content


def damaged(content: bytes, random: Random) -> bytes:
    """Bytes that were cut, overwritten, doubled, or are another file's."""
    place = random.randrange(len(content) + 1)
    some = random.randbytes(random.randint(1, 9))
    return random.choice([
        content[:place], content[place:], content[:place] + some + content[place + len(some) :], b"", some,
        content[:place] + some + content[place:], content + content, b"\xef\xbb\xbf" + content, b"\xff\xfe" + content,
        content[: place // 2] + content[place:], content.replace(b"\n", b"\r"), content.replace(b'"', b"'"),
        content.replace(b",", b";"), b"null", b"[" * 20_000, b'{"a":' * 20_000, b"version https://git-lfs.github.com/",
    ])  # fmt: skip


def table_bytes(rows: list[dict], suffix: str, random: Random) -> bytes:
    """Rows as a file of a kind."""
    lines = b"\n".join(map(text_of, rows))
    match suffix.split(".")[0]:
        case "jsonl" | "ndjson":
            return lines
        case "json":
            wrapped = random.choice([rows, {"data": rows}, {"train": rows, "test": rows}, {"train": {"a": rows}}])
            return random.choice([text_of(wrapped), json.dumps(wrapped, indent=1).encode()])
        case "csv" | "tsv":
            delimiter = "\t" if suffix.startswith("tsv") else random.choice(",;|")
            cells = [[str(value).encode("utf-8", "replace").decode() for value in row.values()] for row in rows]
            quote = random.choice(['"', "", "'"])
            names = delimiter.join(map(str, rows[0]))
            table = [names, *(delimiter.join(f"{quote}{cell}{quote}" for cell in row) for row in cells)]
            return "\n".join(table).encode("utf-8", "replace")
        case "parquet":
            file = io.BytesIO()
            try:
                pq.write_table(pa.Table.from_pylist(rows), file)
            except (pa.ArrowException, TypeError, ValueError, AttributeError, OverflowError, UnicodeError):
                pq.write_table(pa.table({"messages": [json.dumps(row) for row in rows]}), file)
            return file.getvalue()
    return b"\n\n".join(map(text_of, rows))


# -- the kinds: each makes an input in a folder, and returns what reads it


def read_as_data(path: Path, random: Random) -> Work:
    model = ["--model", "assets/embedded_summarizer"]
    of_task = {"classification": ["--model", "roberta-large", "--weights", "random"], "summarization": model}
    task = random.choice(["chat", "chat", "classification", "summarization", "preferences"])
    how = ["--task", task, *of_task.get(task, [])]
    return lambda: command(preview, path, *how)


def bytes_of_files(random: Random, folder: Path) -> Work:
    suffix = random.choice(
        [
            "jsonl",
            "json",
            "csv",
            "tsv",
            "parquet",
            "txt",
            "ndjson",
            "jsonl.gz",
            "csv.xz",
            "json.bz2",
            "zip",
            "jsonl.zst",
        ]
    )
    content = table_bytes(random.choice([ROWS, TEXTS, PAIRS]), suffix, random)
    pack = {"gz": gzip.compress, "xz": lzma.compress}.get(suffix.rpartition(".")[2], bytes)
    path = folder / f"rows.{suffix}"
    path.write_bytes(damaged(pack(content), random) if random.random() < 0.5 else pack(damaged(content, random)))
    return read_as_data(path, random)


def odd_rows(random: Random, folder: Path) -> Work:
    rows = json.loads(json.dumps(random.choice([ROWS, ROWS, TEXTS, PAIRS])))
    for _ in range(random.randint(1, 2)):
        place = random.randrange(len(rows))
        rows[place] = changed(rows[place], random)
    suffix = random.choice(["jsonl", "jsonl", "json", "csv", "parquet"])
    (folder / f"rows.{suffix}").write_bytes(table_bytes(rows, suffix, random))
    return read_as_data(folder / f"rows.{suffix}", random)


def odd_settings(random: Random, folder: Path) -> Work:
    names = [field.name for field in fields(RunConfig)]
    values = [
        *ODD,
        "lora",
        "qlora",
        "full",
        "fsdp",
        "pp",
        "1e9",
        "nan",
        "-0",
        "1_000",
        "on",
        "None",
        "[1]",
        "adamw_torch",
    ]
    chosen = {random.choice(names): random.choice(values) for _ in range(random.randint(1, 4))}
    if random.random() < 0.4:
        words = [word for name, value in chosen.items() for word in (f"--{name}", str(value).replace("\0", ""))]
        return lambda: parse_overrides(RunConfig(), words)
    written = yaml.safe_dump({name: value for name, value in chosen.items() if value != "\ud800"})
    bombs = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    others = [
        bombs, "model: *x\n", "&a [*a]\n", "model: !!python/object/apply:os.getcwd []\n", "? [a]\n: b\n", "a: b: c\n",
        "{" * 5_000, "- " * 5_000, "<<: {model: x}\n", "seed: !!binary aGk=\n", "seed: 2026-13-45\n",
        "seed: 1\nseed: 2\n",
        "--- a\n--- b\n", "\t", "'", "%YAML 9.9\n---\n", "seed: !!int x\n", "seed: !!set {a, b}\n", "max_steps: 1:2\n",
    ]  # fmt: skip
    content = random.choice([written.encode(), damaged(written.encode(), random), random.choice(others).encode()])
    (folder / "settings.yaml").write_bytes(content)
    return lambda: parse_overrides(RunConfig(), ["--config", str(folder / "settings.yaml")])


def odd_files(model: Path, random: Random) -> None:
    """Make some of a model's files odd."""
    names = sorted(path.name for path in model.iterdir() if path.suffix != ".md")
    more = {"config.json": MORE_OF_CONFIG, "tokenizer_config.json": MORE_OF_TOKENIZER}
    jsons = [name for name in names if name.endswith(".json")]
    for name in random.sample([*names, *["config.json"] * 3, "tokenizer_config.json"], random.choice([1, 1, 2])):
        path = model / name
        content = path.read_bytes() if path.exists() else b""
        path.unlink(missing_ok=True)
        if name.endswith(".jinja"):
            path.write_bytes(random.choice(TEMPLATES).encode("utf-8", "surrogatepass"))
        elif name in jsons and random.random() < 0.8:
            path.write_bytes(odd_json(content, random, more.get(name)))
        elif name.endswith(".safetensors"):
            odd_weights(path, content, random)
        elif random.random() < 0.7:
            path.write_bytes(damaged(content, random))


def odd_weights(path: Path, content: bytes, random: Random) -> None:
    """Weights that are damaged, or have an odd header, or were pickled."""
    if random.random() < 0.3:
        pickled = random.choice([b"", content[:99], pickle.dumps({"x": 1}), pickle.dumps(os.getcwd), b"PK\3\4"])
        path.with_name("pytorch_model.bin").write_bytes(pickled)
        return
    length = int.from_bytes(content[:8], "little")
    header = odd_json(content[8 : 8 + length], random)
    odd = len(header).to_bytes(8, "little") + header + content[8 + length :]
    path.write_bytes(random.choice([odd, odd, damaged(content, random), content[: random.randrange(len(content))]]))


def linked(source: Path, folder: Path) -> Path:
    """A copy of a folder whose files are links, as they are replaced and not written."""
    return Path(shutil.copytree(source, folder, copy_function=lambda file, place: os.symlink(file, place)))


DATA = {"chat": "exhibits", "summarization": "chat_summaries", "visual_questions": "pictured_exhibits"}


def odd_models(random: Random, folder: Path) -> Work:
    base, task = random.choice(
        [("base", "chat")] * 4 + [("summarizer", "summarization"), ("vision_base", "visual_questions")]
    )
    model = linked(ASSETS / f"embedded_{base}", folder / "my_model")
    odd_files(model, random)
    technique = random.choice(["lora", "full"]) if base == "base" else "full" if base == "summarizer" else "lora"
    run = RunConfig(
        task=task, technique=technique, model=str(model), results_root=str(folder), independent_judge="none",
        weights=random.choice(["pretrained", "pretrained", "random"]), train_rows=8, validation_rows=4, test_rows=4,
        data=str(ASSETS / DATA[task]),
    )  # fmt: skip

    def work() -> None:
        said = said_of(lambda: command(planner, "--model", model, "--gpu", "h100", "--count", "2"))
        assert FAULT not in said
        load_base_model(check_inputs(run), {"": "cpu"})

    return work


@cache
def tuned_run() -> Path:
    """The results folder of a run that has ended well."""
    folder = Path(tempfile.mkdtemp()) / "tuned"
    record = load_record(next(file for file in kept_files() if "2.1_" in str(file)), whole=True)
    run = RunConfig.of_record(record["config"])
    base = load_base_model(run, {"": "cpu"})
    base.save_pretrained(folder / "merged")
    add_lora(base, run).save_pretrained(folder / "adapter")
    for place in ("merged", "adapter"):
        load_tokenizer(run).save_pretrained(folder / place)
    (folder / "run_record.json").write_text(json.dumps(record))
    return folder


MORE_OF_ADAPTER = {
    "rank_pattern": {"(a+)+$": 4}, "alpha_pattern": {"[": 1}, "layers_to_transform": [10**9], "layers_pattern": "x",
    "target_modules": "(.*)*x", "exclude_modules": "(a|a)*$", "modules_to_save": ["lm_head", "x"], "peft_type": "IA3",
    "use_dora": True, "megatron_core": "os", "layer_replication": [[0, 10**6]], "trainable_token_indices": [10**9],
    "loftq_config": {"loftq_bits": 4}, "init_lora_weights": "pissa", "eva_config": {}, "corda_config": {"x": 1},
    "auto_mapping": {"base_model_class": "x", "parent_library": "os"}, "runtime_config": 3, "task_type": "SEQ_CLS",
    "target_parameters": ["x"], "r": 10**7, "lora_bias": True, "base_model_name_or_path": "../x",
    "alora_invocation_tokens": [1],
}  # fmt: skip


def odd_adapters(random: Random, folder: Path) -> Work:
    run = linked(tuned_run(), folder / "tuned")
    for _ in range(random.choice([1, 1, 2])):
        place = random.choice(
            ["adapter/adapter_config.json"] * 5 + ["adapter/adapter_model.safetensors", "merged", "adapter"]
        )
        if place in ("merged", "adapter"):
            odd_files(run / place, random)
            continue
        path = run / place
        content = path.read_bytes() if path.exists() else b""
        path.unlink(missing_ok=True)
        if place.endswith(".safetensors") and content:
            odd_weights(path, content, random)
        elif random.random() < 0.9:
            path.write_bytes(odd_json(content, random, MORE_OF_ADAPTER))
        else:
            path.write_bytes(damaged(content, random))
    to = random.choice(["merged", "adapter", "gguf", "ollama"])

    def work() -> None:
        said = said_of(lambda: command(chat, run, "Who?", "--max_new_tokens", "2"))
        assert FAULT not in said
        command(export, run, "--to", to)

    return work


def odd_records(random: Random, folder: Path) -> Work:
    files = kept_files()
    path = folder / "results" / "tuned" / "run_record.json"
    path.parent.mkdir(parents=True)
    content = random.choice(files).read_bytes()
    path.write_bytes(odd_json(content, random) if random.random() < 0.9 else damaged(content, random))
    other = folder / "results" / "other"
    other.mkdir()
    shutil.copyfile(random.choice(files), other / path.name)

    def work() -> None:
        said = said_of(lambda: command(compare, path.parent, other, "--picture", folder / "compare.png"))
        assert FAULT not in said
        page_and_details([load_record(path, whole=True)], [load_record(path, whole=True)])
        command(chat, path.parent, "Who?")

    return work


KINDS: dict[str, tuple[Callable[[Random, Path], Work], tuple[str, ...]]] = {
    "bytes": (bytes_of_files, ("rows.",)),
    "rows": (odd_rows, ("rows.",)),
    "settings": (odd_settings, ("settings.yaml", "argument", *(field.name for field in fields(RunConfig)))),
    "models": (odd_models, ("my_model", "assets/", *(field.name for field in fields(RunConfig)))),
    "adapters": (odd_adapters, ("tuned", "adapter", "merged", "chat template")),
    "records": (odd_records, ("run_record.json", "tuned")),
}
"""What makes inputs of a kind, and what one of the words of a refusal must be."""


def failure_of(kind: str, number: int) -> str:
    """How an input ends that ends neither well nor in one sentence; else nothing."""
    make, names = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        work = make(Random(f"{kind} {number}"), Path(folder))
        try:
            said = said_of(work).strip()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return f"{kind} {number}: {''.join(traceback.format_exception(error)[-6:])}"
    is_sentence = not said or (any(name in said for name in names) and len(said) > 20 and len(said) < 5_000)
    return "" if is_sentence else f"{kind} {number}: {said}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_input_is_taken_or_refused_in_one_sentence(kind: str) -> None:
    failures = [failure for number in range(INPUTS) if (failure := failure_of(kind, number))]
    assert not failures, "\n\n".join(failures)


if __name__ == "__main__":
    for each in range(int(sys.argv[2]), int(sys.argv[3])):
        print(failure_of(sys.argv[1], each) or f"{sys.argv[1]} {each}: ok", flush=True)
