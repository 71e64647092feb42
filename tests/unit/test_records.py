"""A record is checked when it is read: one that is bad is named and passed over, and hides no other."""

import copy
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import compare, report
from bench.compare import found_runs, json_of, text_of
from bench.page import page
from bench.page.runs import divided
from bench.tables import pages
from bench.tables.pages import on_screen
from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.records import store
from common.records.schema import wrong_in
from common.records.store import (
    RECORD_NAME,
    Record,
    kept_files,
    kept_records,
    load_record,
    records_in,
)
from common.reporting.rows import result_files, results_of_this_machine, task_of
from common.reporting.tables import side_by_side
from common.serving.tuned_runs import find_run

LORA = REPOSITORY / "2.1_lora_finetuning" / "run_0_cpu_x1" / "records" / "python-batch16-seed42.json"
REMOVED = "removed"
BAD_VALUES = (REMOVED, None, "x", 10**400, -1, 0, [], {}, math.nan, 1e308, [[1]], {"a": 1}, "\ud800\x1b[2J<!-- ")

Made = Callable[[Path], object]


def text(content: str) -> Made:
    return lambda file: file.write_text(content, encoding="utf-8")


def changed(**values: object) -> Made:
    return lambda file: file.write_text(json.dumps(json.loads(LORA.read_text(encoding="utf-8")) | values))


