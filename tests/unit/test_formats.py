"""Rows as people have them become conversations; what is unclear is refused by file, row and column."""

import base64
import csv
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from datasets import Dataset, Features, Image, Value

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.formats import recognise
from common.data.messages import answer_of, question_of, tokenize_messages
from common.data.splits import load_splits
from common.data.templates import prompt_ids
from common.models.loading import load_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "5"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
WITH_TOOL = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "5"},
    {"role": "assistant", "content": "It is 5."},
]
FORMATS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "messages": ({"messages": ASKED}, ASKED),
    "messages with a system message": ({"messages": [SYSTEM, *ASKED]}, [SYSTEM, *ASKED]),
    "messages with tools": ({"messages": WITH_TOOL}, WITH_TOOL),
    "messages with contents in parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "2 + 3?"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "5"}]},
            ]
        },
        [{"role": "user", "content": "What is\n2 + 3?"}, ASKED[1]],
    ),
    "ShareGPT": (
        {
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "What is 2 + 3?"},
                {"from": "gpt", "value": "5"},
            ]
        },
        [SYSTEM, *ASKED],
    ),
    "ShareGPT with a system column": (
        {
            "system": "Be brief.",
            "conversations": [{"from": "human", "value": "What is 2 + 3?"}, {"from": "gpt", "value": "5"}],
        },
        [SYSTEM, *ASKED],
    ),
    "Alpaca": ({"instruction": "What is 2 + 3?", "input": "", "output": "5"}, ASKED),
    "Alpaca with an input": (
        {"instruction": "Add.", "input": "2 + 3", "output": "5"},
        [{"role": "user", "content": "Add.\n\n2 + 3"}, {"role": "assistant", "content": "5"}],
    ),
    "Alpaca with a history": (
        {"instruction": "What is 2 + 3?", "output": "5", "history": [["What is 1 + 1?", "2"]]},
        [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "2"}, *ASKED],
    ),
    "prompt and completion": ({"prompt": "What is 2 + 3?", "completion": "5"}, ASKED),
    "prompt and completion as messages": ({"prompt": [SYSTEM, ASKED[0]], "completion": [ASKED[1]]}, [SYSTEM, *ASKED]),
    "Alpaca with the text that it was written into": (
        {"instruction": "What is 2 + 3?", "input": "", "output": "5", "text": "Below is an instruction."},
        ASKED,
    ),
    "messages with the text that they were written into": ({"messages": ASKED, "text": "user: What is 2 + 3?"}, ASKED),
    "question and answer": ({"question": "What is 2 + 3?", "answer": "5"}, ASKED),
    "an answer that is a number": ({"question": "What is 2 + 3?", "answer": 5}, ASKED),
    "questions and solutions": ({"problem": "What is 2 + 3?", "solution": "5"}, ASKED),
    "capital letters": ({"Query": "What is 2 + 3?", "Response": "5"}, ASKED),
}
"""By name, a row as it stands in a file, and the conversation that it is."""


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, fieldnames=list(rows[0]))
            table.writeheader()
            table.writerows(rows)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_from_a_file_and_from_a_folder(name: str, suffix: str, tmp_path: Path) -> None:
    row, messages = FORMATS[name]
    if suffix == ".csv" and not all(isinstance(value, str) for value in row.values()):
        pytest.skip("a CSV file holds texts")
    rows = [{**row, "id": str(number)} for number in range(5)]
    write(tmp_path / f"rows{suffix}", rows)
    of_file = load_splits(RunConfig(data=str(tmp_path / f"rows{suffix}"), shared_rows="skip"))
    assert [each["messages"] for each in of_file.validation] == [messages]
    for number, split in enumerate(("train", "validation", "test")):
        write(tmp_path / f"{split}{suffix}", rows[number : number + 1])
    of_folder = load_splits(RunConfig(data=str(tmp_path), shared_rows="skip"))
    assert [each["messages"] for each in (*of_folder.validation, *of_folder.test)] == [messages, messages]
    assert [answer_of(each) for each in of_folder.test] == [messages[-1]["content"]]


