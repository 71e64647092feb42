"""Rows as people have them become conversations; what is unclear is refused by file, row and column."""

import base64
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Image, Value
from transformers import PreTrainedTokenizerBase

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.formats import recognise
from common.data.messages import tokenize_messages
from common.data.rows import Row, Splits, answer_of, question_of
from common.data.splits import load_splits
from common.data.templates import prompt_ids
from tests.row_files import refusal_of, rows_in, text_of, write

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


def read(path: Path, content: list[Any] | str | bytes, **settings: Any) -> Splits:
    """Write a file, and read it as a run does."""
    return load_splits(RunConfig(data=write(path, content), shared_rows="skip", **settings))


def refused(path: Path, content: list[Any] | str | bytes) -> str:
    return refusal_of(RunConfig(data=write(path, content)))


def numbered(row: Row, count: int = 3) -> list[Row]:
    return [{**row, "id": str(number)} for number in range(count)]


# -- conversations


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        (name, suffix)
        for name, (row, _) in FORMATS.items()
        for suffix in (".jsonl", ".json", ".csv")
        if suffix != ".csv" or all(isinstance(value, str) for value in row.values())
    ],
)
def test_every_format_is_read_from_a_file_and_from_a_folder(name: str, suffix: str, tmp_path: Path) -> None:
    row, messages = FORMATS[name]
    rows = numbered(row, count=5)
    of_file = read(tmp_path / f"rows{suffix}", rows)
    for number, split in enumerate(("train", "validation", "test")):
        write(tmp_path / f"{split}{suffix}", rows[number : number + 1])
    of_folder = load_splits(RunConfig(data=str(tmp_path), shared_rows="skip"))
    found = [*of_file.validation, *of_folder.validation, *of_folder.test]
    assert [each["messages"] for each in found] == [messages] * 3
    assert answer_of(found[-1]) == messages[-1]["content"]


@pytest.mark.parametrize(("question", "answer"), [("frage", "antwort"), ("text", "answer")])
def test_columns_are_named_by_settings(question: str, answer: str, tmp_path: Path) -> None:
    rows = [{question: f"What is {number}?", answer: str(number)} for number in range(5)]
    found = read(tmp_path / "rows.csv", rows, prompt_column=question, completion_column=answer).test[0]["messages"]
    assert (found[0]["content"], found[1]["role"]) == (f"What is {found[1]['content']}?", "assistant")


@pytest.mark.parametrize(
    ("columns", "settings", "said"),
    [
        (["a", "b"], {"prompt_column": "c", "completion_column": "b"}, "no column 'c' .*--prompt_column"),
        (["a", "b"], {"prompt_column": "a"}, "prompt_column is 'a' and completion_column is ''"),
        (["frage", "antwort"], {}, "columns frage, antwort, which are no format .* --prompt_column"),
        (["prompt", "chosen", "rejected"], {}, "these are pairs of answers.*go to 3.4"),
        (["prompt", "completion", "label"], {}, "good or bad"),
        (["text", "label"], {}, "go to 3.1"),
        (["dialogue", "summary"], {}, "go to 3.2"),
        ([], {}, "the columns none"),
        (["Frage"], {}, "column Frage alone: .* add one, or call the column text"),
    ],
)
def test_columns_that_are_no_conversation_are_refused(columns: list[str], settings: dict[str, str], said: str) -> None:
    with pytest.raises(BadInputError, match=rf"^rows\.csv has .*{said}|^{said}"):
        recognise(columns, RunConfig(**settings), "rows.csv")


CHAT, PAIR, TEXT = {"messages": ASKED}, {"question": "a", "answer": "b"}, {"text": "A bowl."}
ALPACA, SHAREGPT = {"instruction": "a", "output": "b"}, {"conversations": [{"from": "human", "value": "a"}]}
SHAREGPT["conversations"].append({"from": "gpt", "value": "b"})
NO_PICTURES = {"messages": ASKED, "images": [], "file_name": "notes.txt"}


def chat(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(messages)}


def parts(*contents: dict[str, Any]) -> dict[str, Any]:
    return chat({"role": "user", "content": list(contents)}, ASKED[1])


