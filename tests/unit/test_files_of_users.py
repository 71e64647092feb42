"""Files as people have them are read, or refused with the next step: names, spreadsheets, JSON, folders, bombs."""

import bz2
import gzip
import json
import lzma
import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List, Value
from fsspec.implementations.memory import MemoryFileSystem

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data import files
from common.data.files import TABLES
from common.data.folders import by_names
from common.data.rows import Splits
from common.data.splits import load_splits
from common.data.tables import parse_json
from tests.row_files import refusal_of, rows_in, sizes, write


def rows(count: int = 6, name: str = "bowl") -> list[dict[str, str]]:
    return [{"question": f"Who made {name} {number}?", "answer": f"Vance {number}"} for number in range(count)]


def asked(splits: Splits) -> list[str]:
    return sorted(row["messages"][0]["content"] for row in rows_in(splits))


def asked_in(data: object, **settings: Any) -> list[str]:
    return asked(load_splits(RunConfig(data=str(data), **settings)))


ASKED = sorted(row["question"] for row in rows())
COLUMNS = pd.DataFrame(rows())
CSV = COLUMNS.to_csv(index=False)

# -- names


NAMES = [
    "rows #1",
    "rows?",
    "rows*",
    "rows[1]",
    "a::b",
    "x:y",
    "50%",
    "~rows",
    "Häuser und Gärten",
    "it's",
    "a\nb",
    "{a,b}",
]


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl.gz"])
def test_a_name_is_no_pattern_and_no_url(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours that the name as a pattern would find are not read."""
    monkeypatch.chdir(tmp_path)
    for other in ("rows1", "rows 12", "rowsX", "a", "b"):
        write(tmp_path / f"{other}{suffix}", rows(3, "other"))
    for name in NAMES:
        write(tmp_path / f"{name}{suffix}", rows())
        assert asked_in(tmp_path / f"{name}{suffix}") == ASKED
        assert asked_in(f"{name}{suffix}") == ASKED


def test_a_folders_name_is_no_pattern_and_no_url(tmp_path: Path) -> None:
    for name in NAMES:
        for folder in (tmp_path / name, tmp_path / name / "data.csv"):  # a folder may be called like a file
            write(folder / "train.csv", rows(4))
            write(folder / "test.jsonl", rows()[4:])
            assert asked_in(folder) == ASKED


def test_a_file_url_is_a_file(tmp_path: Path) -> None:
    assert asked_in(f"file://{write(tmp_path / 'a #1.csv', rows())}") == ASKED


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: Path(path).write_bytes(b"\xff\xfe\0\0\xff")])
def test_what_is_no_file_of_text_is_refused_at_once(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "rows.csv")
    assert "rows.csv" in refusal_of(RunConfig(data=str(tmp_path / "rows.csv")))


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/r\xf6ws.csv")
    Path(path).write_text(CSV)
    assert "is not UTF-8" in refusal_of(RunConfig(data=path))


# -- spreadsheets


def with_delimiter(delimiter: str) -> str:
    return COLUMNS.to_csv(index=False, sep=delimiter)


@pytest.mark.parametrize(
    "content",
    [
        "sep=;\n" + with_delimiter(";"),
        '"sep=;"\r\n' + with_delimiter(";"),
        "SEP=^\n" + with_delimiter("^"),
        "sep=\t\n" + with_delimiter("\t"),
        with_delimiter("|"),
        CSV.replace(",", ", "),
        CSV.replace("question,answer", " question , answer "),
        '"question", "answer"\n' + "".join(f'"{row["question"]}", "{row["answer"]}"\n' for row in rows()),
        CSV.replace("\n", ",,\n"),
        CSV.replace("\n", ",\n", 1),
        CSV.replace("answer\n", "answer\n,\n") + ",\n,\n\n , \n",
        COLUMNS.to_csv(),  # with pandas' index
        "\n \n" + CSV,
        CSV.replace("\n", "\r\n"),
        CSV.replace("\n", "\r"),
        CSV.replace("answer", '"answer; in short, or long"').replace(",", ";", 1).replace(",Vance", ";Vance"),
    ],
)  # fmt: skip
def test_a_spreadsheets_csv_is_read(content: str, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", content)
    completion = "answer; in short, or long" if "in short" in content else "answer"
    found = load_splits(RunConfig(data=path, prompt_column="question", completion_column=completion))
    assert asked(found) == ASKED
    assert {row["messages"][1]["content"] for row in rows_in(found)} == {row["answer"] for row in rows()}


def test_cells_with_line_ends_and_quotes_are_whole(tmp_path: Path) -> None:
    texts = ['One\nline, and "more"', "  two: leading spaces\r\n", "three\n\n\nlines", "; | \t,"]
    path = write(
        tmp_path / "rows.csv", [{"question": f"Q{number}", "answer": text} for number, text in enumerate(texts)]
    )
    found = load_splits(RunConfig(data=path))
    assert sorted(row["messages"][1]["content"] for row in rows_in(found)) == sorted(texts)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_a_byte_order_mark_tells_the_encoding(encoding: str, tmp_path: Path) -> None:
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    assert asked_in(write(tmp_path / "rows.csv", f"{mark}sep=;\n{with_delimiter(';')}".encode(encoding))) == ASKED


def test_a_table_that_windows_calls_a_text_is_a_table(tmp_path: Path) -> None:
    assert asked_in(write(tmp_path / "rows.csv.txt", CSV)) == ASKED


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.csv", "question,answer,\nWho?,Vance,and\n", "row 1 has more fields than columns"),
        ("rows.csv", "question,,answer\nWho, and,when?,Vance\n", "row 1 has more fields than columns"),
        ("rows.csv", b"PK\3\4\x14\0\xff", "save it as .csv"),
        ("rows.csv", b"\x1f\x8b\x08\0\xff", "end in .gz"),
        ("rows.csv", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 132\n", "git lfs pull"),
        ("rows.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "git lfs pull"),
    ],
)
def test_a_table_that_would_be_read_wrongly_is_refused(
    name: str, content: str | bytes, said: str, tmp_path: Path
) -> None:
    assert said in refusal_of(RunConfig(data=write(tmp_path / name, content)))


# -- JSON

CHATS = [
    {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": "Me."}]}
    for row in rows()
]


def of_pandas(orient: str) -> str:
    return COLUMNS.to_json(orient=orient)


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"data": rows()}),
        json.dumps({"version": "1.1", "data": rows(), "license": None}, indent=1),
        json.dumps({"type": "text2text", "instances": rows()}),
        json.dumps({"data": CHATS}),
        json.dumps({"data": {"rows": rows()}}),
        json.dumps({"train": rows()}),
        json.dumps({"train": rows(4), "test": rows()[4:]}),
        json.dumps({"training": rows(4), "dev": rows()[4:5], "eval": rows()[5:]}, indent=2),
        json.dumps({"data": {"train": rows(4), "validation": rows()[4:]}}),
        json.dumps({"train": {"question": [row["question"] for row in rows()], "answer": ["a"] * 6}}),
        json.dumps({"messages": [chat["messages"] for chat in CHATS]}),
        pd.DataFrame(CHATS).to_json(),
        *map(of_pandas, ("columns", "index", "split", "table", "records")),
        COLUMNS.to_json(orient="records", lines=True),
        json.dumps(rows(), indent=4),
        json.dumps(CHATS, indent=4),
        "\n\n" + "\n\n".join(map(json.dumps, rows())),
        "\n".join(json.dumps(row, indent=2) for row in rows()),  # as jq writes them
    ],
)
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_json_is_read_whatever_holds_its_rows(content: str, suffix: str, tmp_path: Path) -> None:
    assert asked_in(write(tmp_path / f"rows{suffix}", content)) == ASKED


def test_the_splits_of_a_json_file_are_its_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = {"train_sft": rows(4), "val": rows()[4:5], "test": rows()[5:], "gen": rows(2, "cup")}
    path = write(tmp_path / "rows.json", json.dumps(parts))
    assert "train_sft, val, test, gen" in refusal_of(RunConfig(data=path))
    assert sizes(load_splits(RunConfig(data=path, dataset_train_split="train_sft"))) == (4, 1, 1)
    assert "gen" in capsys.readouterr().out, "a split that is not used is named"


def test_one_row_in_a_json_file_is_a_row(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    row = {**CHATS[0], "tools": tools}
    for name in ("train", "validation", "test"):
        question = {"role": "user", "content": f"{name}?"}
        write(tmp_path / f"{name}.json", json.dumps({**row, "messages": [question, row["messages"][1]]}, indent=1))
    found = load_splits(RunConfig(data=str(tmp_path)))
    assert (sizes(found), found.test[0]["tools"]) == ((1, 1, 1), tools)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Who?", "context": [{"title": "t"}], "answer": "Vance"},
        {"Question": "Who?", "facts": [{"text": "t"}], "Answer": 7},
        {"text": "Vance made it.", "spans": [{"text": "Vance"}]},
        {"text": "Vance made it.", "label": "yes", "spans": [{"text": "Vance", "label": "no"}]},
        {"dialogue": "a", "summary": "b", "turns": [{"dialogue": "c", "summary": "d"}]},
        {"prompt": "a", "chosen": "b", "rejected": "c", "tools": [{"name": "look"}]},
        {"messages": CHATS[0]["messages"], "facts": [{"text": "t"}]},
        {"user": {"name": "x"}, "answer": {"name": "y"}},
        {"question": {"text": "x"}, "answer": {"text": "y"}},
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_what_one_row_holds_is_not_taken_for_rows(row: dict[str, Any], indent: int | None) -> None:
    found = parse_json(iter(json.dumps(row, indent=indent).splitlines(keepends=True)), "rows.json")
    assert [each for each, _ in found["train"]] == [row]


def test_rows_by_their_ids_are_rows() -> None:
    found = parse_json(iter([json.dumps({f"id-{number}": row for number, row in enumerate(rows())})]), "rows.json")
    assert [each for each, _ in found["train"]] == rows()


GOOD = json.dumps(rows()[0])


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize(
    "bad",
    [
        '{"question": "a", "answer": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"question": "a", "answer": ' + "[" * 300 + "]" * 300 + "}",
        '{"question": "a", "answer": ' + '{"a":' * 100_000,
        '{"question": "a", "answer": ' + "9" * 5_000 + "}",
        '{"question": "a", "answer": "\\ud83d"}',
        '{"question": "a\\uDE00 b", "answer": "c"}',
    ],
    ids=["deep", "less deep", "open", "long number", "half an emoji", "the other half"],
)
def test_json_that_python_cannot_hold_is_refused_by_its_line(bad: str, suffix: str, tmp_path: Path) -> None:
    assert "line 2" in refusal_of(RunConfig(data=write(tmp_path / f"rows{suffix}", f"{GOOD}\n{bad}\n")))
    assert "list" in refusal_of(RunConfig(data=write(tmp_path / f"list{suffix}", f"[{GOOD}, {bad}]")))


def test_an_emoji_that_is_escaped_is_whole(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.jsonl", "".join(json.dumps({"question": f"{n} 😀", "answer": "b"}) + "\n" for n in "123")
    )
    assert asked_in(path) == ["1 😀", "2 😀", "3 😀"]


# -- folders


def clone(folder: Path) -> Path:
    write(folder / "data" / "train-00000-of-00002.parquet", rows(2))
    write(folder / "data" / "train-00001-of-00002.parquet", rows()[2:4])
    write(folder / "data" / "validation-00000-of-00001.parquet", rows()[4:5])
    write(folder / "data" / "test-00000-of-00001.parquet", rows()[5:])
    for other in (".gitattributes", "LICENSE.txt", "dataset_infos.json", ".git/rows.json"):
        write(folder / other, "text")
    return folder


def named(*names: str, suffix: str = ".jsonl") -> Callable[[Path], Path]:
    """A folder with the six rows, in files of these names."""

    def make(folder: Path) -> Path:
        each = len(rows()) // len(names)
        for number, name in enumerate(names):
            write(folder / f"{name}{suffix}", rows()[number * each : (number + 1) * each])
        return folder

    return make


def saved(**splits: list[dict[str, str]]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for earlier in ([{"question": "old", "answer": "old"}], None):  # its files stay
            parts = {name: Dataset.from_list(earlier or part) for name, part in splits.items()}
            found = parts[""] if "" in parts else DatasetDict(parts)
            shards = 1 if earlier else 2
            found.save_to_disk(folder, num_shards=shards if "" in parts else dict.fromkeys(parts, 1))
        return folder

    return make


CARD = """---
license: mit
configs:
- config_name: short
  data_files:
  - split: train
    path: "sh*/a.csv"
  - split: test
    path: [short/b.csv]
- config_name: long
  default: true
  data_files: long/*
---
# Bowls
"""


def with_card(folder: Path) -> Path:
    write(folder / "README.md", CARD)
    write(folder / "short" / "a.csv", rows(4, "cup"))
    write(folder / "short" / "b.csv", rows(6, "cup")[4:])
    return named("long/x", "long/y", suffix=".csv")(folder)


@pytest.mark.parametrize(
    ("make", "found_sizes"),
    [
        (clone, (4, 1, 1)),
        (named("train-00000-of-00003", "train-00001-of-00003", "train-00002-of-00003"), (4, 1, 1)),
        (named("train-00000-of-00001", "dev-00000-of-00001", "test-00000-of-00001", suffix=".jsonl.gz"), (2, 2, 2)),
        (named("part-00000", "part-00001", suffix=".csv"), (4, 1, 1)),
        (named("part-00000-a.c000", "part-00001-b.c000", suffix=".snappy.parquet"), (4, 1, 1)),
        (named("en/train/0000", "en/train/0001", "en/test/0000", suffix=".parquet"), (3, 1, 2)),
        (named("training", "dev", "eval"), (2, 2, 2)),
        (named("squad_train", "squad-dev_1", "squad-dev_2"), (1, 4, 1)),
        (named("train.1", "train.2", suffix=".json"), (4, 1, 1)),
        (named("mine", "test"), (2, 1, 3)),
        (named("mine", suffix=".json"), (4, 1, 1)),
        (saved(**{"": rows()}), (4, 1, 1)),
        (saved(train=rows(4), test=rows()[4:]), (3, 1, 2)),
        (with_card, (4, 1, 1)),
    ],
)  # fmt: skip
def test_a_folder_of_files_is_read_by_its_splits(
    make: Callable[[Path], Path], found_sizes: tuple[int, ...], tmp_path: Path
) -> None:
    found = load_splits(RunConfig(data=str(make(tmp_path / "my [old] #1 data"))))
    assert (asked(found), sizes(found)) == (ASKED, found_sizes)


def test_a_configuration_of_a_card_is_chosen(tmp_path: Path) -> None:
    data = str(with_card(tmp_path))
    assert sizes(load_splits(RunConfig(data=data, dataset_config="short"))) == (3, 1, 2)
    assert "short, long" in refusal_of(RunConfig(data=data, dataset_config="middle"))
    (tmp_path / "short" / "b.csv").unlink()
    assert "short/b.csv" in refusal_of(RunConfig(data=data, dataset_config="short"))


def test_splits_and_files_of_a_folder_that_are_not_read_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train", "val", "test", "train_old", "other"):
        write(tmp_path / f"{name}.jsonl", rows(2, name))
    write(tmp_path / "train.csv", rows(2))
    assert sizes(load_splits(RunConfig(data=str(tmp_path)))) == (2, 2, 2)
    said = capsys.readouterr().out
    assert all(name in said for name in ("train_old.jsonl", "other.jsonl", "train.csv"))


def test_a_folder_without_rows_is_refused_with_what_it_has(tmp_path: Path) -> None:
    write(tmp_path / "train.xlsx", b"PK")
    assert "there are: train.xlsx" in refusal_of(RunConfig(data=str(tmp_path)))


def test_rows_of_shards_are_named_by_their_files(tmp_path: Path) -> None:
    write(tmp_path / "train-00000-of-00002.jsonl", rows(3))
    write(tmp_path / "train-00001-of-00002.jsonl", [*rows()[3:], {"question": "Who?", "answer": ""}])
    assert "train-00001-of-00002.jsonl, line 4" in refusal_of(RunConfig(data=str(tmp_path)))
    write(tmp_path / "train-00001-of-00002.jsonl", [{**row, "id": "twice"} for row in rows()[3:5]])
    assert "train-00001-of-00002.jsonl, line 1, 2" in refusal_of(RunConfig(data=str(tmp_path)))


def test_names_of_classes_stand_in_parquet_and_saved_files(tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    table = Dataset.from_list([{"text": f"t{n}", "label": n % 2} for n in range(20)], features=features)
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    for data in ("rows.parquet", "saved"):
        found = load_splits(RunConfig(task="classification", model="all-minilm-l6-v2", data=str(tmp_path / data)))
        assert {row["label"] for row in found.train} == {"no", "yes"}


def test_pictures_in_lists_are_read_without_progress_of_their_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"]), "images": List(Image())})
    picture = {"bytes": b"\x89PNG", "path": None}
    found = [{"text": f"t{n}", "label": n % 2, "images": [picture] * n} for n in range(3)]
    table = Dataset.from_list(found, features=features)
    table.to_parquet(tmp_path / "rows.parquet")
    capfd.readouterr()
    read = [row for row, _ in files.splits_of_file(str(tmp_path / "rows.parquet"))["train"]]
    assert read == list(files.with_names(table))
    assert read == [{**row, "label": features["label"].names[row["label"]]} for row in found]
    assert not "".join(capfd.readouterr()), "nothing is cast"


def test_names_alone_decide_about_files() -> None:
    names = ["data/train_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet", "LICENSE.txt"]
    assert by_names(names, TABLES) == {"train_sft": names[:1], "train_gen": names[1:2]}
    assert by_names(["test.csv.txt", "train.csv.gz"], TABLES) == {"test": ["test.csv.txt"], "train": ["train.csv.gz"]}


# -- behind a URL


class Silent(MemoryFileSystem):
    """A host that gives its training rows, and then no answer."""

    protocol = "silent"

    def ls(self, path: str, **settings: Any) -> list[Any]:
        raise ConnectionError("no answer")

    def exists(self, path: str, **settings: Any) -> bool:
        return path.endswith("train.jsonl")


def test_shards_behind_a_url_are_read() -> None:
    write("memory://shards/data/train-00000-of-00002.jsonl", rows(3))
    write("memory://shards/data/train-00001-of-00002.jsonl", rows()[3:])
    assert asked_in("memory://shards") == ASKED


def test_a_host_that_does_not_answer_does_not_make_training_rows_the_test() -> None:
    fsspec.register_implementation("silent", Silent, clobber=True)
    write("memory://museum/train.jsonl", rows())
    assert "no answer" in refusal_of(RunConfig(data="silent://museum"))


@pytest.mark.parametrize(("status", "is_read"), [(404, True), (403, True), (503, False), (None, False)])
def test_http_is_asked_for_each_split(status: int | None, is_read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the answer that there is no such file means that there is none."""

    def exists(self: object, url: str, strict: bool = False) -> bool:
        if url.endswith("/train.jsonl"):
            return True
        error = ConnectionError(f"answer {status}")
        error.status = status
        if strict:
            raise error
        return False

    lines = [json.dumps(row) + "\n" for row in rows()]
    monkeypatch.setattr("fsspec.implementations.http.HTTPFileSystem.exists", exists)
    monkeypatch.setattr(files, "lines_of", lambda *_: iter(lines))
    run = RunConfig(data="https://example.org/museum")
    if is_read:
        assert asked(load_splits(run)) == ASKED
    else:
        assert f"answer {status}" in refusal_of(run)


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz", "rows.csv.gz?download=true"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "cp1252"])
def test_a_file_behind_http_is_read_by_its_begin(name: str, encoding: str, tmp_path: Path) -> None:
    text = CSV.replace("Who", "Wär es, wer")
    write(tmp_path / name.partition("?")[0], text.encode(encoding))
    with HTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        lines = files.lines_of(f"http://127.0.0.1:{server.server_port}/{name}")
        if encoding == "cp1252":
            with pytest.raises(BadInputError, match="is not UTF-8"):
                list(lines)
        else:
            assert "".join(lines) == text
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


# -- bombs


def parquet_bomb(path: Path) -> None:
    table = pa.table({"question": pa.array(["Who?"] * 300_000).dictionary_encode(), "answer": ["Me."] * 300_000})
    pq.write_table(table, path, compression="zstd")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("rows.jsonl.gz", lambda path: path.write_bytes(gzip.compress(b"0" * 2**24, 9))),
        ("rows.jsonl.xz", lambda path: path.write_bytes(lzma.compress(b"\n" * 2**21, preset=1))),
        ("rows.csv.bz2", lambda path: path.write_bytes(bz2.compress(b"question,answer\n" + b"a,b\n" * 2**18))),
        ("rows.parquet", parquet_bomb),
    ],
)
def test_what_becomes_a_thousand_times_its_size_is_refused(
    name: str, make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BOMB_CHARACTERS", 2**20)
    monkeypatch.setattr(files, "PIECE", 2**16)
    monkeypatch.setattr(files, "BOMB_LINES", 2**11)
    make(tmp_path / name)
    start = time.process_time()
    assert name in refusal_of(RunConfig(data=str(tmp_path / name)))
    assert time.process_time() - start < 5


def test_a_line_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE", 2**10)
    monkeypatch.setattr(files, "LONGEST_LINE", 2**14)
    assert "line 2" in refusal_of(
        RunConfig(data=write(tmp_path / "rows.jsonl", f'{GOOD}\n{{"text": "{"a" * 2**15}"}}\n'))
    )
    long = [{**row, "answer": "a" * 3_000} for row in rows()]  # longer than a piece
    assert asked_in(write(tmp_path / "long.jsonl", long)) == ASKED


# -- rows that are held out


@pytest.mark.parametrize(
    "counts", [{"a": 30, "b": 30, "c": 1}, {"a": 59, "b": 1}, {"a": 500, "b": 3, "c": 2}, {"a": 1, "b": 3}]
)
@pytest.mark.parametrize("by_label", [True, False])
def test_each_label_stays_in_training(counts: dict[str, int], by_label: bool, tmp_path: Path) -> None:
    labels = [label for label, count in counts.items() for _ in range(count)]
    labels = labels if by_label else labels[::-1]
    table = [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]
    path = write(tmp_path / "rows.csv", table)
    found = load_splits(RunConfig(task="classification", model="all-minilm-l6-v2", data=path))
    assert {row["label"] for row in found.train} == set(counts)
    assert len({row["text"] for row in rows_in(found)}) == len(labels)
    each = max(1, round(len(labels) / 10))
    assert sizes(found)[1:] == (each, each)


def test_each_label_is_held_out_alike(tmp_path: Path) -> None:
    table = [{"text": f"text {number}", "label": "aaaaaabbbc"[number % 10]} for number in range(400)]
    path = write(tmp_path / "rows.csv", sorted(table, key=lambda row: row["label"]))
    found = load_splits(RunConfig(task="classification", model="all-minilm-l6-v2", data=path))
    for split in (found.validation, found.test):
        counts = Counter(row["label"] for row in split)
        assert all(abs(counts[label] - wanted) <= 1 for label, wanted in (("a", 24), ("b", 12), ("c", 4)))


def test_too_few_rows_of_each_label_are_refused_for_what_they_are(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", [{"text": f"text {label}", "label": label} for label in "abcd"])
    assert "at least 6 rows" in refusal_of(RunConfig(task="classification", model="all-minilm-l6-v2", data=path))
