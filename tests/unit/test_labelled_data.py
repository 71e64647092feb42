"""Labelled texts are read from CSV and JSONL alike, checked by row, and numbered in alphabetical order."""

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from datasets import ClassLabel, Dataset, DatasetDict
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.files import read_rows
from common.data.rows import Row, Splits
from common.data.splits import label_names_of, load_splits, row_kind, tokens_of
from common.data.texts import label_names, say_balance, say_long_texts, with_classes
from common.models.minilm import minilm_folder

COLUMNS = ("text", "label")
ODD_TEXT = 'She said "no, thanks",\nand left; it was 5 € \u2028too dear.'
SPLITS = ("train", "validation", "test")


@pytest.fixture
def run() -> RunConfig:
    return RunConfig(task="classification", model="all-minilm-l6-v2")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(minilm_folder())


def read(path: str) -> list[Row]:
    """Return the rows without their places."""
    return without_places(read_rows(path, row_kind(RunConfig(task="classification"))))


def without_places(rows: Sequence[Row]) -> list[Row]:
    return [{name: value for name, value in row.items() if name != "where"} for row in rows]


def rows_of(count: int) -> list[tuple[str, str]]:
    return [(f"text {number}", ("tickets", "events")[number % 2]) for number in range(count)]


def write_csv(path: Path, rows: Sequence[tuple[str, str]], columns: Sequence[str] = COLUMNS) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])
    return str(path)


def write_jsonl(path: Path, rows: Sequence[tuple[object, object]], columns: Sequence[str] = COLUMNS) -> str:
    lines = (json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) for row in rows)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


WRITERS = {"csv": write_csv, "jsonl": write_jsonl}


def splits_of(*labels: Sequence[str]) -> Splits:
    """Train, validation and test with these labels."""
    return Splits(
        *(
            [{"text": "a", "label": label, "where": f"rows.csv, row {row}"} for row, label in enumerate(split, 1)]
            for split in labels
        )
    )


# -- what is read


@pytest.mark.parametrize("suffix", WRITERS)
def test_quotes_commas_and_line_breaks_within_a_text_stay(tmp_path: Path, suffix: str) -> None:
    path = WRITERS[suffix](tmp_path / f"rows.{suffix}", [(ODD_TEXT, "prices"), ("plain", "a, b")])
    assert read(path) == [
        {"text": ODD_TEXT, "label": "prices"},
        {"text": "plain", "label": "a, b"},
    ]


@pytest.mark.parametrize("suffix", WRITERS)
def test_columns_may_have_other_names(tmp_path: Path, run: RunConfig, suffix: str) -> None:
    path = WRITERS[suffix](tmp_path / f"rows.{suffix}", rows_of(20), ("message", "topic"))
    splits = load_splits(replace(run, data=path, text_column="message", label_column="topic"))
    assert set(splits.train[0]) == {"text", "label", "class", "where"}
    assert {row["text"] for split in (splits.train, splits.validation, splits.test) for row in split} == {
        text for text, _ in rows_of(20)
    }


def test_labels_that_are_numbers_are_texts_in_alphabetical_order(tmp_path: Path, run: RunConfig) -> None:
    for name in SPLITS:
        write_jsonl(tmp_path / f"{name}.jsonl", [("a", 2), ("b", 10), ("c", 0)])
    splits = load_splits(replace(run, data=str(tmp_path)))
    assert label_names(splits) == ["0", "10", "2"]
    assert [row["class"] for row in splits.test] == [2, 1, 0]
    assert label_names_of(replace(run, data=str(tmp_path))) == ("0", "10", "2")


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_folder_of_three_files_is_read_and_cut_to_the_first_rows(tmp_path: Path, run: RunConfig, suffix: str) -> None:
    for number, name in enumerate(SPLITS):
        WRITERS[suffix](tmp_path / f"{name}.{suffix}", rows_of(10 + number))
    splits = load_splits(replace(run, data=str(tmp_path), train_rows=4))
    assert [len(split) for split in (splits.train, splits.validation, splits.test)] == [4, 11, 12]
    where = f"{tmp_path / f'train.{suffix}'}, {'row' if suffix == 'csv' else 'line'} 2"
    assert splits.train[1] == {"text": "text 1", "label": "events", "class": 0, "where": where}


