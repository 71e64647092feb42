"""Texts with a label or a summary are read from tables of all kinds, checked by row, and turned into tokens."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.data.rows import Row, Splits, texts_of
from common.data.splits import label_names_of, load_splits, tokens_of
from common.data.texts import label_names, say_balance, say_long_texts, with_classes
from common.models.real_models import minilm_folder
from tests.row_files import put_on_hub, refusal_of, rows_in, rows_of_file, sizes, text_of, write

ODD_CHAT = 'Ann: She said "no, thanks",\r\nBob: <file_photo> 5 € \u2028too\ndear, [1]'
SPLITS = ("train", "validation", "test")
LABELS = RunConfig(task="classification", model="all-minilm-l6-v2")
CHATS = RunConfig(task="summarization", technique="full", text_column="dialogue", data="assets/chat_summaries")


def without_places(rows: Sequence[Row]) -> list[Row]:
    return [{name: value for name, value in row.items() if name != "where"} for row in rows]


def tickets(count: int) -> list[Row]:
    return [{"text": f"text {number}", "label": ("tickets", "events")[number % 2]} for number in range(count)]


def chats(count: int) -> list[Row]:
    """Rows as SAMSum's archive has them."""
    return [
        {"id": str(number), "summary": f"Bob agrees to {number}.", "dialogue": f"Ann: {number}?\r\nBob: Yes."}
        for number in range(count)
    ]


def splits_of(*labels: str) -> Splits:
    """Train, validation and test with these labels."""
    return Splits(
        *(
            [{"text": "a", "label": label, "where": f"rows.csv, row {row}"} for row, label in enumerate(split, 1)]
            for split in labels
        )
    )


# -- what is read


@pytest.mark.parametrize(
    ("suffix", "kind", "place"),
    [("json", "json", "row"), ("jsonl", "jsonl", "line"), ("csv", "csv", "row"), ("json", "jsonl", "line")],
)
def test_all_forms_hold_the_same_rows_and_are_cut_to_the_first(
    suffix: str, kind: str, place: str, tmp_path: Path
) -> None:
    """One object per line may be called JSON, too."""
    odd = {"id": "odd", "summary": " Ann declines. ", "dialogue": ODD_CHAT}
    for number, name in enumerate(("train", "val", "test")):
        write(tmp_path / f"{name}.{suffix}", text_of([*chats(4 + number), odd], kind))
    found = load_splits(replace(CHATS, data=str(tmp_path), train_rows=2))
    assert sizes(found) == (2, 6, 7)
    where = f"{tmp_path / f'train.{suffix}'}, {place} 2"
    assert found.train[1] == {"text": "Ann: 1?\r\nBob: Yes.", "summary": "Bob agrees to 1.", "where": where}
    assert texts_of(found.test[-1]) == [ODD_CHAT, " Ann declines. "]


def test_the_validation_split_may_be_called_by_its_short_or_its_long_name(tmp_path: Path) -> None:
    found = []
    for count, name in zip((4, 3, 4, 5), ("train", "test", "val", "validation"), strict=True):
        write(tmp_path / f"{name}.json", chats(count))
        found.append(sizes(load_splits(replace(CHATS, data=str(tmp_path)))))
    assert found == [(2, 1, 1), (3, 1, 3), (4, 4, 3), (4, 5, 3)], "held out where there is none"


@pytest.mark.parametrize(
    "run",
    [
        replace(LABELS, text_column="message", label_column="topic"),
        replace(CHATS, text_column="article", summary_column="highlights"),
    ],
)
def test_columns_may_have_other_names(run: RunConfig, tmp_path: Path) -> None:
    key = "label" if run.task == "classification" else "summary"
    names = {"text": run.text_column, key: getattr(run, f"{key}_column")}
    rows = [{name: f"a {key} {number % 2}" for key, name in names.items()} for number in range(20)]
    found = rows_in(load_splits(replace(run, data=write(tmp_path / "rows.csv", rows))))
    assert {(row["text"], row[key]) for row in found} == {
        (f"a text {number}", f"a {key} {number}") for number in (0, 1)
    }
    assert set(found[0]) - {"class"} == {"text", key, "where"}