def spoken_by(speaker: object) -> dict[str, Any]:
    return {"conversations": [{"from": speaker, "value": "a"}, {"from": "gpt", "value": "b"}]}


def calling(call: object) -> dict[str, Any]:
    return chat(WITH_TOOL[0], {**WITH_TOOL[1], "tool_calls": [call]}, *WITH_TOOL[2:])


@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        # no conversation, or not to its end
        (CHAT, [1], r"is '\[1\]', but should have columns"),
        (CHAT, {"messages": []}, r"has no list of messages, but '\[\]'"),
        (CHAT, {"messages": ["a"]}, "has 'a' for a message"),
        (CHAT, chat({"role": "user"}), "has a message without a text as `content`"),
        (CHAT, chat(ASKED[0], {"role": "assistant", "content": " "}), "has an empty assistant"),
        (CHAT, chat({"role": "tool", "content": "a"}, ASKED[1]), "has messages of the roles 'tool', "),
        (CHAT, chat(ASKED[1], ASKED[1]), "has messages of the roles 'assistant'"),
        (CHAT, chat(ASKED[1], *ASKED), "has messages of the roles 'assistant', 'user', 'assistant': "),
        (CHAT, chat(ASKED[0], SYSTEM, ASKED[1]), "has messages of the roles 'user', 'system', 'assistant': "),
        (CHAT, chat(ASKED[0]), "ends with a user message: an assistant's answer"),
        (CHAT, chat(*ASKED, ASKED[0]), "ends with a user message: an assistant's answer"),
        (CHAT, chat(*WITH_TOOL[:3]), "ends with a tool message: an assistant's answer"),
        (
            SHAREGPT,
            spoken_by("alien"),
            "has a message of the role 'alien': rename it to one of assistant, system, tool,",
        ),
        (SHAREGPT, spoken_by(["user"]), "has a message of the role .*: rename it"),
        (SHAREGPT, spoken_by(None), "has a message of the role 'None': rename it"),
        # facts and tools
        (CHAT, {**CHAT, "facts": 5}, "has `facts` that are no list of texts"),
        (CHAT, {**CHAT, "tools": "add"}, "has `tools` that are no list of objects: add"),
        (CHAT, {**CHAT, "tools": "5"}, "has `tools` that are no list"),
        (CHAT, {**CHAT, "tools": "0"}, "has `tools` that are no list"),
        (CHAT, {**CHAT, "tools": ["add"]}, "has `tools` that are no list"),
        (CHAT, {**CHAT, "tools": {}}, "has `tools` that are no list"),
        (CHAT, calling("add"), "has a call of a tool without a name"),
        (CHAT, calling({"function": {}}), "has a call of a tool without a name"),
        (CHAT, calling({"type": "function"}), "has a call of a tool without a name"),
        # no answer
        (PAIR, {**PAIR, "answer": float("nan")}, "has a message without a text"),
        (PAIR, {**PAIR, "answer": True}, "has a message without a text"),
        (PAIR, {**PAIR, "answer": None}, "has no 'answer'"),
        # another format
        (ALPACA, PAIR, "has no 'instruction' .*columns: question, answer.* read as Alpaca"),
        (ALPACA, {"instruction": "a", "output": None}, "has no 'output'"),
        (ALPACA, {**ALPACA, "history": ["c"]}, "cannot be read as Alpaca .*'history'"),
        (ALPACA, {**ALPACA, "output": ["b"]}, "has a message without a text"),
        (ALPACA, {**ALPACA, "history": [["c", "d"], ["e", ""]]}, "has an empty assistant"),
        # pictures
        (NO_PICTURES, parts({"type": "image", "image": "a.png"}), "has .*a part of the type 'image'"),
        (NO_PICTURES, parts({"type": "text"}), "has .*without a text"),
        (NO_PICTURES, {**CHAT, "images": ["a.png"]}, "has .*column 'images'"),
        (PAIR, {**PAIR, "Image": "https://host/a"}, "has .*column 'Image'"),
        (PAIR, {**PAIR, "file_name": "0001.PNG"}, "has .*column 'file_name'"),
        (PAIR, {**PAIR, "seen": [{"bytes": None, "path": "a.png"}]}, "has .*column 'seen'"),
        # plain text
        (TEXT, {"text": 5}, "has '5' as its `text`, which is no text"),
        (TEXT, {"text": ["a", "b"]}, "has .* as its `text`, which is no text"),
        (TEXT, {"text": ""}, "has an empty `text`, of which nothing can be learnt: leave the row out"),
        (TEXT, {"text": " "}, "has an empty `text`, of which nothing can be learnt"),
    ],
)
def test_a_row_that_cannot_be_learnt_from_is_refused_by_file_and_line(
    good: Row, bad: object, said: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInputError, match=rf"rows\.jsonl, line 2 {said}"):
        read(tmp_path / "rows.jsonl", [good, bad])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.jsonl", b'{"a": "b"}\n{"a": "\xff"}', "rows.jsonl is not UTF-8 (line 2, byte 18)"),
        ("rows.jsonl", "\n \n", "is empty"),
        (
            "rows.jsonl",
            '{"text": "a"}\n{"text":\n',
            "line 2 is no JSON (Expecting value at column 9; the line ends with '{\"text\":')",
        ),
        ("rows.jsonl", [*numbered(CHAT, 9), {**CHAT, "id": "3"}], "rows.jsonl, line 4, 10)"),
        ("rows.csv", "question,answer,answer\na,b,c\n", "rows.csv has the column 'answer' more than once"),
        (
            "rows.csv",
            "question;answer\na;b;c\n",
            "row 1 has more fields than columns (question, answer): put texts with se",
        ),
        ("rows.parquet", b"no parquet", "rows.parquet cannot be read"),
        ("rows.txt", "One.\nTwo.\nThree.\n", "empty lines divide the texts"),
        ("faq.xlsx", b"PK", "faq.xlsx is no kind of file that is read (.jsonl, "),
        ("faq", b"PK", "faq is no kind of file that is read (.jsonl, "),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(
    name: str, content: list[Any] | str | bytes, said: str, tmp_path: Path
) -> None:
    assert said in refused(tmp_path / name, content)


PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")


@pytest.mark.parametrize("column", ["image", "picture"])
def test_a_parquet_file_with_pictures_is_refused_unless_the_texts_are_named(column: str, tmp_path: Path) -> None:
    rows = [{column: {"bytes": PIXEL, "path": None}, "question": f"{number}?", "answer": "a"} for number in range(3)]
    features = Features({column: Image(), "question": Value("string"), "answer": Value("string")})
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    data = str(tmp_path / "rows.parquet")
    refusal = refusal_of(RunConfig(data=data))
    assert f"rows.parquet, row 1 has pictures in the column '{column}': go to 3.3" in refusal
    assert "-m common.data FILE --task visual_questions --model MODEL`" in refusal
    assert load_splits(RunConfig(data=data, prompt_column="question", completion_column="answer")).train


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "train/metadata.jsonl", "train/metadata.csv"])
def test_a_folder_of_pictures_is_refused_by_its_file_of_texts(name: str, tmp_path: Path) -> None:
    write(tmp_path / name, [{"file_name": "0.png", **PAIR}])
    said = f"{name}, .*pictures in the column 'file_name': go to 3.3"
    assert re.search(said, refusal_of(RunConfig(data=str(tmp_path))))


CHOICES = {
    "texts": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "completion"),
    "messages": ({"prompt": [ASKED[0]], "chosen": [ASKED[1]], "rejected": [ASKED[1]]}, "completion"),
    "conversations": ({"chosen": ASKED, "rejected": ASKED}, "messages"),
}
"""Pairs of answers, and what the column `chosen` is to be called where it is to be learnt alone."""


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [("texts", ".csv"), *((kind, suffix) for kind in CHOICES for suffix in (".jsonl", ".parquet"))],
)
def test_preferences_are_refused_and_their_chosen_answers_are_read_as_advised(
    kind: str, suffix: str, tmp_path: Path
) -> None:
    row, renamed = CHOICES[kind]
    with pytest.raises(BadInputError, match=r"(line|row) 1 .* these are pairs of answers.* rename that column"):
        read(tmp_path / f"rows{suffix}", numbered(row))
    advised = {renamed if name == "chosen" else name: value for name, value in row.items()}
    assert read(tmp_path / f"rows{suffix}", numbered(advised)).test[0]["messages"][-1]["role"] == "assistant"