def test_of_one_file_a_tenth_each_is_held_out_and_said(
    tmp_path: Path, run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    splits = load_splits(replace(run, data=write_csv(tmp_path / "all.csv", rows_of(40))))
    assert [len(split) for split in (splits.train, splits.validation, splits.test)] == [32, 4, 4]
    assert "all.csv has no validation and no test rows" in capsys.readouterr().out


def test_a_dataset_of_the_hub_is_read_by_its_columns(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": text, "label": number % 2} for number, (text, _) in enumerate(rows_of(20))]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: DatasetDict({"train": Dataset.from_list(rows)}))
    assert label_names(load_splits(replace(run, data="somebody/messages"))) == ["0", "1"]
    named = Dataset.from_list(rows).cast_column("label", ClassLabel(names=["praise", "blame"]))
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: DatasetDict({"train": named}))
    assert label_names(load_splits(replace(run, data="somebody/messages"))) == ["blame", "praise"]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: DatasetDict({"train": Dataset.from_list(rows)}))
    with pytest.raises(
        BadInputError, match=r"somebody/messages, train row 0 has no column 'topic' \(there are: text, label"
    ):
        load_splits(replace(run, data="somebody/messages", label_column="topic"))
    rows[7]["text"] = " "
    with pytest.raises(BadInputError, match="'text' is empty in dataset somebody/messages, train row 7: fill or remov"):
        load_splits(replace(run, data="somebody/messages"))


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"], ids=["unix", "windows", "old mac"])
def test_files_of_other_systems_and_of_excel_are_read(tmp_path: Path, line_end: str) -> None:
    (tmp_path / "train.csv").write_bytes(f"\ufefftext,label{line_end}a,x{line_end}".encode())
    assert read(str(tmp_path / "train.csv")) == [{"text": "a", "label": "x"}]


def test_the_shipped_messages_have_the_promised_rows_and_no_text_twice() -> None:
    splits = load_splits(RunConfig(task="classification", data="assets/visitor_messages"))
    assert [len(split) for split in (splits.train, splits.validation, splits.test)] == [1600, 400, 400]
    assert len(label_names(splits)) == 6
    texts = [row["text"] for split in (splits.train, splits.validation, splits.test) for row in split]
    assert len(set(texts)) == 2400


