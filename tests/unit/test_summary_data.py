"""Texts with summaries are read from JSON lists, JSONL and CSV alike, checked by row, and turned into tokens."""

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.data.rows import Splits, texts_of
from common.data.splits import load_splits, tokens_of
from common.data.texts import say_long_texts
from common.models.loading import EMBEDDED_SUMMARIZER

CHATS = "assets/chat_summaries"
ODD_CHAT = 'Ann: She said "no, thanks",\r\nBob: <file_photo> 5 € \u2028too dear, [1]'
FILES = ("train", "val", "test")
Pair = tuple[object, object]


@pytest.fixture
def run() -> RunConfig:
    return RunConfig(task="summarization", technique="full", text_column="dialogue", data=CHATS)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(EMBEDDED_SUMMARIZER)


def samsum_rows(pairs: Sequence[Pair]) -> list[dict[str, object]]:
    """Rows as SAMSum's archive has them."""
    return [{"id": str(n), "summary": summary, "dialogue": text} for n, (text, summary) in enumerate(pairs)]


def write_json(path: Path, pairs: Sequence[Pair]) -> None:
    path.write_text(json.dumps(samsum_rows(pairs), indent=1, ensure_ascii=False), encoding="utf-8")


def write_jsonl(path: Path, pairs: Sequence[Pair]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in samsum_rows(pairs)), encoding="utf-8")