PAIRS = [("Wo ist sie, die Vase?", "Im Saal; links"), ('Sie heißt "Rot"', "1,5 m\thoch"), ("Was?", "Wer")]


@pytest.mark.parametrize(
    ("name", "delimiter"),
    [("rows.csv", ";"), ("rows.csv", "\t"), ("rows.csv", ","), ("rows.tsv", "\t"), ("rows.tsv.gz", "\t")],
)
def test_a_table_is_read_with_the_delimiter_of_its_header(
    name: str, delimiter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": question, "answer": answer} for question, answer in PAIRS]
    found = rows_in(read(tmp_path / name, text_of(rows, "csv", delimiter)))
    assert sorted(tuple(message["content"] for message in row["messages"]) for row in found) == sorted(PAIRS)
    assert ("between the columns" in capsys.readouterr().out) == (name == "rows.csv" and delimiter != ",")


def test_a_delimiter_inside_quotes_of_the_header_divides_nothing(tmp_path: Path) -> None:
    row = read(tmp_path / "rows.csv", '"a;b;c;d",question,answer\n' + "x,Where?,Here\n" * 3).test[0]
    assert [message["content"] for message in row["messages"]] == ["Where?", "Here"]


def test_an_absent_value_of_parquet_is_no_value(tmp_path: Path) -> None:
    rows = [{"question": f"What is {number}?", "answer": str(number), "system": None} for number in range(5)]
    found = read(tmp_path / "rows.parquet", rows).test[0]
    assert [message["role"] for message in found["messages"]] == ["user", "assistant"]


TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]


@pytest.mark.parametrize(
    ("column", "value", "wanted"),
    [
        ("facts", "copper", ["copper"]),
        ("facts", '["copper", "red"]', ["copper", "red"]),
        ("facts", "", []),
        ("tools", json.dumps(TOOLS), TOOLS),
        ("tools", "", "none"),
        ("tools", " ", "none"),
        ("tools", "[]", "none"),
        ("tools", [], "none"),
    ],
)
def test_facts_and_tools_of_a_table_are_read(column: str, value: object, wanted: object, tmp_path: Path) -> None:
    rows = numbered({"messages": ASKED, column: value})
    assert read(tmp_path / "rows.jsonl", rows).test[0].get(column, "none") == wanted