def test_labels_that_are_numbers_are_texts_in_the_order_of_numbers(tmp_path: Path) -> None:
    for name in SPLITS:
        write(tmp_path / f"{name}.jsonl", [{"text": "a", "label": label} for label in (2, 10, 0)])
    run = replace(LABELS, data=str(tmp_path))
    assert label_names(load_splits(run)) == ["0", "2", "10"]
    assert [row["class"] for row in load_splits(run).test] == [1, 2, 0]
    assert label_names_of(run) == ("0", "2", "10")


def test_a_dataset_of_the_hub_is_read_by_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    run, rows = (
        replace(LABELS, data="somebody/messages"),
        [{**row, "label": n % 2} for n, row in enumerate(tickets(20))],
    )
    put_on_hub(monkeypatch, train=rows)
    assert label_names(load_splits(run)) == ["0", "1"]
    refused = refusal_of(replace(run, label_column="topic"))
    assert "somebody/messages, train row 0 has no column 'topic' (there are: text, label" in refused
    put_on_hub(monkeypatch, train=[*rows[:7], {**rows[7], "text": " "}])
    assert "'text' is empty in dataset somebody/messages, train row 7: fill or remov" in refusal_of(run)
    named = Dataset.from_list(rows).cast_column("label", ClassLabel(names=["praise", "blame"]))
    put_on_hub(monkeypatch, train=named)
    assert label_names(load_splits(run)) == ["blame", "praise"]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"], ids=["unix", "windows", "old mac"])
def test_files_of_other_systems_and_of_excel_are_read(tmp_path: Path, line_end: str) -> None:
    path = write(tmp_path / "train.csv", f"\ufefftext,label{line_end}a,x{line_end}")
    assert without_places(rows_of_file(path, LABELS)) == [{"text": "a", "label": "x"}]


# -- what is refused

GOOD = chats(2)
BROKEN = json.dumps(GOOD[0])[:-1]