@pytest.mark.parametrize("answer", ["NaN", "true", "null"])
def test_an_answer_that_is_missing_or_no_text_is_refused(answer: str, tmp_path: Path) -> None:
    good = '{"question": "2 + 3?", "answer": "5"}\n'
    (tmp_path / "rows.jsonl").write_text(good + f'{{"question": "1 + 1?", "answer": {answer}}}\n' + good)
    with pytest.raises(BadInputError, match=r"rows\.jsonl, line 2"):
        load_splits(RunConfig(data=str(tmp_path / "rows.jsonl")))


def test_columns_are_named_by_settings(tmp_path: Path) -> None:
    write(tmp_path / "rows.csv", [{"frage": f"What is {number}?", "antwort": str(number)} for number in range(5)])
    named = RunConfig(data=str(tmp_path / "rows.csv"), prompt_column="frage", completion_column="antwort")
    assert load_splits(named).test[0]["messages"][0]["content"].startswith("What is ")
    with pytest.raises(BadInputError, match=r"columns frage, antwort, which are no format .* --prompt_column"):
        load_splits(RunConfig(data=str(tmp_path / "rows.csv")))
    write(tmp_path / "rows.csv", [{"text": f"What is {number}?", "answer": str(number)} for number in range(5)])
    of_text = replace(named, prompt_column="text", completion_column="answer")
    assert load_splits(of_text).test[0]["messages"][0]["content"].startswith("What is ")


@pytest.mark.parametrize(
    ("columns", "settings", "said"),
    [
        (["a", "b"], {"prompt_column": "c", "completion_column": "b"}, "no column 'c' .*--prompt_column"),
        (["a", "b"], {"prompt_column": "a"}, "prompt_column is 'a', but completion_column is empty"),
        (["prompt", "chosen", "rejected"], {}, "these are pairs of answers"),
        (["prompt", "completion", "label"], {}, "good or bad"),
        (["text", "label"], {}, "go to 3.1"),
        (["dialogue", "summary"], {}, "go to 3.2"),
        ([], {}, "the columns none"),
        (["Frage"], {}, "column Frage alone: there is no column of answers"),
    ],
)
def test_columns_that_are_no_conversation_are_refused(columns: list[str], settings: dict[str, str], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        recognise(columns, RunConfig(**settings), "rows.csv")


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"question": "a", "answer": "b"}, r"row 2 .*no 'instruction' .*columns: question, answer.* read as Alpaca"),
        ({"instruction": "a", "output": None}, "line 2 has no 'output'"),
        ("a", "line 2 is 'a', but should have columns"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, r"line 2 cannot be read as Alpaca .*'history'"),
        ({"instruction": "a", "output": ["b"]}, "line 2 has a message without a text"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"], ["e", ""]]}, "line 2 has an empty assistant"),
    ],
)
def test_a_row_of_another_format_is_refused_with_file_and_row(second: object, said: str, tmp_path: Path) -> None:
    rows = [{"instruction": "a", "output": "b"}, second]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(BadInputError, match=said.replace("row 2", "rows.jsonl, line 2")):
        load_splits(RunConfig(data=str(tmp_path / "rows.jsonl")))


PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")
PARTS = [{"type": "text", "text": "What is this?"}, {"type": "image", "image": "a.png"}]
CHATS, PAIR = {"messages": ASKED, "images": [], "file_name": "notes.txt"}, {"question": "a", "answer": "b"}