# -- what is refused


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("body,topic\na,x\n", "train.csv, row 1 has no column 'text' (there are: body, topic): correct it, or"),
        (
            "text,topic\na,x\n",
            "train.csv, row 1 has no column 'label' (there are: text, topic): correct it, or pass --label_",
        ),
        ("", "train.csv is empty: give it at least one row per label."),
        ("text,label\n", "train.csv is empty: give it at least one row per label."),
        ("text,label\na,x\n ,x\n,x\n", "train.csv, row 2, row 3: fill or remove these rows."),
        ("text,label\n" + ",x\n" * 7, "'text' is empty in "),
        ("text,label\n" + ",x\n" * 7, "train.csv, row 1, row 2, row 3, row 4, row 5, ...: fill or remove"),
        ("text,label\na,x\nb,\nc\n", "train.csv, row 2, row 3: fill or remove these rows."),
        ("text,label\na,x\nb,\nc\n", "'label' is empty in "),
        (
            "text,label\na,x\nYes, please,x\n",
            "train.csv, row 2 has more fields than columns (text, label): put texts with commas in quotes.",
        ),
        ('text,label\na,x\n"b,x\nc,x\n', "train.csv, row 2 is no CSV (unexpected end of data): correct its quotes"),
    ],
)
def test_a_malformed_csv_file_is_refused_with_file_and_row(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "train.csv").write_text(content)
    with pytest.raises(BadInputError) as refused:
        read(str(tmp_path / "train.csv"))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is no JSON"),
        ("[1]", "line 2 is '[1]', but should have the columns text, label: correct it."),
        ("{}", "line 2 has no column 'text' (there are: none): correct it, or pass --text_column with"),
        ('{"text": "b"}', "line 2 has no column 'label' (there are: text): correct it, or pass --label_column with"),
        ('{"text": "b", "label": null}', "'label' is empty in "),
        ('{"text": "\\n", "label": 1}', "train.jsonl, line 2: fill or remove these rows."),
    ],
)
def test_a_malformed_line_is_refused_with_file_and_line(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a", "label": 0}\n' + line + "\n")
    with pytest.raises(BadInputError, match=r"train\.jsonl") as refused:
        read(str(tmp_path / "train.jsonl"))
    assert said in str(refused.value)


def test_missing_and_undecodable_files_are_refused(
    tmp_path: Path, run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BadInputError, match=r"train\.\w+ does not exist: make it, with the columns 'text' and 'label'"):
        load_splits(replace(run, data=str(tmp_path)))
    assert "held out" not in capsys.readouterr().out
    (tmp_path / "train.csv").write_bytes(b"text,label\ncaf\xe9,x\n")
    with pytest.raises(BadInputError, match=r"train\.csv is not UTF-8 \(line 2, byte 14\).*: save it as UTF-8"):
        load_splits(replace(run, data=str(tmp_path)))
    with pytest.raises(BadInputError, match=r"with one such file"):
        load_splits(replace(run, data="./no-such-folder"))


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
def test_another_encoding_is_refused_with_the_one_that_is_likely(encoding: str, tmp_path: Path, run: RunConfig) -> None:
    rows = "".join(f"Café Zürich Nr. {number} für Gäste,müde\n" for number in range(20))
    (tmp_path / "rows.csv").write_bytes(f"text,label\n{rows}".encode(encoding))
    with pytest.raises(BadInputError, match=r"rows\.csv is not UTF-8") as refused:
        load_splits(replace(run, data=str(tmp_path / "rows.csv")))
    named = re.search(r"it is probably (\w+), in which the line reads '(.*)'", str(refused.value))
    assert named, refused.value
    assert named[2] in f"text,label\n{rows}"
    assert rows in (tmp_path / "rows.csv").read_bytes().decode(named[1]), "the encoding that is named reads the rows"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("Où est le musée à côté de la forêt?,Derrière l'hôtel\n", "cp1252"),
        ("Was kostet das?,50 €\nWie groß?,schön hoch\n", "cp1252"),
        ("Dov'è il vaso della città?,È più in là, perché sì\n", "cp1252"),
        ("Gdzie jest źródło świętej rzeki?,Książka leży na stole, żółw śpi\nKto?,Zażółć gęślą jaźń\n", "cp1250"),
    ],
)
def test_the_western_code_page_is_preferred_where_it_is_possible(text: str, encoding: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(f"text,label\n{text * 40}".encode(encoding))
    with pytest.raises(BadInputError, match=rf"it is probably {encoding}, .*: save it .*iconv -f {encoding} "):
        read(str(tmp_path / "rows.csv"))


@pytest.mark.parametrize(
    ("name", "is_read"),
    [("rows.csv.gz", True), ("rows.csv.bz2", True), ("rows.csv.xz", True),
     ("rows.zip", False), ("rows.tar.gz", False), ("rows.csv.zip", False), ("rows.tgz", False),
     ("rows.parquet.gz", False)],
)  # fmt: skip
def test_a_compressed_file_is_read_and_an_archive_refused(
    name: str, is_read: bool, tmp_path: Path, run: RunConfig
) -> None:
    plain = "text,label\n" + "".join(f"text {number},{'ab'[number % 2]}\n" for number in range(30))
    for path in (tmp_path / "rows.csv", tmp_path / name):
        with fsspec.open(path, "wb", compression="infer" if is_read else None) as file:
            file.write(plain.encode())
    compressed = replace(run, data=str(tmp_path / name))
    if is_read:
        assert (tmp_path / name).read_bytes() != plain.encode()
        of_plain = load_splits(replace(run, data=str(tmp_path / "rows.csv")))
        assert load_splits(compressed).map(without_places) == of_plain.map(without_places)
        return
    with pytest.raises(BadInputError, match="is an archive, which is not read: unpack it"):
        load_splits(compressed)


@pytest.mark.parametrize(
    "there", [("train.csv",), ("train.csv", "test.jsonl"), ("train.csv.gz", "val.csv", "test.csv")]
)
def test_splits_that_a_folder_lacks_are_held_out(
    there: tuple[str, ...], tmp_path: Path, run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in there:
        rows = [{"text": f"{file} {number}", "label": "ab"[number % 2]} for number in range(20)]
        as_csv = "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in rows)
        with fsspec.open(tmp_path / file, "wt", compression="infer") as opened:
            opened.write("\n".join(map(json.dumps, rows)) if "jsonl" in file else as_csv)
    splits = load_splits(replace(run, data=str(tmp_path)))
    absent = 3 - len(there)
    assert len(splits.train) == 20 - 2 * absent
    texts = [row["text"] for row in (*splits.train, *splits.validation, *splits.test)]
    assert len(set(texts)) == len(texts) == 20 * len(there) if absent < 2 else 20
    assert ("held out" in capsys.readouterr().out) == bool(absent)
    assert splits.held_out == (not any(file.startswith("test") for file in there))


def test_a_label_that_training_does_not_know_is_refused_with_the_rows() -> None:
    with pytest.raises(BadInputError) as refused:
        with_classes(splits_of("yx", "xyzxw", "x"))
    assert str(refused.value) == (
        "2 of 5 validation rows (rows.csv, row 3, 5) have labels that no training row has (w, z), but training knows "
        "x, y: correct them, or add such rows to train."
    )
    with pytest.raises(BadInputError, match=r"6 of \d+ test rows \(rows\.csv, row 1, 2, 3, 4, 5, \.\.\.\) have"):
        with_classes(splits_of("yx", "x", "zzzzzz"))


def test_one_class_only_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"All 3 training rows have the label 'x'.*look at --data and --label_colu"):
        with_classes(splits_of("xxx", "x", "y"))


# -- what is said, and what becomes tokens


def test_the_balance_is_said_in_one_line() -> None:
    said = say_balance(splits_of("xxxyxxxyxx", "xy", "x"))
    assert said == (
        "10 training, 2 validation and 1 test rows; x 80%, y 20%: the largest class has 4.0 times the rows of the "
        "smallest"
    )


def test_texts_are_cut_between_their_special_tokens(run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"text": "a ticket", "class": 1}, {"text": "a ticket for the museum, please", "class": 0}]
    short, long = tokens_of(rows, tokenizer, replace(run, max_length=6))
    assert tokenizer.convert_ids_to_tokens(short["input_ids"]) == ["[CLS]", "a", "ticket", "[SEP]"]
    assert tokenizer.convert_ids_to_tokens(long["input_ids"]) == ["[CLS]", "a", "ticket", "for", "the", "[SEP]"]
    assert (short["labels"], long["labels"], short["attention_mask"]) == (1, 0, [1] * 4)