@pytest.mark.parametrize(
    ("run", "name", "content", "said"),
    [
        (
            LABELS,
            "train.csv",
            "body,topic\na,x\n",
            "{path}, row 1 has no column 'text' (there are: body, topic): correct it, or pass --text_column with "
            "another name.",
        ),
        (
            LABELS,
            "train.csv",
            "text,topic\na,x\n",
            "{path}, row 1 has no column 'label' (there are: text, topic): correct it, or pass --label_column with "
            "another name.",
        ),
        (LABELS, "train.csv", "", "The data file {path} is empty: fill it, with the columns 'text' and 'label'."),
        (
            LABELS,
            "train.csv",
            "text,label\n",
            "The data file {path} is empty: fill it, with the columns 'text' and 'label'.",
        ),
        (
            LABELS,
            "train.csv",
            "text,label\na,x\n ,x\n,x\n",
            "'text' is empty in {path}, row 2, row 3: fill or remove these rows.",
        ),
        (
            LABELS,
            "train.csv",
            "text,label\n" + ",x\n" * 7,
            "'text' is empty in {path}, row 1, row 2, row 3, row 4, row 5, ...: fill or remove these rows.",
        ),
        (
            LABELS,
            "train.csv",
            "text,label\na,x\nb,\nc\n",
            "'label' is empty in {path}, row 2, row 3: fill or remove these rows.",
        ),
        (
            LABELS,
            "train.csv",
            "text,label\na,x\nYes, please,x\n",
            "{path}, row 2 has more fields than columns (text, label): put texts with commas in quotes.",
        ),
        (
            LABELS,
            "train.csv",
            'text,label\na,x\n"b,x\nc,x\n',
            "{path}, row 2 is no CSV (unexpected end of data): correct its quotes, with nothing between a "
            "closing one and the separator, or pass the rows as .jsonl.",
        ),
        (
            LABELS,
            "train.jsonl",
            '{"text": "a", "label": 0}\n[1]\n',
            "{path}, line 2 is '[1]', but should have the columns text, label: correct it.",
        ),
        (
            LABELS,
            "train.jsonl",
            '{"text": "a", "label": 0}\n{}\n',
            "{path}, line 2 has no column 'text' (there are: none): correct it, or pass --text_column with "
            "another name.",
        ),
        (
            LABELS,
            "train.jsonl",
            '{"text": "a", "label": 0}\n{"text": "b", "label": null}\n',
            "'label' is empty in {path}, line 2: fill or remove these rows.",
        ),
        (
            LABELS,
            "train.jsonl",
            '{"text": "a", "label": 0}\n{"text": "\\n", "label": 1}\n',
            "'text' is empty in {path}, line 2: fill or remove these rows.",
        ),
        (
            CHATS,
            "train.json",
            [*GOOD, {"id": "7", "summary": "b"}],
            "{path}, row 3 has no column 'dialogue' (there are: id, summary): correct it, or pass --text_column with "
            "another name.",
        ),
        (
            CHATS,
            "train.json",
            [{"id": "7", "dialogue": "a"}],
            "{path}, row 1 has no column 'summary' (there are: id, dialogue): correct it, or pass "
            "--summary_column with another name.",
        ),
        (
            CHATS,
            "train.json",
            [{**GOOD[0], "summary": " \n"}, GOOD[1], {**GOOD[0], "summary": None}],
            "'summary' is empty in {path}, row 1, row 3: fill or remove these rows.",
        ),
        (
            CHATS,
            "train.json",
            [{**GOOD[0], "dialogue": ["Ann: Yes?", "Bob: No."]}],
            "{path}, row 1 has \"['Ann: Yes?', 'Bob: No.']\" as 'dialogue', but should have a text: correct it.",
        ),
        (
            CHATS,
            "train.json",
            ["a"],
            "{path}, row 1 is 'a', but should have the columns dialogue, summary: correct it.",
        ),
        (CHATS, "train.json", "7", "{path}, row 1 is '7', but should have the columns dialogue, summary: correct it."),
        (
            CHATS,
            "train.json",
            "[]",
            "The data file {path} is empty: fill it, with the columns 'dialogue' and 'summary'.",
        ),
        (CHATS, "train.json", "", "The data file {path} is empty: fill it, with the columns 'dialogue' and 'summary'."),
        (
            CHATS,
            "train.json",
            json.dumps(GOOD)[:-1],
            "{path} is no JSON (Expecting ',' delimiter, line 1): correct it, or pass one row per line as .jsonl.",
        ),
        (
            CHATS,
            "train.json",
            json.dumps(GOOD, indent=1)[:150],
            "{path} is no JSON (Unterminated string starting at, line 10): correct it, or pass one row per line as "
            ".jsonl.",
        ),
        (
            CHATS,
            "train.json",
            BROKEN,
            "{path}, line 1 is no JSON (Expecting ',' delimiter at column 78; the line ends with "
            f"{BROKEN[-30:]!r}): correct or remove it.",
        ),
    ],
)
def test_a_malformed_file_is_refused_in_one_sentence_with_file_and_row(
    run: RunConfig, name: str, content: list[Row] | str | bytes, said: str, tmp_path: Path
) -> None:
    path = write(tmp_path / name, content)
    assert refusal_of(replace(run, data=path)) == said.format(path=path)


def test_a_folder_without_training_rows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = "train.jsonl does not exist: make it, with the columns 'text' and 'label'"
    assert said in refusal_of(replace(LABELS, data=str(tmp_path)))
    assert "held out" not in capsys.readouterr().out