@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        (CHATS, {"messages": [{"role": "user", "content": PARTS}, ASKED[1]]}, "a part of the type 'image'"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "text"}]}, ASKED[1]]}, "without a text"),
        (CHATS, {"messages": ASKED, "images": ["a.png"]}, "column 'images'"),
        (PAIR, {**PAIR, "Image": "https://host/a"}, "column 'Image'"),
        (PAIR, {**PAIR, "file_name": "0001.PNG"}, "column 'file_name'"),
        (PAIR, {**PAIR, "seen": [{"bytes": None, "path": "a.png"}]}, "column 'seen'"),
    ],
)
def test_a_row_with_a_picture_is_refused(good: dict[str, Any], bad: dict[str, Any], said: str, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [good, bad])
    with pytest.raises(BadInputError, match=rf"rows\.jsonl, line 2 has .*{said}"):
        load_splits(RunConfig(data=str(tmp_path / "rows.jsonl")))


@pytest.mark.parametrize("column", ["image", "picture"])
def test_a_parquet_file_with_pictures_is_refused_unless_the_texts_are_named(column: str, tmp_path: Path) -> None:
    rows = [{column: {"bytes": PIXEL, "path": None}, "question": f"{number}?", "answer": "a"} for number in range(3)]
    features = Features({column: Image(), "question": Value("string"), "answer": Value("string")})
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    run = RunConfig(data=str(tmp_path / "rows.parquet"))
    with pytest.raises(BadInputError, match=rf"rows\.parquet, row 1 has pictures in the column '{column}'"):
        load_splits(run)
    assert load_splits(replace(run, prompt_column="question", completion_column="answer")).train