def test_long_texts_are_counted_or_refused_with_their_rows(run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    words = (1, 9, 4, 5, 9, 9, 9, 9, 9)
    rows = [{"text": "ticket " * count, "class": 0, "where": f"a.csv, row {row}"} for row, count in enumerate(words, 1)]
    at_most_6 = replace(run, max_length=6)  # with the two special tokens
    said = f"7 of {len(rows)} training texts have more than 6 tokens, and are cut"
    assert say_long_texts(rows, tokenizer, at_most_6) == said
    assert say_long_texts(rows[:1], tokenizer, at_most_6) == "no training text has more than 6 tokens"
    assert len(tokens_of(rows, tokenizer, at_most_6)) == len(rows)
    refusing = replace(at_most_6, long_texts="refuse")
    with pytest.raises(BadInputError, match=r"7 of 9 texts have more .*\(a\.csv, row 2, 4, 5, 6, 7, \.\.\.\)"):
        tokens_of(rows, tokenizer, refusing)
    with pytest.raises(BadInputError, match=r"1 of 2 texts.*\(a\.csv, row 2\): raise --max_length, or pass"):
        tokens_of(rows[:2], tokenizer, refusing)
    assert len(tokens_of(rows[:2], tokenizer, replace(refusing, max_length=11))) == 2