CAFES = "".join(f"Café Zürich Nr. {number} für Gäste,müde\n" for number in range(20))
LAST_LINE = "".join(f"Where is ticket number {number}?,tired\n" for number in range(20)) + "Café?,tired\n"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (CAFES, "cp1252"),
        ("Où est le musée à côté de la forêt?,Derrière l'hôtel\n", "cp1252"),
        ("Was kostet das?,50 €\nWie groß?,schön hoch\n", "cp1252"),
        ("Dov'è il vaso della città?,È più in là, perché sì\n", "cp1252"),
        ("Gdzie jest źródło świętej rzeki?,Książka leży na stole, żółw śpi\nKto?,Zażółć gęślą jaźń\n", "cp1250"),
        (LAST_LINE, "cp1252"),
    ],
)
def test_another_encoding_is_refused_with_the_one_that_is_likely(text: str, encoding: str, tmp_path: Path) -> None:
    """The western code page is preferred where it is possible."""
    whole = f"text,label\n{text if text in (CAFES, LAST_LINE) else text * 40}"
    path = write(tmp_path / "rows.csv", whole.encode(encoding))
    likely = (
        r"rows\.csv is not UTF-8 .* probably (\w+), in which the line reads ['\"](.*)['\"]: save it .*iconv -f (\S+) "
    )
    named = re.search(likely, refusal_of(replace(LABELS, data=path)))
    assert named, "no encoding is named"
    assert named[2] in whole
    assert (named[1].replace("_", "-"), named[3]) == (encoding, encoding)


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_a_compressed_file_is_read(suffix: str, tmp_path: Path) -> None:
    plain, compressed = (write(tmp_path / name, tickets(30)) for name in ("rows.csv", f"rows.csv.{suffix}"))
    assert Path(plain).read_bytes() != Path(compressed).read_bytes()
    of_plain, of_compressed = (load_splits(replace(LABELS, data=data)) for data in (plain, compressed))
    assert of_compressed.map(without_places) == of_plain.map(without_places)


@pytest.mark.parametrize("name", ["rows.zip", "rows.tar.gz", "rows.csv.zip", "rows.tgz", "rows.parquet.gz"])
def test_an_archive_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("text,label\na,x\n")
    assert "is an archive, which is not read: unpack it" in refusal_of(replace(LABELS, data=str(tmp_path / name)))


@pytest.mark.parametrize(
    "there", [("train.csv",), ("train.csv", "test.jsonl"), ("train.csv.gz", "val.csv", "test.csv")]
)
def test_splits_that_a_folder_lacks_are_held_out(
    there: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in there:
        write(tmp_path / file, [{"text": f"{file} {number}", "label": "ab"[number % 2]} for number in range(20)])
    splits, absent = load_splits(replace(LABELS, data=str(tmp_path))), 3 - len(there)
    texts = [row["text"] for row in rows_in(splits)]
    assert len(splits.train) == 20 - 2 * absent
    assert len(set(texts)) == len(texts) == 20 * len(there)
    assert ("held out" in capsys.readouterr().out) == bool(absent)
    assert splits.held_out == (not any(file.startswith("test") for file in there))


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (
            ("yx", "xyzxw", "x"),
            "2 of 5 validation rows (rows.csv, row 3, 5) have labels that no training row has (w, z), but training "
            "knows x, y: correct them, or add such rows to train.",
        ),
        (("yx", "x", "zzzzzz"), "6 of 6 test rows (rows.csv, row 1, 2, 3, 4, 5, ...) have"),
        (("xxx", "x", "y"), "All 3 training rows have the label 'x': there must be two to choose from; look at --data"),
    ],
)
def test_labels_that_cannot_be_learnt_are_refused(labels: tuple[str, ...], said: str) -> None:
    with pytest.raises(BadInputError, match=f"^{re.escape(said)}"):
        with_classes(splits_of(*labels))


def test_empty_rows_are_skipped_where_that_is_asked_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in SPLITS:
        write(tmp_path / f"{name}.json", [*chats(3), {**GOOD[0], "dialogue": ""}, {**GOOD[1], "summary": " "}])
    run = replace(CHATS, data=str(tmp_path))
    assert re.match("'dialogue' is empty in .*row 4", refusal_of(run))
    assert sizes(load_splits(replace(run, empty_rows="skip"))) == (3, 3, 3)
    assert capsys.readouterr().out.splitlines()[0] == "2 of 5 rows have an empty column, and are left out"
    with pytest.raises(BadInputError, match="empty_rows is skip, which is for classification"):
        RunConfig(empty_rows="skip")


# -- what is said, and what becomes tokens


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(minilm_folder())


def test_the_balance_is_said_in_one_line() -> None:
    assert say_balance(splits_of("xxxyxxxyxx", "xy", "x")) == (
        "10 training, 2 validation and 1 test rows; x 80%, y 20%: the largest class has 4.0 times the rows of the "
        "smallest"
    )