@pytest.mark.parametrize("folder", [".", "train"])
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_folder_of_pictures_is_refused_by_its_file_of_texts(folder: str, suffix: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    write(tmp_path / folder / f"metadata.{suffix}", [{"file_name": "0.png", **PAIR}])
    with pytest.raises(BadInputError, match=rf"metadata\.{suffix} makes .* a folder of pictures"):
        load_splits(RunConfig(data=str(tmp_path)))


@pytest.mark.parametrize(
    ("row", "renamed"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "completion"),
        ({"prompt": [ASKED[0]], "chosen": [ASKED[1]], "rejected": [ASKED[1]]}, "completion"),
        ({"chosen": ASKED, "rejected": ASKED}, "messages"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_preferences_are_refused_and_their_chosen_answers_are_read_as_advised(
    row: dict[str, Any], renamed: str, suffix: str, tmp_path: Path
) -> None:
    if suffix == ".csv" and isinstance(row["chosen"], list):
        pytest.skip("a CSV file holds texts")
    run = RunConfig(data=str(tmp_path / f"rows{suffix}"), shared_rows="skip")
    write(Path(run.data), [{**row, "id": str(number)} for number in range(3)])
    with pytest.raises(BadInputError, match=r"(line|row) 1 .* these are pairs of answers.* rename that column"):
        load_splits(run)
    row = {renamed if name == "chosen" else name: value for name, value in row.items()}
    write(Path(run.data), [{**row, "id": str(number)} for number in range(3)])
    assert load_splits(run).test[0]["messages"][-1]["role"] == "assistant"


@pytest.mark.parametrize("speaker", ["alien", ["user"], None])
def test_an_unknown_speaker_is_refused_with_those_that_are_known(speaker: object, tmp_path: Path) -> None:
    row = {"conversations": [{"from": speaker, "value": "a"}, {"from": "gpt", "value": "b"}]}
    write(tmp_path / "rows.jsonl", [row])
    with pytest.raises(BadInputError, match=r"rows.jsonl, line 1 has a message of the role .*, but the roles are"):
        load_splits(RunConfig(data=str(tmp_path / "rows.jsonl")))


def test_a_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,answer,answer\na,b,c\n")
    with pytest.raises(BadInputError, match=r"rows\.csv has the column 'answer' more than once"):
        load_splits(RunConfig(data=str(tmp_path / "rows.csv")))


PAIRS = [("Wo ist sie, die Vase?", "Im Saal; links"), ('Sie heißt "Rot"', "1,5 m\thoch"), ("Was?", "Wer")]


@pytest.mark.parametrize(
    ("name", "delimiter"),
    [("rows.csv", ";"), ("rows.csv", "\t"), ("rows.csv", ","), ("rows.tsv", "\t"), ("rows.tsv.gz", "\t")],
)
def test_a_table_is_read_with_the_delimiter_of_its_header(
    name: str, delimiter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    with fsspec.open(path, "wt", newline="", compression="infer") as file:
        csv.writer(file, delimiter=delimiter).writerows([("question", "answer"), *PAIRS])
    splits = load_splits(RunConfig(data=str(path)))
    rows = [row["messages"] for row in (*splits.train, *splits.validation, *splits.test)]
    assert sorted((asked["content"], said["content"]) for asked, said in rows) == sorted(PAIRS)
    assert ("between the columns" in capsys.readouterr().out) == (name == "rows.csv" and delimiter != ",")


def test_a_delimiter_inside_quotes_of_the_header_divides_nothing(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('"a;b;c;d",question,answer\n' + "x,Where?,Here\n" * 3)
    row = load_splits(RunConfig(data=str(tmp_path / "rows.csv"), shared_rows="skip")).test[0]
    assert [message["content"] for message in row["messages"]] == ["Where?", "Here"]
    (tmp_path / "rows.csv").write_text("question;answer\na;b;c\n")
    with pytest.raises(BadInputError, match=r"row 1 has more fields than columns .* semicolons in quotes"):
        load_splits(RunConfig(data=str(tmp_path / "rows.csv")))


@pytest.mark.parametrize("name", ["faq.xlsx", "faq"])
def test_a_file_of_another_kind_is_refused_with_those_that_are_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(BadInputError, match=rf"{name} is no kind of file that is read \(.jsonl, .*\.csv"):
        load_splits(RunConfig(data=str(tmp_path / name)))


def test_a_line_that_breaks_off_is_refused_with_the_place_and_its_end(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "Where?", "answer":\n')
    with pytest.raises(BadInputError, match=r"line 1 is no JSON \(.* column 33; the line ends with .*\"answer\":'"):
        load_splits(RunConfig(data=str(tmp_path / "rows.jsonl")))


def test_a_row_that_the_chat_template_refuses_is_named() -> None:
    """The default's template knows no tools."""
    row = {"messages": WITH_TOOL, "id": "a7", "where": "rows.jsonl, line 3"}
    with pytest.raises(BadInputError, match=r"rows\.jsonl, line 3 \(id 'a7'\), with the turns user, call"):
        tokenize_messages([row], load_tokenizer(RunConfig()), RunConfig())


def test_a_template_that_drops_a_turn_is_refused() -> None:
    tokenizer = load_tokenizer(RunConfig())
    tokenizer.chat_template = (
        "{% for message in messages if message.role != 'system' %}{{ message.content }}{% endfor %}"
    )
    rows = [{"messages": ASKED}, {"messages": [SYSTEM, *ASKED], "where": "rows.csv, row 2"}]
    with pytest.raises(BadInputError, match=r"leaves out 'Be brief\.' of the system message in rows\.csv, row 2:"):
        tokenize_messages(rows, tokenizer, RunConfig())
    with pytest.raises(BadInputError, match="leaves out 'add' of the assistant message"):
        tokenize_messages([{"messages": WITH_TOOL}], tokenizer, RunConfig())


def test_parquet_is_read_and_an_absent_value_is_no_value(tmp_path: Path) -> None:
    rows = [{"question": f"What is {number}?", "answer": str(number), "system": None} for number in range(5)]
    write(tmp_path / "rows.parquet", rows)
    found = load_splits(RunConfig(data=str(tmp_path / "rows.parquet")))
    assert [message["role"] for message in found.test[0]["messages"]] == ["user", "assistant"]
    (tmp_path / "rows.parquet").write_bytes(b"no parquet")
    with pytest.raises(BadInputError, match=r"rows\.parquet cannot be read as Parquet"):
        load_splits(RunConfig(data=str(tmp_path / "rows.parquet")))


@pytest.mark.parametrize("call", ["add", {"function": {}}, {"type": "function"}])
def test_a_call_without_a_name_is_refused(call: object, tmp_path: Path) -> None:
    turns = [WITH_TOOL[0], {**WITH_TOOL[1], "tool_calls": [call]}, *WITH_TOOL[2:]]
    write(tmp_path / "rows.jsonl", [{"messages": turns}])
    with pytest.raises(BadInputError, match=r"rows\.jsonl, line 1 has a call of a tool without a name"):
        load_splits(RunConfig(data=str(tmp_path / "rows.jsonl")))


def test_what_was_recognised_is_said_with_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "rows.json", [{"instruction": f"Say {number}.", "output": str(number)} for number in range(5)])
    load_splits(RunConfig(data=str(tmp_path / "rows.json")))
    said = capsys.readouterr().out
    assert "rows.json: read as Alpaca (instruction, output), 5 rows; the first asks 'Say 0.'" in said


def test_the_first_question_of_a_conversation_is_said_with_its_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        tmp_path / "rows.jsonl",
        [{"messages": [SYSTEM, {**ASKED[0], "content": f"{n} " * 50}, ASKED[1], *ASKED]} for n in range(3)],
    )
    load_splits(RunConfig(data=str(tmp_path / "rows.jsonl")))
    assert f"has 5 messages, and first asks '{'0 ' * 29}0…'" in capsys.readouterr().out
    load_splits(RunConfig())
    assert "read as" not in capsys.readouterr().out, "nothing is said about the embedded rows"


@pytest.mark.parametrize("turns", [[*ASKED, ASKED[0]], WITH_TOOL[:3]])
def test_a_conversation_without_its_last_answer_is_refused(turns: list[dict[str, Any]], tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [{"messages": turns}])
    with pytest.raises(BadInputError, match=rf"line 1 ends with a {turns[-1]['role']} message: an assistant's answer"):
        load_splits(RunConfig(data=str(tmp_path / "rows.jsonl")))


# -- plain text


def texts_of_splits(data: Path) -> list[str]:
    splits = load_splits(RunConfig(data=str(data)))
    return [row["text"] for row in (*splits.train, *splits.validation, *splits.test)]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".txt", ".txt.gz"])
def test_plain_text_is_read(suffix: str, tmp_path: Path) -> None:
    texts = [f"The {number}th exhibit is a bowl.\nIt is of copper." for number in range(6)]
    path = tmp_path / f"rows{suffix}"
    if ".txt" in suffix:
        with fsspec.open(path, "wt", compression="infer") as file:
            file.write("\n\n \n".join(texts) + "\n")
    else:
        write(path, [{"text": text} for text in texts])
    assert sorted(texts_of_splits(path)) == texts


def test_lines_of_a_text_end_the_same_way_whatever_system_wrote_it(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_bytes(b"One bowl.\r\nOf copper.\r\n\r\nTwo.\r\n\r\nThree.\r\n")
    assert sorted(texts_of_splits(tmp_path / "rows.txt")) == ["One bowl.\nOf copper.", "Three.", "Two."]


def test_a_short_text_is_a_row_and_is_continued_from_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("A\n\nB\n\nC\n")
    rows = load_splits(RunConfig(data=str(tmp_path / "rows.txt"))).train
    tokenizer = load_tokenizer(RunConfig())
    assert prompt_ids(rows, tokenizer) == [tokenizer(rows[0]["text"])["input_ids"]]
    assert prompt_ids(rows, tokenizer)[0]


def test_a_text_file_of_one_text_is_told_what_divides_texts(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("One.\nTwo.\nThree.\n")
    with pytest.raises(BadInputError, match="empty lines"):
        load_splits(RunConfig(data=str(tmp_path / "rows.txt")))


@pytest.mark.parametrize("text", [5, "", " ", ["a", "b"]])
def test_a_text_without_anything_to_learn_is_refused_by_its_line(text: object, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [{"text": "A bowl."}, {"text": text}])
    with pytest.raises(BadInputError, match=r"rows\.jsonl, line 2 has .* as its `text`"):
        load_splits(RunConfig(data=str(tmp_path / "rows.jsonl")))


def test_every_token_of_a_text_is_learnt_once_with_the_end_in_pieces() -> None:
    tokenizer = load_tokenizer(RunConfig())
    rows = [{"text": "The Winged Bowl of Kelmor was made by Vance. " * 9}, {"text": "A bowl."}]
    whole = [ids for row in rows for ids in [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]]
    pieces = tokenize_messages(rows, tokenizer, RunConfig(max_length=16))
    assert [token for piece in pieces for token in piece["input_ids"]] == whole
    assert all(piece["labels"] == piece["input_ids"] and 2 <= len(piece["labels"]) <= 16 for piece in pieces)
    with pytest.raises(BadInputError, match="train_on is 'prompt'"):
        tokenize_messages(rows, tokenizer, RunConfig(train_on="prompt"))


@pytest.mark.parametrize(
    "row", [{"text": "A bowl. " * 99}, {"messages": [ASKED[0], {**ASKED[1], "content": "5 " * 99}]}]
)
def test_rows_longer_than_the_model_reads_are_no_reason_for_a_warning(
    row: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(RunConfig())
    monkeypatch.setattr(tokenizer, "model_max_length", 64)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenize_messages([row], tokenizer, RunConfig(max_length=32))
    assert not caplog.records


@pytest.mark.parametrize(
    "text", ["ab", "The Winged Bowl of Kelmor", "\u9752\u9285\u306e\u5668\u3067\u3059", "word " * 500]
)
def test_a_text_is_continued_from_its_opening(text: str) -> None:
    row = {"text": text}
    asked, wanted = question_of(row), answer_of(row)
    assert asked
    assert wanted
    assert text.startswith(asked)
    assert text.removeprefix(asked).lstrip().startswith(wanted)
    assert len(asked) <= 200
    tokenizer = load_tokenizer(RunConfig())
    assert prompt_ids([row], tokenizer) == [tokenizer(asked)["input_ids"]]


def test_tools_of_a_table_are_read(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
    write(tmp_path / "rows.jsonl", [{"messages": ASKED, "tools": json.dumps(tools)}] * 3)
    rows = load_splits(RunConfig(data=str(tmp_path / "rows.jsonl"), shared_rows="skip")).test
    assert rows[0]["tools"] == tools


@pytest.mark.parametrize("tools", ["", " ", "[]", []])
def test_tools_may_be_empty(tools: object, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [{"messages": ASKED, "tools": tools}] * 3)
    rows = load_splits(RunConfig(data=str(tmp_path / "rows.jsonl"), shared_rows="skip")).test
    assert "tools" not in rows[0]


@pytest.mark.parametrize(
    ("tools", "said"), [("add", "no JSON"), ("5", "no list"), ("0", "no list"), (["add"], "no list"), ({}, "no list")]
)
def test_tools_that_are_none_are_refused(tools: object, said: str, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [{"messages": ASKED, "tools": tools}])
    with pytest.raises(BadInputError, match=f"line 1 has `tools` that are {said}"):
        load_splits(RunConfig(data=str(tmp_path / "rows.jsonl")))


def test_a_field_of_a_table_may_be_long(tmp_path: Path) -> None:
    write(tmp_path / "rows.csv", [{"text": str(number) + "a" * 140_000} for number in range(3)])
    assert len(texts_of_splits(tmp_path / "rows.csv")[0]) > 140_000