def write_csv(path: Path, pairs: Sequence[Pair]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = samsum_rows(pairs)
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


WRITERS = {"json": write_json, "jsonl": write_jsonl, "csv": write_csv}


def chats(count: int) -> list[Pair]:
    return [(f"Ann: {number}?\r\nBob: Yes.", f"Bob agrees to {number}.") for number in range(count)]


def splits_of(splits: Splits) -> list[list[dict[str, str]]]:
    return [splits.train, splits.validation, splits.test]


# -- what is read


@pytest.mark.parametrize("suffix", WRITERS)
def test_the_three_forms_hold_the_same_rows(tmp_path: Path, run: RunConfig, suffix: str) -> None:
    for number, name in enumerate(FILES):
        WRITERS[suffix](tmp_path / f"{name}.{suffix}", [*chats(4 + number), (ODD_CHAT, " Ann declines. ")])
    found = splits_of(load_splits(replace(run, data=str(tmp_path))))
    assert [len(split) for split in found] == [5, 6, 7]
    assert texts_of(found[1][0]) == ["Ann: 0?\r\nBob: Yes.", "Bob agrees to 0."]
    assert texts_of(found[2][-1]) == [ODD_CHAT, " Ann declines. "]


def test_one_object_per_line_may_be_called_json(tmp_path: Path, run: RunConfig) -> None:
    for name in FILES:
        write_jsonl(tmp_path / f"{name}.json", chats(3))
    assert [len(split) for split in splits_of(load_splits(replace(run, data=str(tmp_path))))] == [3, 3, 3]


def test_the_validation_split_may_be_called_by_its_short_or_its_long_name(tmp_path: Path, run: RunConfig) -> None:
    for number, name in enumerate((*FILES, "validation")):
        write_json(tmp_path / f"{name}.json", chats(2 + number))
    folder = replace(run, data=str(tmp_path))
    assert len(load_splits(folder).validation) == 5  # validation.json, where both are there
    (tmp_path / "validation.json").unlink()
    assert len(load_splits(folder).validation) == 3
    (tmp_path / "val.json").unlink()
    assert [len(split) for split in splits_of(load_splits(folder))] == [1, 1, 4]  # held out of the two training rows
    (tmp_path / "train.json").unlink()
    with pytest.raises(BadInputError, match=r"train\.\w+ does not exist: make it, with the columns 'dialogue'"):
        load_splits(folder)


def test_samsums_own_files_are_read_from_a_url(tmp_path: Path, run: RunConfig) -> None:
    """As from `s3://bucket/samsum`; here the bucket is this process's memory."""
    bucket = fsspec.filesystem("memory")
    for number, name in enumerate(FILES):
        write_json(tmp_path / f"{name}.json", chats(2 + number))
        bucket.put_file(tmp_path / f"{name}.json", f"/samsum/{name}.json")
    splits = splits_of(load_splits(replace(run, data="memory://samsum")))
    assert [len(split) for split in splits] == [2, 3, 4]
    bucket.rm("/samsum/val.json")
    assert [len(split) for split in splits_of(load_splits(replace(run, data="memory://samsum")))] == [1, 1, 4]
    bucket.rm("/samsum/train.json")
    with pytest.raises(BadInputError, match=r"memory://samsum/train\.\w+ does not exist"):
        load_splits(replace(run, data="memory://samsum"))


def test_columns_may_have_other_names(tmp_path: Path, run: RunConfig) -> None:
    path = tmp_path / "all.json"
    path.write_text(json.dumps([{"article": text, "highlights": summary} for text, summary in chats(20)]))
    splits = load_splits(replace(run, data=str(path), text_column="article", summary_column="highlights"))
    assert [len(split) for split in splits_of(splits)] == [16, 2, 2]
    assert set(splits.train[0]) == {"text", "summary", "where"}


def test_a_row_has_its_text_and_its_summary_to_read() -> None:
    assert texts_of({"text": "a", "summary": "b"}) == ["a", "b"]


# -- what is refused


GOOD = samsum_rows(chats(2))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            json.dumps([*GOOD, {"id": "7", "summary": "b"}]),
            "{path}, row 3 has no column 'dialogue' (there are: id, summary): correct it, or pass --text_column with "
            "another name.",
        ),
        (
            json.dumps([{"id": "7", "dialogue": "a"}]),
            "{path}, row 1 has no column 'summary' (there are: id, dialogue): correct it, or pass "
            "--summary_column with another name.",
        ),
        (
            json.dumps([{**GOOD[0], "summary": " \n"}, GOOD[1], {**GOOD[0], "summary": None}]),
            "'summary' is empty in {path}, row 1, row 3: fill or remove these rows.",
        ),
        (
            json.dumps([{**GOOD[0], "dialogue": ["Ann: Yes?", "Bob: No."]}]),
            "{path}, row 1 has \"['Ann: Yes?', 'Bob: No.']\" as 'dialogue', but should have a text: correct it.",
        ),
        (
            json.dumps({"train": GOOD, "val": GOOD}, indent=1),
            "{path}, row 1 has no column 'dialogue' (there are: train, val): correct it, or pass --text_column with "
            "another name.",
        ),
        (json.dumps(["a"]), "{path}, row 1 is 'a', but should have the columns dialogue, summary: correct it."),
        ("7", "{path}, row 1 is '7', but should have the columns dialogue, summary: correct it."),
        ("[]", "The data file {path} is empty: give it at least one text with its summary."),
        ("", "The data file {path} is empty: give it at least one text with its summary."),
        (
            json.dumps(GOOD)[:-1],
            "{path} is no JSON (Expecting ',' delimiter, line 1): correct it, or pass one row per line as .jsonl.",
        ),
        (
            json.dumps(GOOD, indent=1)[:150],
            "{path} is no JSON (Unterminated string starting at, line 10): correct it, or pass one row per line as "
            ".jsonl.",
        ),
        (
            json.dumps(GOOD[0])[:-1],
            f"{{path}}, line 1 is no JSON (Expecting ',' delimiter at column 78; the line ends with "
            f"{json.dumps(GOOD[0])[:-1][-30:]!r}): correct or remove it.",
        ),
    ],
)
def test_a_file_that_is_not_samsum_shaped_is_refused_with_file_and_row(
    tmp_path: Path, run: RunConfig, content: str, said: str
) -> None:
    path = tmp_path / "train.json"
    path.write_text(content)
    with pytest.raises(BadInputError) as refused:
        load_splits(replace(run, data=str(path)))
    assert str(refused.value) == said.format(path=path)


def test_empty_texts_of_csv_and_jsonl_are_refused_with_their_rows(tmp_path: Path, run: RunConfig) -> None:
    rows = [*chats(2), ("", "a"), ("b", "c"), (" ", "d")]
    for suffix, where in (("csv", "row 3, row 5"), ("jsonl", "line 3, line 5")):
        path = tmp_path / f"all.{suffix}"
        WRITERS[suffix](path, rows)
        with pytest.raises(BadInputError) as refused:
            load_splits(replace(run, data=str(path)))
        assert str(refused.value) == f"'dialogue' is empty in {path}, {where}: fill or remove these rows."