def test_texts_are_cut_between_their_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"text": "a ticket", "class": 1}, {"text": "a ticket for the museum, please", "class": 0}]
    short, long = tokens_of(rows, tokenizer, replace(LABELS, max_length=6))
    assert tokenizer.convert_ids_to_tokens(short["input_ids"]) == ["[CLS]", "a", "ticket", "[SEP]"]
    assert tokenizer.convert_ids_to_tokens(long["input_ids"]) == ["[CLS]", "a", "ticket", "for", "the", "[SEP]"]
    assert (short["labels"], long["labels"], short["attention_mask"]) == (1, 0, [1] * 4)


def test_long_texts_are_counted_or_refused_with_their_rows(tokenizer: PreTrainedTokenizerBase) -> None:
    words = (1, 9, 4, 5, 9, 9, 9, 9, 9)
    rows = [{"text": "ticket " * count, "class": 0, "where": f"a.csv, row {row}"} for row, count in enumerate(words, 1)]
    cutting = replace(LABELS, max_length=6)  # with the two special tokens
    refusing = replace(cutting, long_texts="refuse")
    said = f"7 of {len(rows)} training texts have more than 6 tokens, and are cut"
    assert say_long_texts(rows, tokenizer, cutting) == said
    assert say_long_texts(rows[:1], tokenizer, cutting) == "no training text has more than 6 tokens"
    assert len(tokens_of(rows, tokenizer, cutting)) == len(rows)
    assert len(tokens_of(rows[:2], tokenizer, replace(refusing, max_length=11))) == 2
    with pytest.raises(BadInputError, match=r"7 of 9 texts have more .*\(a\.csv, row 2, 4, 5, 6, 7, \.\.\.\)"):
        tokens_of(rows, tokenizer, refusing)
    with pytest.raises(BadInputError, match=r"1 of 2 texts.*\(a\.csv, row 2\): raise --max_length, or pass"):
        tokens_of(rows[:2], tokenizer, refusing)


def test_texts_and_summaries_become_tokens_that_end(summarizers: PreTrainedTokenizerBase) -> None:
    texts, end = ["Ann: Shall we go bowling?", "Ann asks."], summarizers.eos_token_id
    rows = [dict(zip(("text", "summary"), texts, strict=True))]
    (row,) = tokens_of(rows, summarizers, CHATS)
    (cut,) = tokens_of(rows, summarizers, replace(CHATS, max_length=5, max_target_length=3))
    read = summarizers.batch_decode([row["input_ids"], row["labels"]], skip_special_tokens=True)
    assert [text.strip() for text in read] == texts
    assert row["attention_mask"] == [1] * len(row["input_ids"])
    assert (len(cut["input_ids"]), len(cut["labels"])) == (5, 3)
    assert {ids[-1] for ids in (row["input_ids"], row["labels"], cut["input_ids"])} == {end}
    assert cut["labels"] == row["labels"][:3]


# -- the shipped chats


def test_no_shipped_chat_is_cut(summarizers: PreTrainedTokenizerBase) -> None:
    rows = rows_in(load_splits(CHATS))
    assert say_long_texts(rows, summarizers, CHATS) == "no training text has more than 256 tokens"


def test_making_the_chats_again_gives_the_same_bytes_and_others_are_noticed(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "assets" / "make_chats.py", tmp_path)
    shutil.copytree(REPOSITORY / CHATS.data, tmp_path / "chat_summaries")
    spoilt = tmp_path / "chat_summaries" / "val.json"
    spoilt.write_text(spoilt.read_text(encoding="utf-8").replace("Monday", "Mondays", 1), encoding="utf-8")
    shipped, changed = (
        subprocess.run(
            [sys.executable, str(folder / "make_chats.py"), "--check"], capture_output=True, text=True, check=False
        )
        for folder in (REPOSITORY / "assets", tmp_path)
    )
    assert shipped.returncode == 0, shipped.stderr
    assert (changed.returncode, changed.stderr) == (
        1,
        "val.json is not what this script makes: run it without --check\n",
    )
