"""Bad data, settings and folders: refused in one sentence before anything is loaded or written, with no traceback."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import nbformat
import papermill
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from nbclient.exceptions import CellTimeoutError, DeadKernelError

from common.base.errors import BadInputError
from common.base.parsing import parse_overrides
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.base.run_folders import literal_of
from common.checks.inputs import check_results_folder
from common.data.splits import load_splits, tokens_of
from common.models.loading import EMBEDDED_BASE, load_base_model, load_tokenizer
from common.planning.device_maps import read_device_map
from common.records.store import load_record
from common.training.checkpoints import MANIFEST_FILE, DamagedCheckpointError, read_manifest
from tests.faults.cases import write_notebook
from tests.row_files import rows_of_file

INPUTS = int(os.environ.get("FUZZED_INPUTS", "100"))
"""For each reader; `make soak` takes more."""
fuzzed = settings(
    max_examples=INPUTS,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
RUN = RunConfig(independent_judge="none")


def row(question: str, answer: str = "In the hall.", **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {**more, "messages": messages}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., RunConfig]:
    """A run on three files of rows; rows that are texts stand as they are."""

    def write_files(train: list, validation: list | None = None, test: list | None = None) -> RunConfig:
        others = {"validation": validation or [row("Which?")], "test": test or [row("Where to?")]}
        for name, rows in {"train": train, **others}.items():
            lines = [each if isinstance(each, str) else json.dumps(each) for each in rows]
            (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8", errors="surrogateescape")
        return replace(RUN, data=str(tmp_path))

    return write_files


# -- rows 17 to 22


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"id": "a7", "text": "x"}, r"train\.jsonl, line 2 \(id 'a7'\) has no 'messages' .its columns: id, text"),
        ({"id": "a7", "messages": [{"role": "user"}]}, r"line 2 \(id 'a7'\) has a message without a text as `content`"),
        ({"id": "a7", "messages": [{"role": "narrator", "content": "x"}]}, r"\(id 'a7'\) .* of the role 'narrator'"),
        ({"messages": [{"role": "user", "content": "x"}] * 2}, "line 2 has messages of the roles 'user', 'user'"),
        (row("Where?", " "), "line 2 has an empty assistant message"),
        ('{"messages": [{"role": "user", "con', r"train\.jsonl, line 2 is no JSON"),
        ('{"id": "caf\udce9"}', r"train\.jsonl is not UTF-8 \(line 2, byte \d+\)"),  # the byte E9
    ],
)
def test_a_bad_row_is_refused_by_file_line_and_id(write: Callable, bad: object, said: str, outcomes: object) -> None:
    with pytest.raises(BadInputError, match=said):
        load_splits(write([row("Who?"), bad]))
    for fault in (17, 18, 20):
        outcomes.keep(fault, "all", "refused by file, line and id")


def test_rows_without_an_answer_in_reach_are_counted_and_refused_above_a_limit(
    capsys: pytest.CaptureFixture[str], outcomes: object
) -> None:
    rows = [row("Where is it? " * 40, id="long-1"), row("Where is it? " * 50, id="long-2"), row("Where?"), row("Who?")]
    rows = [{**row, "where": f"train.jsonl, line {number}"} for number, row in enumerate(rows, 1)]
    tokenizer, run = load_tokenizer(RUN), replace(RUN, max_length=60)
    with pytest.raises(
        BadInputError,
        match=r"line 1 \(id 'long-1'\) has no token to learn .*\(2 of 4 rows have none: train\.jsonl, line 1, 2\)",
    ):
        tokens_of(rows, tokenizer, replace(run, max_truncated_fraction=0.4))
    assert len(tokens_of(rows, tokenizer, replace(run, max_truncated_fraction=0.5))) == 2
    assert "2 of 4 rows have no token to learn within 60 tokens, and are left out" in capsys.readouterr().out
    outcomes.keep(19, "all", "counted; refused above a limit")


def test_an_id_that_stands_twice_is_refused(write: Callable, outcomes: object) -> None:
    with pytest.raises(BadInputError, match=r"The id 'a' stands twice \(.*train\.jsonl, line 1, 3\)"):
        load_splits(write([row("1", id="a"), row("2", id="b"), row("3", id="a")]))
    load_splits(write([row("1", id="a")], test=[row("2", id="a")]))  # splits may count alike
    outcomes.keep(21, "all", "refused by id, file and lines")


def test_a_test_row_that_is_learnt_is_refused_whatever_its_case_and_spacing(write: Callable, outcomes: object) -> None:
    run = write([row("Who?"), row("Where  IS it?"), row("Why?")], test=[row("where is it? ")])
    with pytest.raises(BadInputError, match=r"1 of 3 training rows are also test rows, .*train\.jsonl, line 2\)"):
        load_splits(run)
    assert len(load_splits(replace(run, shared_rows="skip")).train) == 2
    load_splits(write([row("Where is it?", "In the yard.")], test=[row("Where is it?")]))  # the negative control
    outcomes.keep(22, "all", "refused by file and line; of texts with labels or summaries it is said")


@pytest.mark.parametrize("folder", sorted(path.parent for path in REPOSITORY.glob("*/run_0_*/my_workflow_*.py")))
def test_the_shipped_data_raise_no_alarm(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    splits = load_splits(literal_of(folder))
    assert all(len(rows) for rows in (splits.train, splits.validation, splits.test))
    assert "WARNING" not in capsys.readouterr().out


# -- rows 16, 32 and 33


def test_results_that_cannot_be_written_or_are_a_link_are_refused(tmp_path: Path, outcomes: object) -> None:
    check_results_folder(replace(RUN, results_root=str(tmp_path / "new" / "deep")))
    assert not (tmp_path / "new").exists(), "looking makes nothing"
    (tmp_path / "file").touch()
    for name in ("elsewhere", "results"):
        (tmp_path / name).mkdir()
    (tmp_path / "results" / "run").symlink_to(tmp_path / "elsewhere")
    refusals = {
        "/proc/1": r"Nothing can be written into /proc/1/results .*pass --results_root",
        f"{tmp_path / 'file'}": "Nothing can be written",
        f"{tmp_path}": "run is a link to elsewhere",
    }
    for root, said in refusals.items():
        with pytest.raises(BadInputError, match=said):
            check_results_folder(replace(RUN, results_root=root, run_name="run"))
    outcomes.keep(16, "all", "refused before a model is loaded")


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a\0b", "a" * 300, "a/b", ".hidden", "-x", "a b", "..", "a\n"])
def test_a_run_name_that_leads_elsewhere_is_refused(name: str, outcomes: object) -> None:
    with pytest.raises(BadInputError, match=r"cannot name a folder|zero byte"):
        replace(RUN, run_name=name)
    outcomes.keep(33, "all", "refused; nothing is written")


def test_a_model_with_code_of_its_own_is_refused_without_a_question(tmp_path: Path, outcomes: object) -> None:
    canary, folder = tmp_path / "canary", tmp_path / "model"
    shutil.copytree(EMBEDDED_BASE, folder, copy_function=shutil.copyfile)
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "of-its-own", "auto_map": code}))
    (folder / "code.py").write_text(f"open({str(canary)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    run = replace(RUN, model=str(folder))
    for load in (load_tokenizer, lambda run: load_base_model(run, {"": "cpu"})):
        with pytest.raises(BadInputError, match="brings code of its own"):
            load(run)
    assert not canary.exists()
    outcomes.keep(32, "all", "refused without a question")


# -- row 30


@pytest.mark.parametrize(
    ("cell", "ends_with"),
    [("import os; os.kill(os.getpid(), 9)", DeadKernelError), ("import time; time.sleep(600)", CellTimeoutError)],
)
def test_a_kernel_that_dies_or_hangs_ends_papermill_and_keeps_the_notebook(
    tmp_path: Path, cell: str, ends_with: type[Exception], outcomes: object
) -> None:
    out = tmp_path / "out.ipynb"
    with pytest.raises(ends_with):
        papermill.execute_notebook(
            write_notebook(tmp_path / "in.ipynb", "print('before')", cell),
            out,
            execution_timeout=2,
            progress_bar=False,
            autosave_cell_every=0,
        )
    assert "before" in str(nbformat.read(out, 4).cells[0].outputs)
    outcomes.keep(30, "notebooks", "ends with an error; what was done is kept")


# -- anything at all


def refusal_of(work: Callable[[], object]) -> str | None:
    """What is said where input is refused; None where it is taken. Anything else that is raised fails the test."""
    try:
        work()
    except BadInputError as refused:
        return str(refused)
    except SystemExit as usage:  # the command line's parser has said it
        return f"exit code {usage.code}"
    return None


def one_line(said: str | None) -> bool:
    """Taken, or refused in words that end as a sentence of ours does."""
    return said is None or (len(said) > 20 and said[-1] in ".)")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "", 7]), "content": json_values})
    | json_values,
    max_size=4,
)
lines = st.one_of(
    st.text(max_size=60).map(str.encode),
    st.binary(max_size=60),
    json_values.map(json.dumps).map(str.encode),
    st.fixed_dictionaries({"id": json_values, "messages": messages}).map(json.dumps).map(str.encode),
)
files = st.lists(lines, max_size=6).map(b"\n".join)


@given(content=files)
@fuzzed
def test_any_file_of_messages_is_read_or_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    said = refusal_of(lambda: rows_of_file(str(path), RUN))
    assert one_line(said)
    assert said is not None or rows_of_file(str(path), RUN), "what is read has rows"
    assert one_line(refusal_of(lambda: load_splits(replace(RUN, data=str(path)))))


@given(
    content=files,
    suffix=st.sampled_from(["csv", "json", "jsonl"]),
    task=st.sampled_from(["classification", "summarization"]),
)
@fuzzed
def test_any_file_with_columns_is_read_or_refused(content: bytes, suffix: str, task: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{suffix}"
    path.write_bytes(b"text,label,summary\n" * (suffix == "csv") + content)
    assert one_line(refusal_of(lambda: load_splits(RunConfig(task=task, technique="full", data=str(path)))))


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.sampled_from(
    ["lora", "qlora", "full", "ddp", "pp", "fsdp", "zero3", "cuda", "bf16", "sgd", "0", "-1", "1e9", "nan"]
)  # fmt: skip
names = st.sampled_from([field.name for field in fields(RunConfig)])


@given(changes=st.dictionaries(names, values, max_size=5))
@fuzzed
def test_any_setting_is_taken_or_refused(changes: dict[str, object]) -> None:
    said = refusal_of(lambda: RunConfig(**changes))
    assert one_line(said)
    if said is None:
        taken = RunConfig(**changes).to_dict()
        assert all(taken[name] == value for name, value in changes.items() if value == value), "as it was given"


@given(changes=st.dictionaries(names, st.text(max_size=12), max_size=4))
@fuzzed
def test_any_command_line_is_taken_or_refused(changes: dict[str, str]) -> None:
    arguments = [word for name, value in changes.items() for word in (f"--{name}", value)]
    said = refusal_of(lambda: parse_overrides(RunConfig(), arguments))
    assert said in ("exit code 2", None) or one_line(said)


@given(content=st.binary(max_size=80) | json_values.map(json.dumps).map(str.encode))
@fuzzed
def test_any_manifest_record_and_device_map_is_read_or_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / MANIFEST_FILE).write_bytes(content)
    with pytest.raises(DamagedCheckpointError):
        read_manifest(tmp_path)
    with pytest.raises(BadInputError):
        load_record(tmp_path / MANIFEST_FILE)
    assert one_line(refusal_of(lambda: read_device_map(tmp_path / MANIFEST_FILE)))