# -- what becomes tokens


def test_texts_and_summaries_become_tokens_that_end(run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"text": "Ann: Shall we go bowling?", "summary": "Ann asks."}]
    (row,) = tokens_of(rows, tokenizer, run)
    assert tokenizer.decode(row["input_ids"], skip_special_tokens=True).strip() == rows[0]["text"]
    assert tokenizer.decode(row["labels"], skip_special_tokens=True).strip() == rows[0]["summary"]
    assert row["input_ids"][-1] == row["labels"][-1] == tokenizer.eos_token_id
    assert row["attention_mask"] == [1] * len(row["input_ids"])
    (cut,) = tokens_of(rows, tokenizer, replace(run, max_length=5, max_target_length=3))
    assert (len(cut["input_ids"]), len(cut["labels"])) == (5, 3)
    assert cut["input_ids"][-1] == cut["labels"][-1] == tokenizer.eos_token_id


def test_dialogues_over_the_limit_are_cut_and_counted_or_refused_with_their_rows(
    run: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    short, long = {"text": "Ann: Yes.", "summary": "Yes."}, {"text": "Ann: Yes. " * 20, "summary": "Yes."}
    rows = [{**row, "where": f"a.csv, row {number}"} for number, row in enumerate([short, long, short, long], 1)]
    cutting = replace(run, max_length=20)
    assert say_long_texts(rows, tokenizer, cutting) == "2 of 4 training texts have more than 20 tokens, and are cut"
    assert say_long_texts([short], tokenizer, cutting) == "no training text has more than 20 tokens"
    assert [len(row["input_ids"]) == 20 for row in tokens_of(rows, tokenizer, cutting)] == [False, True, False, True]
    with pytest.raises(BadInputError) as refused:
        tokens_of(rows, tokenizer, replace(cutting, long_texts="refuse"))
    assert str(refused.value) == (
        "2 of 4 texts have more than 20 tokens (a.csv, row 2, 4): raise --max_length, or pass --long_texts cut."
    )
    assert len(tokens_of([short, short], tokenizer, replace(cutting, long_texts="refuse"))) == 2


# -- the shipped chats


def test_the_shipped_chats_have_the_promised_rows_and_no_summary_twice(run: RunConfig) -> None:
    splits = splits_of(load_splits(run))
    assert [len(split) for split in splits] == [1600, 160, 200]
    assert len({row["summary"] for split in splits for row in split}) == 1960
    assert len({row["text"] for split in splits for row in split}) == 1960


def test_no_shipped_chat_is_cut(run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    for split in splits_of(load_splits(run)):
        assert say_long_texts(split, tokenizer, run) == "no training text has more than 256 tokens"


def test_making_the_chats_again_gives_the_same_bytes_and_others_are_noticed(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "assets" / "make_chats.py", tmp_path)
    shutil.copytree(REPOSITORY / CHATS, tmp_path / "chat_summaries")
    made = [sys.executable, str(REPOSITORY / "assets" / "make_chats.py"), "--check"]
    assert subprocess.run(made, check=False).returncode == 0
    spoilt = tmp_path / "chat_summaries" / "val.json"
    spoilt.write_text(spoilt.read_text(encoding="utf-8").replace("Monday", "Mondays", 1), encoding="utf-8")
    command = [sys.executable, str(tmp_path / "make_chats.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 1
    assert checked.stderr == "val.json is not what this script makes: run it without --check\n"


def test_empty_rows_are_skipped_where_that_is_asked_and_counted(
    tmp_path: Path, run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in FILES:
        write_json(tmp_path / f"{name}.json", [*chats(3), ("", "Nothing."), ("Ann: Hm?", " ")])
    run = replace(run, data=str(tmp_path))
    with pytest.raises(BadInputError, match=r"'dialogue' is empty in .*row 4"):
        load_splits(run)
    skipping = replace(run, empty_rows="skip")
    assert [len(split) for split in splits_of(load_splits(skipping))] == [3, 3, 3]
    assert capsys.readouterr().out.splitlines()[0] == "2 of 5 rows have an empty column, and are left out"
    with pytest.raises(BadInputError, match="empty_rows is skip, which is for classification"):
        RunConfig(empty_rows="skip")