MALFORMED: dict[str, Made] = {
    "empty": text(""),
    "not JSON": text('{"schema_version": 2,'),
    "not UTF-8": lambda file: file.write_bytes(LORA.read_bytes() + b"\xff\xfe"),
    "a list": text("[]"),
    "a number of 5,000 digits": text("1" * 5000),
    "nested deeply": text("[" * 100_000),
    "another schema": changed(schema_version=99),
    "a folder": lambda file: file.mkdir(),
    "a link to nothing": lambda file: file.symlink_to("nowhere"),
    "a link to itself": lambda file: file.symlink_to(file),
    "a pipe": lambda file: os.mkfifo(file),
    "no status": changed(status=None),
    "another status": changed(status="done"),
    "settings that are a list": changed(config=[]),
    "a memory that is none": changed(memory=["much"]),
    "no time": changed(train_time_s=math.nan),
    "an endless time": changed(train_time_s=math.inf),
    "a huge time": changed(train_time_s=10**400),
    "no steps": changed(steps=0),
    "a name that leads elsewhere": changed(run_name="../../elsewhere"),
    "a folder that leads elsewhere": changed(run_folder="../elsewhere"),
    "an absolute folder": changed(run_folder="/tmp"),
    "no quality": changed(quality={}),
    "losses that are texts": changed(training_losses=[["1", "2"]]),
    "a setting that no run has": lambda file: file.write_text(
        LORA.read_text().replace('"data": "', '"data": "\\u0000')
    ),
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A results folder with two runs."""
    for name in ("a", "z"):
        (tmp_path / name).mkdir()
        changed(run_name=name)(tmp_path / name / RECORD_NAME)
    return tmp_path


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_bad_record_is_named_in_one_line_and_the_others_are_read(
    kind: str, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = results / "bad" / RECORD_NAME
    bad.parent.mkdir()
    MALFORMED[kind](bad)
    assert [run["run_name"] for run in results_of_this_machine(results)] == ["a", "z"]
    assert [run["run_name"] for run in found_runs([str(results)]).values()] == ["a", "z"]
    said = capsys.readouterr().err.splitlines()
    assert [str(bad) in line and line.isprintable() for line in said] == [True], "once, however often it is read"
    with pytest.raises(BadInputError):
        load_record(bad)
    with pytest.raises(BadInputError):
        find_run(str(bad.parent))


def test_why_a_value_is_bad_is_said_as_a_sentence() -> None:
    record = json.loads(LORA.read_text(encoding="utf-8"))
    assert not wrong_in(record)
    for bad in (
        {"run_folder": "/etc"},
        {"run_name": "../there"},
        {"technique": "dora"},
        {"parallel": "hsdp", "steps": "a"},
    ):
        said = wrong_in(record | bad)
        name, value = next(iter(bad.items()))
        assert said.startswith(f"{name} is {value!r} (it is no ")
        assert ("besides: 1" in said) == (len(bad) > 1)
    said = wrong_in(record | {"config": {**record["config"], "task": "counting"}})
    assert said.startswith("task is 'counting': choose one of 'chat', ")


def test_a_completed_run_without_a_figure_is_left_out_and_a_failed_one_is_not(results: Path) -> None:
    record = json.loads(LORA.read_text(encoding="utf-8"))
    del record["quality"]["after"]["similarity_score"], record["tokens_per_s"], record["config"]["devices"]
    file = results / "a" / RECORD_NAME
    file.write_text(json.dumps(record))
    with pytest.raises(BadInputError, match="similarity_score") as refused:
        load_record(file, whole=True)
    assert [name in str(refused.value) for name in ("tokens_per_s", "config.devices")] == [True, True]
    file.write_text(json.dumps(record | {"status": "oom"}))
    assert len(results_of_this_machine(results)) == 2


def test_every_kept_record_is_whole() -> None:
    for folders in (store.KEPT, store.STUDY):
        assert len(kept_records(folders)) == len(kept_files(folders)) > 10


def test_a_bad_kept_record_is_an_error_of_the_check_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = tmp_path / "2.1_x" / "run_0" / "records"
    records.mkdir(parents=True)
    (records / "good.json").write_bytes(LORA.read_bytes())
    (records / "bad.json").write_text("{}")
    (tmp_path / "README.md").write_text("nothing to render")
    (tmp_path / "page.html").write_text("the page")
    monkeypatch.setattr(store, "REPOSITORY", tmp_path)
    for name, value in {
        "REPOSITORY": tmp_path, "PAGE": tmp_path / "page.html", "page_of": lambda _: "the page",
    }.items():  # fmt: skip
        monkeypatch.setattr(report, name, value)
    monkeypatch.setattr(pages, "readmes", lambda: [tmp_path / "README.md"])
    for mode, code in (("--check", 1), ("--write", 0)):
        monkeypatch.setattr(sys, "argv", ["report", mode])
        with pytest.raises(SystemExit) as ended:
            report.main()
        assert ended.value.code == code
    assert "bad.json" in capsys.readouterr().err


# -- each value of a record in turn


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*at, key))


def with_value(record: Record, place: tuple[Any, ...], value: object) -> Record:
    record = copy.deepcopy(record)
    within = record
    for key in place[:-1]:
        within = within[key]
    if value == REMOVED:
        del within[place[-1]]
    else:
        within[place[-1]] = value
    return record


def read_by_all(record: Record, beside: list[Record], tables: list[str]) -> None:
    """Show a record in each way, beside others."""
    runs = [record, *beside]
    if record["status"] == "completed":
        assert "<" not in page.page_of([record])[0].partition('type="application/json">')[2].partition("<")[0]
        divided(record)
    if task_of(record) == "chat":
        on_screen(side_by_side(runs))
    for said in (text_of, json_of):
        compare.printable(said(runs, Path("p")))
    for table in tables:
        pages.rendered(table, runs)


def check_each_value(file: Path, folder: Path, bad_values: tuple[object, ...], tables: list[str], every: int) -> int:
    """Read a record with each of its values made bad in turn; return how many of them were taken."""
    record, beside = json.loads(file.read_text(encoding="utf-8")), [load_record(file, whole=True)]
    made = [(place, value) for place in places(record) for value in bad_values]
    taken = 0
    for place, value in made[::every]:
        (folder / "one.json").write_text(json.dumps(with_value(record, place, value)))
        for _, read in records_in([folder / "one.json"]):
            taken += 1
            read_by_all(read, beside, tables)
    return taken


def test_what_is_taken_of_a_record_can_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_library", str)
    assert check_each_value(LORA, tmp_path, BAD_VALUES, ["lora-quality"], every=199) > 0


OWN = {
    "2.1": ["master", "lora-quality", "lora-speed", "memory-by-phase"],
    "2.3": ["qlora-quality", "qlora-speed"],
    "2.6": ["sharding-held", "sharding-traffic", "sharding-quality"],
    "2.7": ["pp-schedules", "pp-losses"],
    "3.1": ["classification-settings", "classification-details"],
    "3.2": ["summarization-loops", "summarization-network"],
    "3.3": ["pictures-settings", "pictures-kinds"],
    "3.4": ["preferences-settings"],
    "3.5": ["rewards-settings"],
}
"""By the number of a folder: tables of its runs."""


@pytest.mark.slow
@pytest.mark.parametrize("number", OWN)
def test_each_value_of_each_kind_of_record_can_be_bad(
    number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "_library", str)
    file = next(iter(sorted(REPOSITORY.glob(f"{number}_*/run_0*/records/*.json"))))
    tables = OWN[number]
    assert check_each_value(file, tmp_path, BAD_VALUES, tables, every=41) > 5


def test_result_files_are_of_runs_that_are_neither_earlier_nor_unfinished(results: Path) -> None:
    (results / "a.previous").mkdir()
    changed()(results / "a.previous" / RECORD_NAME)
    assert [file.parent.name for file in result_files(results)] == ["a", "z"]