LONG = [SYSTEM, {**ASKED[0], "content": "0 " * 50}, ASKED[1], *ASKED]


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        (
            "rows.json",
            {"instruction": "Say 0.", "output": "0"},
            "Alpaca (instruction, output), 3 rows; the first asks 'Say 0.'",
        ),
        (
            "rows.jsonl",
            {"messages": LONG},
            f"messages, 3 rows; the first has 5 messages, and first asks '{'0 ' * 29}0…'",
        ),
        (
            "rows.jsonl",
            {"text": "A bowl."},
            "plain text (text), 3 rows; every token is learnt; the first begins 'A bowl.'",
        ),
    ],
)
def test_what_was_recognised_is_said_with_a_row(
    name: str, row: Row, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(tmp_path / name, numbered(row))
    assert f"{name}: read as {said}" in capsys.readouterr().out


def test_nothing_is_said_about_the_embedded_rows(capsys: pytest.CaptureFixture[str]) -> None:
    load_splits(RunConfig())
    assert "read as" not in capsys.readouterr().out


def test_a_row_that_the_chat_template_refuses_is_named(tokenizer: PreTrainedTokenizerBase) -> None:
    """The default's template knows no tools."""
    row = {"messages": WITH_TOOL, "id": "a7", "where": "rows.jsonl, line 3"}
    with pytest.raises(BadInputError, match=r"rows\.jsonl, line 3 \(id 'a7'\), with the turns user, call"):
        tokenize_messages([row], tokenizer, RunConfig())


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [SYSTEM, *ASKED]}, r"'Be brief\.' of the system message in rows\.csv, row 2:"),
        ({"messages": WITH_TOOL}, r"'add' of the assistant message in rows\.csv, row 2:"),
    ],
)
def test_a_template_that_drops_a_turn_is_refused(row: Row, said: str, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = (
        "{% for message in messages if message.role != 'system' %}{{ message.content }}{% endfor %}"
    )
    with pytest.raises(BadInputError, match=f"leaves out {said}"):
        tokenize_messages([CHAT, {**row, "where": "rows.csv, row 2"}], tokenizer, RunConfig())


# -- plain text

BOWLS = [f"The {number}th exhibit is a bowl.\nIt is of copper." for number in range(6)]
PARAGRAPHS = "\n\n \n".join(BOWLS) + "\n"
LONG_TEXTS = [str(number) + "a" * 140_000 for number in range(3)]


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("rows.jsonl", [{"text": text} for text in BOWLS], BOWLS),
        ("rows.json", [{"text": text} for text in BOWLS], BOWLS),
        ("rows.csv", [{"text": text} for text in BOWLS], BOWLS),
        ("rows.csv", [{"text": text} for text in LONG_TEXTS], LONG_TEXTS),
        ("rows.txt", PARAGRAPHS, BOWLS),
        ("rows.txt.gz", PARAGRAPHS, BOWLS),
        ("rows.txt", "A\n\nB\n\nC\n", ["A", "B", "C"]),
        (
            "rows.txt",
            "One bowl.\r\nOf copper.\r\n\r\nThree.\r\n\r\nTwo.\r\n",
            ["One bowl.\nOf copper.", "Three.", "Two."],
        ),
    ],
    ids=["jsonl", "json", "csv", "long fields", "txt", "txt.gz", "short texts", "lines of Windows"],
)
def test_plain_text_is_read(name: str, content: list[Row] | str, texts: list[str], tmp_path: Path) -> None:
    assert sorted(row["text"] for row in rows_in(read(tmp_path / name, content))) == texts


def test_every_token_of_a_text_is_learnt_once_with_the_end_in_pieces(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"text": "The Winged Bowl of Kelmor was made by Vance. " * 9}, {"text": "A bowl."}]
    whole = [ids for row in rows for ids in [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]]
    pieces = tokenize_messages(rows, tokenizer, RunConfig(max_length=16))
    assert [token for piece in pieces for token in piece["input_ids"]] == whole
    assert all(piece["labels"] == piece["input_ids"] and 2 <= len(piece["labels"]) <= 16 for piece in pieces)
    with pytest.raises(BadInputError, match="train_on is 'prompt'"):
        tokenize_messages(rows, tokenizer, RunConfig(train_on="prompt"))


@pytest.mark.parametrize("row", [{"text": "A bowl. " * 99}, chat(ASKED[0], {**ASKED[1], "content": "5 " * 99})])
def test_rows_longer_than_the_model_reads_are_no_reason_for_a_warning(
    row: Row, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.model_max_length = 64
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenize_messages([row], tokenizer, RunConfig(max_length=32))
    assert not caplog.records


@pytest.mark.parametrize(
    "text", ["ab", "The Winged Bowl of Kelmor", "\u9752\u9285\u306e\u5668\u3067\u3059", "word " * 500]
)
def test_a_text_is_continued_from_its_opening(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    asked, wanted = question_of({"text": text}), answer_of({"text": text})
    assert 0 < len(asked) <= 200
    assert wanted
    assert text.startswith(asked)
    assert text.removeprefix(asked).lstrip().startswith(wanted)
    assert prompt_ids([{"text": text}], tokenizer) == [tokenizer(asked)["input_ids"]]


def test_a_text_of_one_letter_is_continued_from_all_of_it(tokenizer: PreTrainedTokenizerBase) -> None:
    assert prompt_ids([{"text": "A"}], tokenizer) == [tokenizer("A")["input_ids"]] != [[]]
